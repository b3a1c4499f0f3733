"""``rms_norm(x, weight, eps)``; contract and rounding in ``kernels/rms_norm.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kalign_core import context, session
from kalign_core.declare import cdiv
from kalign_core.errors import BadArgument
from kalign_core.kernels.rms_norm import (
    FOLD_ROWS,
    rms_norm_backward_kernel,
    rms_norm_dweight_fold_kernel,
    rms_norm_dweight_kernel,
    rms_norm_kernel,
)
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    Operator,
    Sizes,
    check_dtype,
    check_out,
    eager,
    fresh,
    launch,
    output_like,
    random_tensor,
    remember,
    rows_of,
    tensors_only,
)
from kalign_core.problems import one_device

MAX_ROW = 65536


class RMSNorm(Operator):
    """``rms_norm(x, weight, eps=1e-6, out=None)``: x: ``(... H)``, weight: ``(H)`` -> ``(... H)`` in x's dtype.

    ``x / sqrt(mean(x**2) + eps) * weight`` in float32, rounded once (Zhang and Sennrich 2019, arXiv 1910.07467).
    bfloat16, float16, float32, also mixed between x and weight; H up to 65,536. Gradients of x and weight; the
    weight's is folded over fixed blocks of 64 rows, so trailing rows with a zero gradient change nothing in it.
    ``out`` takes the result where no gradient is needed; it may be x. Raises ``BadArgument`` for shapes, dtypes, rows
    that are too long and an ``out`` that does not fit, ``MixedDevices``.
    """

    name: ClassVar[str] = "rms_norm"
    kernels = (
        rms_norm_kernel,
        rms_norm_backward_kernel,
        rms_norm_dweight_kernel,
        rms_norm_dweight_fold_kernel,
    )
    dims = ("T", "H")
    shapes = ({"T": 4096, "H": 4096}, {"T": 65536, "H": 128}, {"T": 1024, "H": 16384})
    small_shapes = ({"T": 4, "H": 256},)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return eager(self, x, weight, eps, out=out)  # type: ignore[no-any-return]  # what this returns
        try:
            if out is not None:
                check_out("rms_norm", out, in_place=False, weight=weight)
                check_out("rms_norm", out, in_place=True, x=x)
            elif (x.requires_grad | weight.requires_grad) and torch.is_grad_enabled():
                return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(x, weight, eps, out)[0]
        except AttributeError:
            tensors_only("rms_norm", x=x, weight=weight, out=out)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        x = random_tensor((sizes["T"], sizes["H"]), dtype, seed, device).requires_grad_()
        return x, random_tensor((sizes["H"],), dtype, seed + 1, device).requires_grad_()

    def oracle(self, *args: Any) -> torch.Tensor:
        x, weight, eps = (*args, 1e-6)[:3]
        wide = x.double()
        scaled: torch.Tensor = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        result: torch.Tensor = scaled * weight.double()
        return result


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator without gradients: the result and ``rstd: (rows)`` in float32."""
    key = (
        "rms_norm", context.current(), eps,
        x.__class__, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15,
        weight.__class__, weight.shape, weight.stride(), weight.dtype, weight.device, weight.data_ptr() & 15,
        out is not None and (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() & 15),
    )  # fmt: skip
    known = session.current().calls.get(key)
    if known is None:
        return _first(key, x, weight, eps, out)
    launch_known, template, side = known
    if out is None:
        out = fresh(template)
    rstd = fresh(side)
    launch_known(x, weight, out, rstd)
    return out, rstd


def _first(
    key: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, eps)
    result = output_like("rms_norm", out, x.shape, x)
    rows, o = rows_of("rms_norm", "x", x), rows_of("rms_norm", "out", result)
    rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    if result.numel():
        numbers = (*rows.shape, rows.stride(0), o.stride(0), float(eps))
        tensors = (rows, weight, o, rstd)
        remember(key, launch(rms_norm_kernel, *tensors, *numbers), tensors, numbers, (x, weight), result, rstd)
    return result, rstd


def backward(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor, needs: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x and weight (those that ``needs`` asks for) for an upstream gradient ``d_out: (... H)``."""
    rows, d = rows_of("rms_norm", "x", x), rows_of("rms_norm", "gradient", d_out)
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs[0] else None
    if d_x is not None and d_x.numel():
        o = rows_of("rms_norm", "gradient", d_x)
        launch(
            rms_norm_backward_kernel, rows, weight, rstd, d, o, *rows.shape, rows.stride(0), d.stride(0), o.stride(0)
        )
    return d_x, _weight_gradient(rows, weight, rstd, d) if needs[1] else None


def _weight_gradient(rows: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    tokens, width = rows.shape
    if rows.numel() == 0:
        return torch.zeros_like(weight)
    blocks = cdiv(tokens, FOLD_ROWS)
    partial = torch.empty((blocks, width), dtype=torch.float32, device=rows.device)
    launch(rms_norm_dweight_kernel, rows, rstd, d, partial, tokens, width, rows.stride(0), d.stride(0))
    d_weight = torch.empty_like(weight)
    launch(rms_norm_dweight_fold_kernel, partial, d_weight, blocks, width)
    return d_weight


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    one_device("rms_norm", {"x": x, "weight": weight})
    check_dtype("rms_norm", "x", x, RMSNorm.dtypes)
    check_dtype("rms_norm", "weight", weight, RMSNorm.dtypes)
    if x.dim() < 1 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise BadArgument(
            f"rms_norm: x is {tuple(x.shape)}, weight {tuple(weight.shape)}",
            why="x: (... H), weight: (H)",
            fix="normalise over the last axis",
        )
    if x.shape[-1] > MAX_ROW:
        raise BadArgument(f"rms_norm: rows of {x.shape[-1]} elements", why=f"a row is held whole, up to {MAX_ROW}")
    if not isinstance(eps, (int, float)):
        raise BadArgument(f"rms_norm: eps is {eps!r}, not a number", fix="eps=1e-6")
    if not weight.is_contiguous():
        raise BadArgument("rms_norm: weight is not contiguous", fix="weight.contiguous()")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        result, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.call = context.current()
        return result

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        with context.restored(ctx.call):
            d_x, d_weight = backward(x, weight, rstd, d_out, ctx.needs_input_grad[:2])
        return d_x, d_weight, None
