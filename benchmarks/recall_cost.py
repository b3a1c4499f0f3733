"""What kalign adds on the host to the driver call of a recalled launch, measured where there is no device.

Prints one JSON object. ``python benchmarks/recall_cost.py``: operators are called on tensors of the host through the
call path that a GPU's calls take (form, check of the tensors, addresses, prebound launch with its guards), but the
call that would reach the driver is a function of C that takes the same arguments and does nothing. Nanoseconds of this
thread's processor time per call, medians over rounds in which every call takes its turn; ``ours`` is what is left of a
call without the stand-in. ``torch.add(out=)`` on as few elements stands beside them, a kernel on the host included.
What a launch costs on a GPU is what ``dispatch.py`` measures.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

os.environ.update(TRITON_INTERPRET="1", KALIGN_PLATFORM="cpu")

import torch
import triton

import kalign_core as kalign
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hal.triton_compat import Prebound
from kalign_core.session import Session
from kalign_core.settings import Settings

ROUNDS, CALLS = 25, 4000
no_driver: Callable[..., Any] = "".format  # takes whatever it is given, in C
Calls = dict[str, Callable[[], Any]]


class PreboundPlatform(CpuPlatform):
    """The host, its launches prebound as a GPU's are."""

    def launcher(self, *args: Any) -> Any:
        return _Prebound(super().launcher(*args))


class _Prebound:
    """The first call runs the kernel; those that are recalled reach a driver that is none."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        flags = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False,
                 "launch_pdl": False, "arg_annotations": (), "kernel_signature": b""}  # fmt: skip
        self._launch = Prebound(SimpleNamespace(
            run=SimpleNamespace(**flags, launch=no_driver), function=1, packed_metadata=(4, 1, 0),
            launch_metadata=None,
        ))  # fmt: skip

    def __call__(self, *args: Any) -> None:
        self._inner(*args)

    def pin(self, args: Sequence[Any], numbers: tuple[Any, ...]) -> Any:
        return self._launch.pin((1, 1, 1), numbers, 0, None, [0].__getitem__)  # as where there is one device


def calls() -> Calls:
    """What is timed, by name."""
    x, y, weight = torch.randn(2, 128), torch.randn(2, 128), torch.randn(128)
    out, other = torch.empty_like(x), torch.randn(3, 128)
    half, square = x.half(), torch.randn(128, 128).half()
    product = torch.empty_like(half)
    heads, cos, sin = torch.randn(2, 4, 32), torch.randn(2, 16), torch.randn(2, 16)
    sets = itertools.cycle([(torch.randn_like(x), torch.randn_like(x), torch.empty_like(x)) for _ in range(64)])
    turns = itertools.cycle([(x, y), (other, other.clone())])
    ops = kalign.ops

    def with_other_buffers() -> Any:
        a, b, c = next(sets)
        return ops.swiglu(a, b, out=c)

    return {
        "torch.add(out=)": lambda: torch.add(x, y, out=out),
        "the stand-in, 22 arguments": lambda: no_driver(*range(22)),
        "swiglu(out=)": lambda: ops.swiglu(x, y, out=out),
        "swiglu(out=), 64 sets of buffers": with_other_buffers,
        "swiglu": lambda: ops.swiglu(x, y),
        "swiglu, two shapes in turn": lambda: ops.swiglu(*next(turns)),
        "rms_norm": lambda: ops.rms_norm(x, weight),
        "rms_norm(out=)": lambda: ops.rms_norm(x, weight, out=out),
        "rms_norm with a residual": lambda: ops.rms_norm(x, weight, residual=y),
        "matmul(out=)": lambda: ops.matmul(half, square, out=product),
        "rope": lambda: ops.rope(heads, cos, sin),
    }


def block_ns(call: Callable[[], Any]) -> float:
    """Nanoseconds of one call, over a block of them."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - start) / CALLS


def main() -> None:
    session = Session(platform=PreboundPlatform(), configuration=Settings())
    with session.active(), kalign.using(mode="off"), torch.no_grad():
        timed = calls()
        times: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(ROUNDS + 1):
            for name, call in timed.items():
                ns = block_ns(call)
                if number:  # the first round is made of first calls
                    times[name].append(ns)
    medians = {name: round(statistics.median(found)) for name, found in times.items()}
    stand_in = medians["the stand-in, 22 arguments"]
    result = {
        "benchmark": "recall-cost",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
        },
        "command": "python " + " ".join(sys.argv),
        "rounds": ROUNDS, "calls_per_block": CALLS, "host_ns": medians,
        "ours_ns": {name: ns - stand_in for name, ns in medians.items() if not name.startswith(("torch", "the"))},
    }  # fmt: skip
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
