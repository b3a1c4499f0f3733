"""What the tests of the cache share: a device, a toolchain, a kernel without a compiler, and decisions about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kalign_core.cache.base import Store
from kalign_core.cache.toml_store import TomlStore
from kalign_core.declare import cdiv, data, kernel, powers_of_two, written
from kalign_core.records import Argument, Config, Entry, EntryKey, Identity, Problem, Toolchain
from kalign_core.settings import Settings

TOOLCHAIN = Toolchain.of(driver="580.159.04", cuda="13.0", triton="3.6.0", torch="2.11.0")
DEVICE = Identity(
    vendor="nvidia",
    name="NVIDIA H200",
    key="GPU-11111111-2222-3333-4444-555555555555",
    pci_device_id="10de:2335",
    must_match=(("arch", "sm_90"), ("memory_gib", 139)),
    provenance=(("vbios", "96.00"), ("power_cap_w", 700)),
)


class Jit:
    """Stands where a jit function would: all that kalign's declarations need of one is ``fn``."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn


class constexpr:
    """Marks a parameter whose value is known when compiling."""


def jit(fn: Callable[..., Any]) -> Jit:
    """Stands for ``triton.jit``."""
    return Jit(fn)


@kernel(
    name="scale_rows",
    family="rowwise",
    contract="scale_rows/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "H", strides=("x_stride_t", "x_stride_h")),
        "weight": data("H"),
        "bias": data("H"),
        "out": written("T", "H", strides=("out_stride", 1)),
    },
    reference=Config(BLOCK=128, num_warps=4, enable_fp_fusion=False),
    knobs={"num_warps": (1, 2, 4)},
    grid=lambda p, c: (cdiv(p.T, c.BLOCK),),
)
@jit
def scale_rows(x, weight, bias, out, T, H, x_stride_t, x_stride_h, out_stride, eps, BLOCK: constexpr):
    """A body that nothing runs."""


def scaled(
    T: int = 4096, H: int = 4096, strides: tuple[int, int] | None = None, phase: str = "train", **changes: Any
) -> Problem:
    """A call of ``scale_rows`` whose x has ``strides`` (dense by default); ``changes`` replace arguments by name."""
    strides = (H, 1) if strides is None else strides
    args = {
        "x": Argument("x", "bf16", strides),
        "weight": Argument("weight", "bf16", (1,)),
        "bias": Argument("bias", "none"),
        "out": Argument("out", "bf16", (H, 1)),
        "x_stride_t": Argument("x_stride_t", "int", value=strides[0]),
        "x_stride_h": Argument("x_stride_h", "int", value=strides[1]),
        "out_stride": Argument("out_stride", "int", value=H),
        "eps": Argument("eps", "float", value=1e-6),
    }
    return Problem("scale_rows", (("T", T), ("H", H)), tuple({**args, **changes}.values()), phase)


def key(number: int = 1, **changes: Any) -> EntryKey:
    """A key of its own for every ``number``; ``changes`` replace fields."""
    made = EntryKey(
        kernel="scale_rows",
        contract="scale_rows/1",
        problem=f"T<=4096 H={number}",
        args="x:bf16:row:a16 weight:bf16:a16 bias:none out:bf16:row:a16 x_stride:d16 eps:float index:32",
        phase="train",
        toolchain=TOOLCHAIN,
        source="9c1e000000000000",
        suite="2026.1",
    )
    return dataclasses.replace(made, **changes)


def entry(number: int = 1, **changes: Any) -> Entry:
    """A decision for ``key(number)`` with all its evidence; ``changes`` replace fields."""
    made = Entry(
        key=key(number),
        config=Config(BLOCK=64, num_warps=1 + number % 8, enable_fp_fusion=False),
        tuned_at="T=4096",
        cold_us=18.5,
        warm_us=17.25,
        reference_cold_us=20.4,
        reference_warm_us=19.8,
        mad_us=0.1,
        tried="refused=4 failed=0 refuted=0 timed=20",
        digests=("normals=1f3a", "spread=77c0"),
        decided="2026-11-30T10:31:00Z",
    )
    return dataclasses.replace(made, **changes)


def store_in(folder: Path, lock_wait_s: float = 60.0) -> TomlStore:
    """A store of its own, as another process would have it, on the files in ``folder``."""
    return TomlStore(Settings(cache_dir=folder), lock_wait_s)


def kept(store: Store, identity: Identity, entry: Entry) -> bool:
    """Have ``store`` keep ``entry`` and wait until that is done; whether it is on disk."""
    return store.put(identity, entry) and store.flush()


def write_many(folder: Path, first: int, count: int) -> None:
    """What one of many writing processes does: ``count`` decisions, one after another."""
    store = store_in(folder, lock_wait_s=60.0)
    for number in range(first, first + count):
        if not store.put(DEVICE, entry(number)):
            raise SystemExit(f"decision {number} does not go to disk")
    if not store.flush():
        raise SystemExit("decisions are not on disk")
