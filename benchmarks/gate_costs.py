"""What the gate costs; prints one JSON object.

``python benchmarks/gate_costs.py [--only OP] [--small]``. For every problem below: time for what the reference
promises, for the first check of a candidate, for the quick suite per candidate (eight side by side) and for the strict
one, compiling excluded by a first round; memory at its peak over that of the problem's own tensors, offsets past 2**31
apart. ``--small`` tries the script where there is no device.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PROBLEMS = [
    ("swiglu", "swiglu", {"T": 4096, "F": 12288}),
    ("rms_norm", "rms_norm", {"T": 4096, "H": 4096}),
    ("rms_norm", "rms_norm", {"T": 1024, "H": 16384}),
    ("rms_norm", "rms_norm_backward", {"T": 1024, "H": 16384}),
    ("matmul", "matmul", {"M": 16, "N": 4096, "K": 4096}),
    ("matmul", "matmul", {"M": 4096, "N": 4096, "K": 4096}),
]
SIDE_BY_SIDE = 8
SMALLER = 512


class Measured:
    """Seconds until the device is idle again, and bytes at the peak."""

    def __init__(self, platform: Any, device: int) -> None:
        self.platform, self.device, self.seconds, self.peak = platform, device, 0.0, 0

    def __enter__(self) -> Measured:
        import torch

        self.platform.synchronize(self.device)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.started = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        import torch

        self.platform.synchronize(self.device)
        self.seconds = time.perf_counter() - self.started
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()


def cost_of(here: Any, call: Any, configs: list[Any]) -> dict[str, Any]:
    """The quick gate around one kernel call, and the strict one."""
    from kalign_core.verifier.ahead import compile_ahead

    bench, gate, bounds = opened(here, call, configs[:SIDE_BY_SIDE], strict=False)
    compile_ahead(here, gate, bounds, gate.all_cases())
    gate.examine(bounds)
    gate.check_reference()
    own = bench.bytes_per_set()
    measured = functools.partial(Measured, here.platform, call.device)
    bench.renew_inputs()
    with measured() as promises:
        gate.check_reference()
    gate.one_case(bounds[0])
    with measured() as first:
        gate.one_case(bounds[0])
    bench.renew_inputs()
    with measured() as quick:
        verdicts = gate.examine(bounds)
    with measured() as alone:
        gate.examine(bounds[:1])
    bench.renew_inputs()
    with measured() as making:
        for case in (case for check in gate.checks for case in check.cases(bench)):
            bench.inputs(case)
    bench.renew_inputs()
    return {
        "own_mib": round(own / 2**20, 1),
        "cases": verdicts[0].cases,
        "one_case_ms": round(first.seconds * 1e3, 3),
        "quick_per_candidate_ms": round(quick.seconds * 1e3 / len(bounds), 2),
        "quick_alone_ms": round(alone.seconds * 1e3, 2),
        "making_inputs_ms": round(making.seconds * 1e3, 2),
        "reference_ms": round(promises.seconds * 1e3, 2),
        "peak_over_own": round(max(promises.peak, quick.peak) / own, 3),
        "refuted": [str(v.refutation) for v in verdicts if v.refutation],
        **strict_cost(here, call, configs[0]),
    }


def strict_cost(here: Any, call: Any, config: Any) -> dict[str, Any]:
    """The strict suite on one candidate."""
    from kalign_core.verifier.ahead import compile_ahead

    bench, gate, [bound] = opened(here, call, [config], strict=True)
    started = time.perf_counter()
    compile_ahead(here, gate, [bound], gate.all_cases())
    gate.check_reference()
    gate.examine([bound])
    first = time.perf_counter() - started
    far = [case for check in gate.checks for case in check.cases(bench) if case.variant == "far"]
    bench.drop_variant("far")
    with Measured(here.platform, call.device) as near:
        gate.check_reference()
        [verdict] = gate.examine([bound])
    return {
        "strict_s": round(near.seconds + far_seconds(here, call, config, far), 3),
        "strict_with_compiling_s": round(first, 3),
        "strict_cases": verdict.cases + len(far),
        "strict_peak_over_own": round(near.peak / bench.bytes_per_set(), 3),
        "strict_skipped": list(verdict.skipped),
        "strict_refuted": str(verdict.refutation or ""),
    }


def far_seconds(here: Any, call: Any, config: Any, cases: list[Any]) -> float:
    """How long ``cases`` with offsets past 2**31 take by themselves."""
    _, gate, [bound] = opened(here, call, [config], strict=True)
    for case in cases:
        gate.run_case(bound, case)
    with Measured(here.platform, call.device) as far:
        for case in cases:
            gate.run_case(bound, case)
    return far.seconds


def opened(here: Any, call: Any, configs: list[Any], *, strict: bool) -> tuple[Any, Any, list[Any]]:
    """A bench and a gate for one kernel call, and ``configs`` before it."""
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.gate import open_gate

    bench = Bench(here.platform, call.kernel, call.problem, call.device, strict=strict)
    gate = open_gate(here.plugins, bench, bench.bound(call.kernel.reference_config(call.problem)))
    return bench, gate, [bench.bound(config) for config in configs]


def main() -> None:
    import torch

    from kalign_core import hal, ops, session
    from kalign_core.api import recorded
    from kalign_core.verifier.checks import SUITE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--small", action="store_true", help="sizes that an interpreter can bear, to try the script")
    given = parser.parse_args()
    here, rows = session.current(), []
    device = hal.platform.devices()[0]
    with here.platform.on(device):
        for op, kernel, sizes in PROBLEMS:
            if given.only not in ("", op):
                continue
            if given.small:
                sizes = {dim: max(1, size // SMALLER) for dim, size in sizes.items()}
            operator = ops.named(op)
            arguments = operator.inputs(sizes, "bf16", 0, torch.device(here.platform.device_type))
            call = next(c for c in recorded(operator, *arguments) if c.kernel.name == kernel)
            del arguments
            configs = list(here.space(call.kernel, call.problem, call.device).candidates)
            try:
                rows.append({"kernel": kernel, "sizes": sizes, **cost_of(here, call, configs)})
            except Exception as error:
                rows.append({"kernel": kernel, "sizes": sizes, "error": f"{type(error).__name__}: {error}"})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    import triton  # after the platform is chosen, which settles whether kernels are compiled

    head = {
        "benchmark": "gate_costs", "command": " ".join(["benchmarks/gate_costs.py", *sys.argv[1:]]), "suite": SUITE,
        "device": here.platform.identity(device).name, "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    print(json.dumps({**head, "problems": rows}, indent=1))


if __name__ == "__main__":
    main()
