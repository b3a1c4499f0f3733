"""Launches named by hand beside the reference and the peers, for every case of one module, in one run on a GPU.

Prints one JSON object. ``python benchmarks/launch_sweep.py [--module cases_pointwise] [--only TEXT] [--jobs 8]``.
Where ``operators.py`` takes what the tuner decides, this times each launch of ``LAUNCHES`` by itself, one kernel
changed at a time, and says which gave other bytes than the reference. Everything is compiled first, by ``--jobs``
processes at once, so that the run holds the device for a minute instead of ten.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = ["torch", "torch.compile", "liger"]


def launches(names: str, *rows: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


POINTWISE = launches("BLOCK num_warps", (512, 2), (512, 4), (512, 8), (1024, 4), (1024, 8), (2048, 8))
COPIES = launches("ELEMENTS num_warps", (2048, 2), (2048, 4), (2048, 8), (4096, 4), (4096, 8))
LONG = launches(
    "SPAN BLOCK KEEP num_warps",
    (2, 32768, 16, 16),
    (2, 8192, 16, 16),
    (2, 16384, 12, 16),
    (2, 16384, 8, 16),
    (1, 16384, 16, 16),
    (1, 8192, 16, 8),
    (1, 16384, 16, 8),
    (2, 16384, 16, 8),
    (1, 8192, 16, 4),
)
TWICE = launches("CHUNK_LOG2 KEEP STAGES num_warps", (12, 16, 1, 4), (12, 16, 2, 8), (13, 8, 1, 8), (13, 16, 1, 16))
GRADIENTS = launches("STAGES num_warps", (1, 4), (1, 8), (2, 8), (3, 4), (3, 8), (1, 16))
PIECES = launches("BLOCK num_warps", (4096, 2), (4096, 4), (8192, 2), (8192, 4))
LAUNCHES: dict[str, list[dict[str, int]]] = {
    "rms_norm": launches("ROWS num_warps", (1, 4), (1, 8), (2, 4), (2, 8), (16, 2), (16, 4), (32, 8)),
    "rms_norm_residual": launches("ROWS num_warps", (1, 4), (1, 8), (1, 16), (2, 4), (2, 8)),
    "rms_norm_backward": launches("STAGES num_warps", (1, 1), (1, 8), (3, 4), (3, 8), (4, 8), (4, 16)),
    "rms_norm_dweight_fold": launches("BLOCK num_warps", (8, 8), (8, 16), (16, 4), (16, 8), (32, 4)),
    "rms_norm_long": TWICE,
    "rms_norm_long_residual": TWICE,
    "rms_norm_long_dot": launches("CHUNK_LOG2 STAGES num_warps", (12, 1, 4), (12, 2, 8), (13, 1, 16), (13, 2, 8)),
    "rms_norm_long_backward": launches(
        "BLOCK STAGES num_warps", (1024, 1, 4), (1024, 3, 4), (2048, 3, 8), (4096, 1, 8)
    ),
    "softmax": launches("ROWS num_warps", (1, 4), (1, 8), (1, 16)),
    "log_softmax": launches("ROWS num_warps", (1, 4), (1, 8), (1, 16)),
    "softmax_backward": launches("ROWS num_warps", (1, 8), (1, 16), (2, 16)),
    "log_softmax_backward": launches("ROWS num_warps", (1, 8), (1, 16), (2, 16)),
    "softmax_long": LONG,
    "log_softmax_long": LONG,
    "softmax_long_backward": GRADIENTS,
    "log_softmax_long_backward": GRADIENTS,
    "softmax_pieces": PIECES,
    "log_softmax_pieces": PIECES,
    "row_parts": launches("SPAN num_warps", (1, 2), (1, 4), (2, 4), (4, 2), (4, 4), (8, 4)),
    "selected_logprob": launches("ROWS num_warps", (1, 1), (4, 1), (16, 4)),
    "selected_logprob_backward": launches("BLOCK num_warps", (1024, 2), (2048, 4), (4096, 4), (4096, 8)),
    "swiglu": launches("BLOCK num_warps", (1024, 4), (2048, 4), (4096, 8)),
    "swiglu_backward": launches("BLOCK num_warps", (1024, 4), (2048, 4), (2048, 8), (4096, 8)),
    "rope": launches("PAIRS GROUP num_warps", (4096, 64, 8), (2048, 32, 4), (1024, 8, 4), (2048, 8, 4), (2048, 8, 8)),
    "ratio_kl": POINTWISE,
    "ratio_kl_backward": POINTWISE,
    "grpo_loss_blocks": launches("BLOCKS num_warps", (1, 2), (1, 4), (1, 8), (2, 4), (2, 8)),
    "grpo_loss_fold": launches("num_warps", (4,), (16,)),
    "grpo_loss_backward": POINTWISE,
    "group_advantage": launches("ROWS num_warps", (4, 1), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)),
    "embedding": launches("BLOCK num_warps", (1024, 4), (2048, 4), (4096, 8)),
    "embedding_backward": launches("UNROLL BLOCK num_warps", (4, 1024, 4), (4, 2048, 8), (8, 1024, 4), (2, 1024, 4)),
    "pack": COPIES,
    "unpack": COPIES,
}


GOING_BACK = ("_backward", "_long_dot")


class Variants:
    """One case's call under its references, and under each launch of ``LAUNCHES`` for one of its kernels."""

    def __init__(self, case: Any) -> None:
        from kalign_core import ops

        self.case = case
        self._references = {kernel: kernel.reference for kernel in ops.named(case.op).kernels}
        self._now: tuple[Any, Any] | None = None

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name, the references' first."""
        named = {"reference": self._under(None, {})}
        for kernel, knobs in self._launches():
            words = " ".join(f"{name}={value}" for name, value in knobs.items())
            named[f"{kernel.name} {words}"] = self._under(kernel, knobs)
        return named

    def restore(self) -> None:
        """Make every kernel's reference what it was: the next case of the operator begins with it."""
        self._set(None, {})

    def _launches(self) -> Iterator[tuple[Any, dict[str, int]]]:
        from kalign_core.api import recorded

        backward = "backward" in self.case.what
        op, arguments = self.case.tuned()
        for kernel in dict.fromkeys(call.kernel for call in recorded(op, *arguments)):
            if kernel.name.endswith(GOING_BACK) == backward or len(self._references) == 1 or "pack" in self.case.op:
                yield from ((kernel, knobs) for knobs in LAUNCHES.get(kernel.name, ()))

    def _under(self, kernel: Any, knobs: dict[str, int]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self._now != (kernel, knobs):
                self._now = (kernel, knobs)
                self._set(kernel, knobs)
            return self.case.ours(*arguments)

        return call

    def _set(self, kernel: Any, knobs: dict[str, int]) -> None:
        """Make ``knobs`` part of the reference of ``kernel``, and every other kernel's what it was."""
        from kalign_core import session

        for known, reference in self._references.items():
            object.__setattr__(known, "reference", reference)
        if kernel is not None:
            before = self._references[kernel]

            def changed(problem: Any) -> Any:
                return (before(problem) if callable(before) else before).replace(**knobs)

            object.__setattr__(kernel, "reference", changed)
        session.current().forget()


def compile_all(cases: list[Any]) -> None:
    """Call everything once, which leaves the compiled code in the compilers' caches."""
    import operators
    import torch

    for case in cases:
        try:
            arguments, variants = case.make(0), Variants(case)
            for call in variants.calls().values():
                call(*arguments)
            variants.restore()
            operators.peers(case, PEERS)
        except Exception as error:
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()


def measure(case: Any, bandwidth: float) -> dict[str, Any]:
    """Time one case's launches and peers together, cold, and compare the bytes of the launches."""
    import operators
    import replay_timing

    from kalign_core.verifier.compare import digest

    variants = Variants(case)
    calls, arguments = variants.calls(), case.make(1)
    found, left_out = operators.peers(case, PEERS)
    try:
        digests = {name: digest(operators.outputs(call(*arguments))) for name, call in calls.items()}
        times = replay_timing.compare_us({**calls, **found}, case.make, True)
    finally:
        variants.restore()
    for each in times.values():
        each["share"] = round(case.moved / (each["us"] * 1e-6) / bandwidth, 3)
    best = min(calls, key=lambda name: times[name]["us"])
    rival = min(found, key=lambda name: times[name]["us"])
    return {
        "name": case.name, "moved_bytes": case.moved, "best": best, "best_peer": rival,
        "peer_over_reference": round(times[rival]["us"] / times["reference"]["us"], 3),
        "peer_over_best": round(times[rival]["us"] / times[best]["us"], 3),
        "other_bytes": [name for name in digests if digests[name] != digests["reference"]],
        "left_out": left_out, "times": times,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """One line of the table on stderr."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    order = sorted(row["times"].items(), key=lambda item: float(item[1]["us"]))
    return f"{row['name']}: " + ", ".join(f"{n} {t['us']:.2f} ({t['share']:.3f})" for n, t in order)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", default="cases_pointwise", help="module beside this file with CASES")
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, separated by commas")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--compile", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["KALIGN_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["KALIGN_MODE"] = "off"
    workers = []
    if given.compile is None:
        command = [sys.executable, __file__, "--module", given.module, "--only", given.only, "--jobs", str(given.jobs)]
        workers = [subprocess.Popen([*command, "--compile", str(i)]) for i in range(given.jobs)]
        for worker in workers:
            worker.wait()
    import importlib

    module = importlib.import_module(given.module)
    cases = [case for case in module.CASES if any(text in case.name for text in given.only.split(","))]
    if given.compile is not None:
        compile_all(cases[given.compile :: given.jobs])
        return
    print(json.dumps(timed(cases), indent=1))


def timed(cases: list[Any]) -> dict[str, Any]:
    """The whole result; a case that fails has its error as result."""
    import replay_timing
    import torch

    started, bandwidth, rows = time.monotonic(), replay_timing.copy_bandwidth(), []
    for case in cases:
        try:
            row = measure(case, bandwidth)
        except Exception as error:
            row = {"name": case.name, "error": f"{type(error).__name__}: {str(error)[:500]}"}
        print(line(row), file=sys.stderr)
        rows.append(row)
        torch.cuda.empty_cache()
    return {"benchmark": "launch_sweep", "command": " ".join(sys.argv), "machine": replay_timing.machine(),
            "copy_tb_per_s": round(bandwidth / 1e12, 3), "seconds": round(time.monotonic() - started, 1),
            "cases": rows}  # fmt: skip


if __name__ == "__main__":
    main()
