"""kalign for NVIDIA devices: a plugin of ``kalign_core``, which knows no vendor.

Five modules, the same as in ``kalign_rocm``, so that a diff of the two folders lists the differences of the vendors.
"""
