"""Cases of the row-wise operators: rms_norm, softmax, log_softmax, selected_logprob."""

from __future__ import annotations

from typing import Any

import torch
from operator_cases import DEVICE, Aim, Case, sized

from kalign_core import ops
from kalign_core.kernels.row_parts import LOG2_E
from kalign_core.ops.rms_norm_plain import backward as rms_norm_backward_of
from kalign_core.ops.selected_logprob import Options
from kalign_core.ops.selected_logprob import backward as selected_backward
from kalign_core.ops.selected_logprob import forward as selected_forward
from kalign_core.ops.softmax import LOG_SOFTMAX, SOFTMAX
from kalign_core.ops.softmax import backward as softmax_backward_of
from kalign_core.ops.softmax import forward as softmax_forward

EPS = 1e-6


def normals(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


# --- rms_norm -----------------------------------------------------------------------------------------------------


def _rms_norm(t: int, h: int, *aims: Aim) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return normals(t, h, seed=seed), normals(h, seed=seed + 1)

    def liger() -> Any:
        from liger_kernel.ops.rms_norm import rms_norm_forward

        return lambda x, w: rms_norm_forward(x, w, EPS, 0.0, "llama", False)[0]

    return Case(
        "rowwise", "rms_norm", "forward", {"T": t, "H": h}, make,
        ours=lambda x, w: ops.rms_norm(x, w, EPS), moved=2 * (2 * t * h + h),
        tuned=lambda: (ops.rms_norm, make(0)),
        torch=lambda x, w: torch.nn.functional.rms_norm(x, (h,), w, EPS), others={"liger": liger}, aims=aims,
    )  # fmt: skip


def _rms_norm_backward(t: int, h: int, *aims: Aim) -> Case:
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
        ours=lambda x, w, rstd, d: rms_norm_backward_of(x, w, rstd.view(-1), d),
        moved=2 * (3 * t * h + 2 * h) + 4 * t,
        tuned=lambda: (ops.rms_norm, tuple(a.requires_grad_() for a in make(0)[:2])),
        torch=eager, compiled=formula, others={"liger": liger}, aims=aims,
    )  # fmt: skip


def _rms_norm_residual(t: int, h: int, *aims: Aim) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return normals(t, h, seed=seed), normals(t, h, seed=seed + 1), normals(h, seed=seed + 2)

    def added(x: Any, r: Any, w: Any) -> Any:
        total = x + r
        return torch.nn.functional.rms_norm(total, (h,), w, EPS), total

    def liger() -> Any:
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

        return lambda x, r, w: fused_add_rms_norm_forward(x, r, w, EPS, 0.0, "llama")[:2]

    def tuned() -> tuple[Any, tuple[Any, ...]]:
        x, r, w = make(0)
        return ops.rms_norm, (x, w, EPS, r)

    return Case(
        "rowwise", "rms_norm", "with residual", {"T": t, "H": h}, make,
        ours=lambda x, r, w: ops.rms_norm(x, w, EPS, r), moved=2 * (4 * t * h + h),
        tuned=tuned, torch=added, others={"liger": liger}, aims=aims,
    )  # fmt: skip


# --- softmax ------------------------------------------------------------------------------------------------------


def _softmax(name: str, t: int, v: int, *aims: Aim) -> Case:
    op, peer = ops.named(name), getattr(torch, name)

    def make(seed: int) -> tuple[Any, ...]:
        return (normals(t, v, seed=seed),)

    def liger() -> Any:
        from liger_kernel.ops.softmax import _softmax_forward

        return lambda x: _softmax_forward(x)[0]

    return Case(
        "rowwise", name, "forward", {"T": t, "V": v}, make, ours=op, moved=4 * t * v, tuned=lambda: (op, make(0)),
        torch=lambda x: peer(x, -1), others={"liger": liger} if name == "softmax" else {}, aims=aims,
    )  # fmt: skip


def _softmax_backward(name: str, t: int, v: int, *aims: Aim) -> Case:
    op, kernels = ops.named(name), {"softmax": SOFTMAX, "log_softmax": LOG_SOFTMAX}[name]

    def make(seed: int) -> tuple[Any, ...]:
        x = normals(t, v, seed=seed)
        return x, *softmax_forward(kernels, x, 1.0), normals(t, v, seed=seed + 1)

    def eager(x: Any, y: Any, top: Any, total: Any, d: Any) -> Any:
        return getattr(torch.ops.aten, f"_{name}_backward_data")(d, y, -1, y.dtype)

    def formula(x: Any, y: Any, top: Any, total: Any, d: Any) -> Any:
        wide, g = y.float(), d.float()
        if name == "softmax":
            return (wide * (g - (g * wide).sum(-1, keepdim=True))).to(y.dtype)
        return (g - wide.exp() * g.sum(-1, keepdim=True)).to(y.dtype)

    return Case(
        "rowwise", name, "backward", {"T": t, "V": v}, make,
        ours=lambda x, y, top, total, d: softmax_backward_of(kernels, x, top, total, d, 1.0), moved=6 * t * v + 8 * t,
        tuned=lambda: (op, (make(0)[0].requires_grad_(),)), torch=eager, compiled=formula, aims=aims,
    )  # fmt: skip


# --- selected_logprob ---------------------------------------------------------------------------------------------


def _ids(t: int, v: int, seed: int) -> torch.Tensor:
    return torch.randint(v, (t,), generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def _selected(t: int, v: int, *aims: Aim, entropy: bool = False) -> Case:
    def make(seed: int) -> tuple[Any, ...]:
        return normals(t, v, seed=seed), _ids(t, v, seed + 1)

    def eager(logits: Any, ids: Any) -> Any:
        logp = -torch.nn.functional.cross_entropy(logits, ids, reduction="none")
        if not entropy:
            return logp
        z = torch.log_softmax(logits, -1, dtype=torch.float32)
        return logp, -(z.exp() * z).sum(-1)

    def formula(logits: Any, ids: Any) -> Any:
        z = torch.log_softmax(logits.float(), -1)
        logp = z.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return (logp, -(z.exp() * z).sum(-1)) if entropy else logp

    def liger() -> Any:
        from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

        # It takes (batch, length + 1, V) and leaves the last position out: one row fewer than ours.
        return lambda logits, ids: fused_selective_log_softmax(logits.view(1, t, v), ids[1:].view(1, t - 1), 1.0)

    return Case(
        "rowwise", "selected_logprob", "with entropy" if entropy else "forward", {"T": t, "V": v}, make,
        ours=lambda logits, ids: ops.selected_logprob(logits, ids, entropy=entropy), moved=2 * t * v + 12 * t,
        tuned=lambda: (ops.selected_logprob, (*make(0), 1.0, -100, entropy)),
        torch=eager, compiled=formula, others={} if entropy else {"liger": liger}, aims=aims,
    )  # fmt: skip


def _selected_backward(t: int, v: int, *aims: Aim) -> Case:
    options = Options(1.0, -100)

    def make(seed: int) -> tuple[Any, ...]:
        logits, ids = normals(t, v, seed=seed), _ids(t, v, seed + 1)
        known = selected_forward(logits, ids, options)
        return logits, ids, known.row_top, known.row_sum, normals(t, seed=seed + 2, dtype=torch.float32)

    def ours(logits: Any, ids: Any, row_top: Any, row_sum: Any, d: Any) -> Any:
        return selected_backward(logits, ids, (None, row_top, row_sum), (d, None, None), options)

    def formula(logits: Any, ids: Any, row_top: Any, row_sum: Any, d: Any) -> Any:
        p = torch.exp2(logits.float() * LOG2_E - row_top.unsqueeze(-1)) / row_sum.unsqueeze(-1)
        here = torch.arange(v, device=logits.device) == ids.unsqueeze(-1)
        return ((here.float() - p) * d.unsqueeze(-1)).to(logits.dtype)

    return Case(
        "rowwise", "selected_logprob", "backward", {"T": t, "V": v}, make, ours=ours, moved=4 * t * v + 20 * t,
        tuned=lambda: (ops.selected_logprob, (make(0)[0].requires_grad_(), make(0)[1])), torch=formula, aims=aims,
    )  # fmt: skip


V = 151936
CASES = [
    _rms_norm(*sized(8192, 4096), Aim(share=0.90)),
    _rms_norm(*sized(4096, 8192), Aim(share=0.90)),
    _rms_norm(*sized(65536, 128), Aim(share=0.82), Aim(us=8.0, kind="warm")),
    _rms_norm_residual(*sized(8192, 4096), Aim(share=0.90)),
    _rms_norm_residual(*sized(4096, 8192), Aim(share=0.90)),
    _rms_norm_backward(*sized(8192, 4096), Aim(share=0.78)),
    _rms_norm_backward(*sized(4096, 8192), Aim(share=0.78)),
    _rms_norm_backward(*sized(65536, 128)),
    _rms_norm(*sized(4096, V)),
    _rms_norm_residual(*sized(4096, V)),
    _rms_norm_backward(*sized(4096, V)),
    *(_softmax(name, *sized(8192, 8192), Aim(share=0.88)) for name in ("softmax", "log_softmax")),
    *(_softmax(name, *sized(4096, V), Aim(share=0.75)) for name in ("softmax", "log_softmax")),
    *(_softmax(name, *sized(64, V)) for name in ("softmax", "log_softmax")),
    *(_softmax_backward(name, *sized(8192, 8192)) for name in ("softmax", "log_softmax")),
    _selected(*sized(4096, V), Aim(share=0.80)),
    _selected(*sized(64, V), Aim(us=10.0, kind="warm")),
    _selected(*sized(4096, V), entropy=True),
    _selected_backward(*sized(4096, V), Aim(share=0.80)),
]
