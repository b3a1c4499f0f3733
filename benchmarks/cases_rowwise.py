"""Cases of the row-wise operators: rms_norm, softmax, log_softmax, selected_logprob."""

from __future__ import annotations

from typing import Any

import torch
from operator_cases import Aim, Case

from kalign_core import ops
from kalign_core.ops.rms_norm import backward as rms_norm_backward_of

DEVICE = torch.device("cuda")
EPS = 1e-6


def normals(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


# --- rms_norm -----------------------------------------------------------------------------------------------------


def _rms_norm(t: int, h: int, aim: Aim | None) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return normals(t, h, seed=seed), normals(h, seed=seed + 1)

    def liger() -> Any:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return lambda x, w: rms_norm_forward(x, w, EPS, 0.0, "llama", False)[0]

    return Case(
        "rowwise", "rms_norm", "forward", {"T": t, "H": h}, make,
        ours=lambda x, w: ops.rms_norm(x, w, EPS), moved=2 * (2 * t * h + h),
        tuned=lambda: (ops.rms_norm, make(0)),
        torch=lambda x, w: torch.nn.functional.rms_norm(x, (h,), w, EPS), others={"liger": liger}, aim=aim,
    )  # fmt: skip


def _rms_norm_backward(t: int, h: int, aim: Aim | None) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        x, w = normals(t, h, seed=seed), normals(h, seed=seed + 1)
        rstd = torch.rsqrt(x.float().square().mean(1, keepdim=True) + EPS)
        return x, w, rstd, normals(t, h, seed=seed + 2)

    def eager(x: Any, w: Any, rstd: Any, d: Any) -> Any:
        return torch.ops.aten._fused_rms_norm_backward(d, x, [h], rstd, w, [True, True])

    def formula(x: Any, w: Any, rstd: Any, d: Any) -> Any:
        normed, m = x.float() * rstd, d.float() * w.float()
        d_x = rstd * (m - normed * (m * normed).mean(1, keepdim=True))
        return d_x.to(x.dtype), (d.float() * normed).sum(0).to(w.dtype)

    def liger() -> Any:
        from liger_kernel.ops.rms_norm import rms_norm_backward
        from liger_kernel.ops.utils import calculate_settings

        block, warps = calculate_settings(h)
        return lambda x, w, rstd, d: rms_norm_backward(d, x, w, rstd.view(-1), 0.0, 0, block, warps, False, False)

    return Case(
        "rowwise", "rms_norm", "backward", {"T": t, "H": h}, make,
        ours=lambda x, w, rstd, d: rms_norm_backward_of(x, w, rstd.view(-1), d, (True, True)),
        moved=2 * (3 * t * h + 2 * h) + 4 * t,
        tuned=lambda: (ops.rms_norm, tuple(a.requires_grad_() for a in make(0)[:2])),
        torch=eager, compiled=formula, others={"liger": liger}, aim=aim,
    )  # fmt: skip


CASES = [
    _rms_norm(8192, 4096, Aim(share=0.90)),
    _rms_norm(4096, 8192, Aim(share=0.90)),
    _rms_norm(65536, 128, Aim(us=8.0, kind="warm")),
    _rms_norm_backward(8192, 4096, Aim(share=0.78)),
    _rms_norm_backward(4096, 8192, Aim(share=0.78)),
    _rms_norm_backward(65536, 128, None),
]
