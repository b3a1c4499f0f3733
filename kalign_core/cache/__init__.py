"""Decisions that outlive a process: their keys, the files they are kept in, and what tells why one is not used.

``base`` says what a store is, ``key`` is the one place where keys are built, ``toml_store`` keeps decisions in one TOML
file per device. Nothing here imports torch or triton, and a hit touches no file and takes no lock.
"""
