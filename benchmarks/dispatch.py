"""Host time per call: kalign's operators beside torch's and beside the same kernels launched by Triton.

Prints one JSON object. ``python benchmarks/dispatch.py``: median over 15 blocks of 300 calls each, the device idle at
the start of a block, everything in one process and one run. Shapes are tiny, so that the host is what is measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCKS = 15
CALLS = 300


def host_us(call: Callable[[], Any]) -> float:
    """Median host microseconds of one call."""
    import torch

    for _ in range(50):
        call()
    blocks = []
    for _ in range(BLOCKS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        blocks.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(blocks), 3)


def pointwise(times: dict[str, float]) -> None:
    import torch
    import triton

    import kalign_core as kalign
    from kalign_core import session
    from kalign_core.kernels.swiglu import swiglu_kernel

    x, y = (torch.randn(1, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    times["torch.add(out=)"] = host_us(lambda: torch.add(x, y, out=out))
    times["x + y"] = host_us(lambda: x + y)
    config = {"BLOCK": 1024, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    fn = swiglu_kernel.fn
    times["triton swiglu[grid]"] = host_us(lambda: fn[(1,)](x, y, out, 1, 1024, 1024, 1024, 1024, **config))
    configs = [triton.Config({"BLOCK": 1024}, num_warps=w) for w in (2, 4)]
    tuned = triton.autotune(configs=configs, key=["F"])(fn)
    times["triton.autotune swiglu, warm"] = host_us(lambda: tuned[(1,)](x, y, out, 1, 1024, 1024, 1024, 1024))
    site = session.current().site(swiglu_kernel)
    for mode in ("off", "read", "tune"):
        kalign.set_mode(mode)
        times[f"kalign swiglu(out=), {mode}"] = host_us(lambda: kalign.ops.swiglu(x, y, out=out))
    times["kalign swiglu"] = host_us(lambda: kalign.ops.swiglu(x, y))
    times["kalign site, swiglu kernel"] = host_us(lambda: site(x, y, out, 1, 1024, 1024, 1024, 1024))


def product(times: dict[str, float]) -> None:
    import torch

    import kalign_core as kalign
    from kalign_core.kernels.matmul import matmul_kernel

    a, b = (torch.randn(16, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    times["torch.mm(out=)"] = host_us(lambda: torch.mm(a, b, out=out))
    config = {**matmul_kernel.reference_config(None), "WIDE": False}
    sizes = (16, 16, 16, 16, 1, 16, 1, 16, 1)
    times["triton matmul[grid]"] = host_us(lambda: matmul_kernel.fn[(1,)](a, b, None, out, *sizes, **config))
    times["kalign matmul(out=)"] = host_us(lambda: kalign.ops.matmul(a, b, out=out))


def normalised(times: dict[str, float]) -> None:
    import torch

    import kalign_core as kalign

    x, w = torch.randn(1, 1024, device="cuda"), torch.randn(1024, device="cuda")
    out = torch.empty_like(x)
    times["torch rms_norm"] = host_us(lambda: torch.nn.functional.rms_norm(x, (1024,), w, 1e-6))
    times["kalign rms_norm(out=)"] = host_us(lambda: kalign.ops.rms_norm(x, w, out=out))
    times["kalign rms_norm"] = host_us(lambda: kalign.ops.rms_norm(x, w))
    x.requires_grad_(), w.requires_grad_()
    times["torch rms_norm, gradients"] = host_us(lambda: torch.nn.functional.rms_norm(x, (1024,), w, 1e-6))
    times["kalign rms_norm, gradients"] = host_us(lambda: kalign.ops.rms_norm(x, w))


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import replay_timing

    times: dict[str, float] = {}
    for step in (pointwise, product, normalised):
        step(times)
    ratios = {
        "swiglu(out=) over torch.add(out=)": times["kalign swiglu(out=), read"] / times["torch.add(out=)"],
        "swiglu(out=) over triton's launch": times["kalign swiglu(out=), read"] / times["triton swiglu[grid]"],
        "swiglu(out=) over autotune": times["kalign swiglu(out=), read"] / times["triton.autotune swiglu, warm"],
        "swiglu over x + y": times["kalign swiglu"] / times["x + y"],
        "matmul(out=) over triton's launch": times["kalign matmul(out=)"] / times["triton matmul[grid]"],
        "rms_norm with gradients over torch": times["kalign rms_norm, gradients"] / times["torch rms_norm, gradients"],
    }
    result = {"benchmark": "dispatch", "machine": replay_timing.machine(), "host_us": times,
              "ratios": {name: round(value, 3) for name, value in ratios.items()}}  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
