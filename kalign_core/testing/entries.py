"""Devices and decisions that a store is tried with, and the process that writes many of them.

Every field of a decision holds something, and what is text holds what text may hold. Imports neither torch nor triton.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kalign_core.cache.base import Store
from kalign_core.records import Config, Entry, EntryKey, Identity, Toolchain
from kalign_core.settings import Settings
from kalign_core.testing import elsewhere

FLUSHES = 100
TOOLCHAIN = Toolchain.of(driver="580.1", runtime="13.0", torch="2.11.0", triton="3.6.0")
DEVICE = Identity(
    vendor="acme",
    name="ACME Accelerator 1",
    key="ACME-3f9a01c2-0001",
    pci_device_id="1234:5678",
    must_match=(("arch", "a1"), ("memory_gib", 64)),
    provenance=(("firmware", "1.0"), ("power_cap_w", 700)),
)
KEY = EntryKey(
    kernel="rms_norm",
    contract="rms_norm/1",
    problem="T<=4096 H=4096",
    args="x:bf16:row:a16 weight:bf16:a16 out:bf16:row:a16 eps:float index:32",
    phase="train",
    toolchain=TOOLCHAIN,
    source="9c1e000000000000",
    suite="2026.1",
)
_TEXTS = [field.name for field in dataclasses.fields(EntryKey) if field.name != "toolchain"]


def _with(key: EntryKey, field: str, value: Any) -> EntryKey:
    return dataclasses.replace(key, **{field: value})


# Another value for every field of a key.
OTHER_KEYS: dict[str, EntryKey] = {
    **{name: _with(KEY, name, f"{getattr(KEY, name)}0") for name in _TEXTS},
    "toolchain": dataclasses.replace(KEY, toolchain=Toolchain.of(**{**dict(TOOLCHAIN.facts), "triton": "3.6.1"})),
    "a fact more": dataclasses.replace(KEY, toolchain=Toolchain.of(**dict(TOOLCHAIN.facts), assembler="12.8")),
    "a fact less": dataclasses.replace(KEY, toolchain=Toolchain(TOOLCHAIN.facts[1:])),
}
OTHER_DEVICES: dict[str, Identity] = {
    "key": dataclasses.replace(DEVICE, key="ACME-3f9a01c2-0002"),
    "must_match": dataclasses.replace(DEVICE, must_match=(("arch", "a1"), ("memory_gib", 32))),
    "pci_device_id": dataclasses.replace(DEVICE, pci_device_id="1234:5679"),
}
NAMELESS = dataclasses.replace(DEVICE, key="unknown")


def entry(number: int = 0, **changes: Any) -> Entry:
    """A decision with all its evidence, its key a different one for every ``number``."""
    made = Entry(
        key=dataclasses.replace(KEY, problem=f"T<=4096 H={4096 + number}"),
        config=Config(ROWS=2, enable_fp_fusion=False, input_precision="ieee", num_stages=1, num_warps=8),
        tuned_at="T=4096",
        cold_us=18.5,
        warm_us=17.25,
        reference_cold_us=20.5,
        reference_warm_us=19.75,
        mad_us=0.125,
        tried="refused=4 failed=0 refuted=0 timed=20",
        digests=("normals=1f3a", "spread=77c0"),
        decided="2026-11-30T10:31:00Z",
        extra=(("noise", 0.5), ("sm_clock_mhz", 1980)),
    )
    return dataclasses.replace(made, **changes)


def open_store(plugin: str, name: str, folder: Path) -> Store:
    """The store ``name`` of ``plugin`` on the files in ``folder``, as a session opens it."""
    store: Store = elsewhere.store_record(plugin, name).factory(Settings(cache_dir=folder))
    return store


def write(plugin: str, name: str, folder: str, first: str, count: str, meeting: str, writers: str) -> bool:
    """What one of many writing processes does: ``count`` decisions one after another; whether all are on disk.

    It starts when all ``writers`` have opened and read the store, so that none finds the decisions of another ready
    made: they meet in the folder ``meeting``.
    """
    store = open_store(plugin, name, Path(folder))
    store.lookup(DEVICE, entry(int(first)).key)
    elsewhere.meet(Path(meeting), int(writers))
    accepted = [store.put(DEVICE, entry(number)) for number in range(int(first), int(first) + int(count))]
    return flushed(store) and all(accepted)


def flushed(store: Store) -> bool:
    """Whether what was put is on disk: a disk may be slow, or others hold the file, for longer than one flush waits."""
    return any(store.flush() for _ in range(FLUSHES))
