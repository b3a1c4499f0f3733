"""``softmax(x, temperature)`` and ``log_softmax(x, temperature)``; contract and rounding in ``kernels/softmax.py``."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.declare import Kernel, cdiv
from kalign_core.kernels.row_parts import CHUNK, LOG2_E, row_parts_kernel
from kalign_core.kernels.softmax import (
    LONGEST_HELD,
    log_softmax_backward_kernel,
    log_softmax_kernel,
    softmax_backward_kernel,
    softmax_kernel,
)
from kalign_core.kernels.softmax_long import (
    log_softmax_long_backward_kernel,
    log_softmax_long_kernel,
    log_softmax_pieces_kernel,
    softmax_long_backward_kernel,
    softmax_long_kernel,
    softmax_pieces_kernel,
)
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    LARGEST,
    SMALLEST,
    Operator,
    Sizes,
    check_dtype,
    check_number,
    check_out,
    no_gradients,
    output_like,
    random_tensor,
    rows_of,
    tensors_only,
)
from kalign_core.ops.noting import allocate, exact, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form

# So many rows, each with a program of its own, fill no device; their chunks do.
FEW_ROWS = 128
DTYPES = ("bf16", "fp16", "fp32")


class Kernels(NamedTuple):
    """The kernels of one of the two: for rows that are held, for long ones and for few of those."""

    name: str
    held: Kernel
    long: Kernel
    pieces: Kernel
    held_gradient: Kernel
    long_gradient: Kernel

    @property
    def all(self) -> tuple[Kernel, ...]:
        """Those that short rows run, few long ones and many long ones, in the order they do."""
        return self.held, self.held_gradient, row_parts_kernel, self.pieces, self.long_gradient, self.long


SOFTMAX = Kernels(
    "softmax", softmax_kernel, softmax_long_kernel, softmax_pieces_kernel,
    softmax_backward_kernel, softmax_long_backward_kernel,
)  # fmt: skip
LOG_SOFTMAX = Kernels(
    "log_softmax", log_softmax_kernel, log_softmax_long_kernel, log_softmax_pieces_kernel,
    log_softmax_backward_kernel, log_softmax_long_backward_kernel,
)  # fmt: skip


class _AlongRows(Operator):
    """What softmax and its logarithm share: everything but their kernels and their oracle."""

    ours: ClassVar[Kernels]
    dims = ("T", "V")
    shapes = ({"T": 8192, "V": 8192}, {"T": 4096, "V": 151936})
    small_shapes = ({"T": 3, "V": 40},)

    def __call__(self, x: torch.Tensor, temperature: float = 1.0, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if is_dynamo_compiling() or is_exporting():
            return _traced(self.ours, x, temperature, out)
        try:
            if out is None and x.requires_grad and torch.is_grad_enabled():
                return _Softmax.apply(self.ours, x, temperature)  # type: ignore[no-untyped-call,no-any-return]
            return forward(self.ours, x, temperature, out)[0]
        except (AttributeError, RuntimeError):
            tensors_only(self.name, x=x, out=out)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        return (random_tensor((sizes["T"], sizes["V"]), dtype, seed, device).requires_grad_(),)


class Softmax(_AlongRows):
    """``softmax(x, temperature=1.0, out=None)``: x: ``(... V)`` -> ``(... V)`` in x's dtype.

    ``exp(z) / sum(exp(z))`` over the last axis with ``z = x / temperature``, in float32 from the row's maximum, rounded
    once. bfloat16, float16, float32; any row stride; rows of any length (tried up to 262,144). A row with NaN or +inf
    is NaN, and so is one of nothing but -inf; other -inf give 0. Rows whose largest element is beyond 7e8 times the
    temperature are past what float32 tells apart, and may be NaN. Its gradient is computed from x. ``out`` takes the
    result where no gradient is needed; it may be x. Raises ``BadArgument`` for shapes, dtypes, a temperature that is
    not positive and an ``out`` that does not fit, ``MixedDevices``.
    """

    name: ClassVar[str] = "softmax"
    ours = SOFTMAX
    kernels = SOFTMAX.all

    def oracle(self, *args: Any) -> torch.Tensor:
        x, temperature = (*args, 1.0)[:2]
        return torch.softmax(x.double() / temperature, -1)


class LogSoftmax(_AlongRows):
    """``log_softmax(x, temperature=1.0, out=None)``: x: ``(... V)`` -> ``(... V)`` in x's dtype.

    ``z - log(sum(exp(z)))`` over the last axis with ``z = x / temperature``; otherwise as ``softmax``.
    """

    name: ClassVar[str] = "log_softmax"
    ours = LOG_SOFTMAX
    kernels = LOG_SOFTMAX.all

    def oracle(self, *args: Any) -> torch.Tensor:
        x, temperature = (*args, 1.0)[:2]
        return torch.log_softmax(x.double() / temperature, -1)


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(kernels: Kernels, x: torch.Tensor, temperature: float, out: torch.Tensor | None = None) -> Results:
    """The operator without gradients: the result, and each row's t and s of the contract, float32 ``(rows)``."""
    if out is None:
        return _FORWARD[kernels.name]((x,), (exact(temperature),), (x, temperature))
    return _FORWARD_INTO[kernels.name]((x, out), (exact(temperature),), (x, temperature, out))


def backward(
    kernels: Kernels,
    x: torch.Tensor,
    row_top: torch.Tensor,
    row_sum: torch.Tensor,
    d_out: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Gradient of x for an upstream gradient ``d_out: (... V)``."""
    return _BACKWARD[kernels.name]((x, row_top, row_sum, d_out), (temperature,))


def row_parts(
    rows: torch.Tensor, ids: torch.Tensor | None, ignore_index: int, temperature: float, dots: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``t_c``, ``s_c`` and, for the entropy, ``u_c`` of each chunk of ``rows: (t v)``: float32 ``(t chunks)`` each.

    Rows whose id is ``ignore_index`` are not read. Part of a plain path: it allocates and launches.
    """
    tokens, width = rows.shape
    shape = (tokens, cdiv(width, CHUNK))
    part_top, part_sum = (allocate(shape, torch.float32, rows.device) for _ in range(2))
    part_dot = allocate(shape, torch.float32, rows.device) if dots else None
    launch(
        row_parts_kernel, rows, ids, part_top, part_sum, part_dot, tokens, width, rows.stride(0), shape[1],
        LOG2_E / temperature, ignore_index,
    )  # fmt: skip
    return part_top, part_sum, part_dot


def check_temperature(owner: str, temperature: Any) -> None:
    """Raise ``BadArgument`` for what is no positive number that float32 can divide by."""
    check_number(owner, "temperature", temperature, SMALLEST, LARGEST, example=1.0)


def _forward(kernels: Kernels, x: torch.Tensor, temperature: float, out: torch.Tensor | None = None) -> Results:
    check_dtype(kernels.name, "x", x, DTYPES)
    check_temperature(kernels.name, temperature)
    if out is not None:
        check_out(kernels.name, out, in_place=True, x=x)
    result = output_like(kernels.name, out, x.shape, x)
    rows, o = rows_of(kernels.name, "x", x), rows_of(kernels.name, "out", result)
    tokens, width = rows.shape
    row_top, row_sum = (allocate((tokens,), torch.float32, x.device) for _ in range(2))
    if not result.numel():
        return result, row_top, row_sum
    k, strides = LOG2_E / temperature, (rows.stride(0), o.stride(0))
    if width <= LONGEST_HELD or tokens > FEW_ROWS:
        whole = kernels.held if width <= LONGEST_HELD else kernels.long
        launch(whole, rows, o, row_top, row_sum, tokens, width, *strides, k)
    else:
        part_top, part_sum, _ = row_parts(rows, None, 0, temperature)
        between = (strides[0], part_top.stride(0), strides[1])
        launch(kernels.pieces, rows, part_top, part_sum, o, row_top, row_sum, tokens, width, *between, k)
    return result, row_top, row_sum


def _backward(
    kernels: Kernels,
    x: torch.Tensor,
    row_top: torch.Tensor,
    row_sum: torch.Tensor,
    d_out: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    d_x = allocate(x.shape, x.dtype, x.device)
    if d_x.numel():
        rows, d, o = (rows_of(kernels.name, "gradient", t) for t in (x, d_out, d_x))
        numbers = (rows.stride(0), d.stride(0), o.stride(0), LOG2_E / temperature, 1.0 / temperature)
        gradient = kernels.held_gradient if rows.shape[1] <= LONGEST_HELD else kernels.long_gradient
        launch(gradient, rows, row_top, row_sum, d, o, *rows.shape, *numbers)
    return d_x


_BOTH = (SOFTMAX, LOG_SOFTMAX)
_FORWARD = {k.name: Form(k.name, partial(_forward, k)) for k in _BOTH}
_FORWARD_INTO = {k.name: Form(f"{k.name}(out=)", partial(_forward, k), outs=1, in_place=(0,)) for k in _BOTH}
_BACKWARD = {k.name: Form(f"{k.name} backward", partial(_backward, k)) for k in _BOTH}


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: torch.Tensor, temperature: float) -> torch.Tensor:
        result, row_top, row_sum = forward(kernels, x, temperature)
        ctx.save_for_backward(x, row_top, row_sum)
        ctx.kernels, ctx.temperature, ctx.call = kernels, temperature, context.current()
        return result

    @staticmethod
    @first_order("softmax")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, row_top, row_sum = ctx.saved_tensors
        with context.restored(ctx.call):
            return None, backward(ctx.kernels, x, row_top, row_sum, d_out, ctx.temperature), None


# --- as torch.compile sees them -----------------------------------------------------------------------------------


def _traced(kernels: Kernels, x: torch.Tensor, temperature: float, out: torch.Tensor | None) -> torch.Tensor:
    whole, into = _OPAQUE[kernels.name]
    if out is None:
        return whole(x, temperature)[0]  # type: ignore[no-any-return]  # what this returns
    no_gradients(kernels.name, x, out)
    into(x, temperature, out)
    return out


def _opaque(kernels: Kernels) -> tuple[Any, Any]:
    """The operator and its form with ``out=``, registered with their gradient."""
    schema = "(Tensor x, Tensor row_top, Tensor row_sum, Tensor d_out, float temperature) -> Tensor"
    gradient = opaque(
        f"{kernels.name}_backward{schema}",
        functools.partial(backward, kernels),
        lambda x, row_top, row_sum, d_out, temperature: x.new_empty(x.shape),
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        ctx.save_for_backward(inputs[0], *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.temperature = inputs[1]

    def fake(x: torch.Tensor, temperature: float) -> Results:
        top, total = (x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32) for _ in range(2))
        return x.new_empty(x.shape), top, total

    whole = opaque(
        f"{kernels.name}(Tensor x, float temperature) -> (Tensor, Tensor, Tensor)",
        functools.partial(forward, kernels),
        fake,
        save=save,
        backward=lambda ctx, d_out, *_: (gradient(*ctx.saved_tensors, d_out, ctx.temperature), None),
    )

    def run_into(x: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
        forward(kernels, x, temperature, out)

    schema = "(Tensor x, float temperature, Tensor(a!) out) -> ()"
    return whole, opaque(f"{kernels.name}_out{schema}", run_into, lambda x, temperature, out: None)


_OPAQUE = {kernels.name: _opaque(kernels) for kernels in (SOFTMAX, LOG_SOFTMAX)}
