"""``pack(padded, cu_seqlens, total)`` and ``unpack(packed, cu_seqlens, length)``; contract in ``kernels/pack.py``."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.kernels.pack import pack_kernel, unpack_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, check_dtype, random_tensor
from kalign_core.ops.ids import check_ids
from kalign_core.ops.noting import launch
from kalign_core.ops.opaque import opaque
from kalign_core.problems import one_device

SIDES = ("right", "left")
DTYPES = ("bf16", "fp16", "fp32", "i64", "i32")
FLOATS = DTYPES[:3]


class Pack(Operator):
    """``pack(padded, cu_seqlens, total, side="right")``: ``(B S ...)`` -> ``(total ...)``.

    The sequences of a padded batch one after the other. ``cu_seqlens: (B + 1)``, int32 or int64, on the device, is
    where each begins and the last ends; from a mask: ``F.pad(mask.sum(1).cumsum(0), (1, 0))``. ``side`` is where the
    padding stands. ``total`` is the number of rows to make, from the caller, so that nothing waits for the device: rows
    that no sequence fills are 0, sequences that do not fit are cut. bfloat16, float16, float32, int64, int32; copies of
    bits. The gradient is ``unpack``. Raises ``BadArgument`` for shapes, dtypes and sizes, ``UnknownName`` for another
    side, ``MixedDevices``.
    """

    name: ClassVar[str] = "pack"
    kernels = (pack_kernel, unpack_kernel)
    dims = ("B", "S", "F")
    dtypes = FLOATS
    shapes = ({"B": 64, "S": 1024, "F": 4096},)
    small_shapes = ({"B": 2, "S": 4, "F": 256},)

    def __call__(self, padded: torch.Tensor, cu_seqlens: torch.Tensor, total: int, side: str = "right") -> torch.Tensor:
        if is_dynamo_compiling() or is_exporting():
            return _opaque_pack(padded, cu_seqlens, total, side)  # type: ignore[no-any-return]  # what this returns
        _check_pack(padded, cu_seqlens, total, side)
        if padded.requires_grad and torch.is_grad_enabled():
            return _Pack.apply(padded, cu_seqlens, total, side)  # type: ignore[no-untyped-call,no-any-return]  # torch's
        return packed_of(padded, cu_seqlens, total, side)

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        padded = random_tensor((sizes["B"], sizes["S"], sizes["F"]), dtype, seed, device)
        cu_seqlens, total = _lengths(sizes, seed, device)
        return padded.requires_grad_(), cu_seqlens, total

    def oracle(self, *args: Any) -> torch.Tensor:
        padded, cu_seqlens, total, side = (*args, "right")[:4]
        starts, ends = cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()
        parts = [
            row[: end - start] if side == "right" else row[max(0, len(row) - (end - start)) :]
            for row, start, end in zip(padded.double(), starts, ends, strict=True)
        ]
        rest = padded.new_zeros((total - ends[-1], *padded.shape[2:]), dtype=torch.float64)
        return torch.cat((*parts, rest))


class Unpack(Operator):
    """``unpack(packed, cu_seqlens, length, side="right")``: ``(T ...)`` -> ``(B length ...)``.

    The inverse of ``pack``: sequence ``b``, rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]`` of packed, in ``length``
    rows of its own, 0 where the sequence has none; what does not fit is cut. Dtypes, ``side`` and errors are those of
    ``pack``, which is its gradient.
    """

    name: ClassVar[str] = "unpack"
    kernels = (unpack_kernel, pack_kernel)
    dims = ("B", "S", "F")
    dtypes = FLOATS
    shapes = Pack.shapes
    small_shapes = Pack.small_shapes

    def __call__(
        self, packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int, side: str = "right"
    ) -> torch.Tensor:
        if is_dynamo_compiling() or is_exporting():
            return _opaque_unpack(packed, cu_seqlens, length, side)  # type: ignore[no-any-return]  # what this returns
        _check("unpack", "packed", packed, cu_seqlens, length, side)
        if packed.dim() < 1:
            raise BadArgument("unpack: packed is a scalar", why="packed: (T ...)", fix="packed.reshape(1)")
        if packed.requires_grad and torch.is_grad_enabled():
            return _Unpack.apply(packed, cu_seqlens, length, side)  # type: ignore[no-untyped-call,no-any-return]  # torch's
        return padded_of(packed, cu_seqlens, length, side)

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        cu_seqlens, total = _lengths(sizes, seed, device)
        packed = random_tensor((total, sizes["F"]), dtype, seed, device)
        return packed.requires_grad_(), cu_seqlens, sizes["S"]

    def oracle(self, *args: Any) -> torch.Tensor:
        packed, cu_seqlens, length, side = (*args, "right")[:4]
        sequences = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            rows = packed.double()[start:end]
            rows = rows[:length] if side == "right" else rows[max(0, len(rows) - length) :]
            rest = rows.new_zeros((length - len(rows), *packed.shape[1:]))
            sequences.append(torch.cat((rows, rest) if side == "right" else (rest, rows)))
        return torch.stack(sequences)


def packed_of(padded: torch.Tensor, cu_seqlens: torch.Tensor, total: int, side: str) -> torch.Tensor:
    """``pack`` without gradients."""
    packed = torch.empty((total, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
    if packed.numel() == 0:
        return packed
    if padded.numel() == 0:
        return packed.zero_()
    batch, length = padded.shape[:2]
    source, target, ends = _flat(padded, 2), _flat(packed, 1), cu_seqlens.contiguous()
    launch(
        pack_kernel, source, ends[:-1], ends[1:], target, total, batch, length, target.shape[1],
        *source.stride()[:2], target.stride(0), batch.bit_length(), SIDES.index(side),
    )  # fmt: skip
    return packed


def padded_of(packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int, side: str) -> torch.Tensor:
    """``unpack`` without gradients."""
    batch = len(cu_seqlens) - 1
    padded = torch.empty((batch, length, *packed.shape[1:]), dtype=packed.dtype, device=packed.device)
    if padded.numel() == 0:
        return padded
    if packed.numel() == 0:
        return padded.zero_()
    source, target, ends = _flat(packed, 1), _flat(padded, 2), cu_seqlens.contiguous()
    launch(
        unpack_kernel, source, ends[:-1], ends[1:], target, len(source), batch, length, source.shape[1],
        source.stride(0), *target.stride()[:2], SIDES.index(side),
    )  # fmt: skip
    return padded


def _flat(tensor: torch.Tensor, leading: int) -> torch.Tensor:
    """``tensor`` with its axes behind the ``leading`` ones as one dense axis; a view wherever strides allow."""
    flat = tensor.reshape(*tensor.shape[:leading], math.prod(tensor.shape[leading:]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def _lengths(sizes: Sizes, seed: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Where sequences of random lengths from half of ``S`` up begin and end, and their sum."""
    drawn = random.Random(seed + 1)  # noqa: S311  # not torch's: lengths are numbers of the host, always
    ends = [0, *itertools.accumulate(drawn.randint(-(-sizes["S"] // 2), sizes["S"]) for _ in range(sizes["B"]))]
    return torch.tensor(ends, dtype=torch.int32, device=device), ends[-1]


def _check_pack(padded: torch.Tensor, cu_seqlens: torch.Tensor, total: int, side: str) -> None:
    _check("pack", "padded", padded, cu_seqlens, total, side)
    if padded.dim() < 2 or padded.shape[0] != len(cu_seqlens) - 1:
        raise BadArgument(
            f"pack: padded is {tuple(padded.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}",
            why="padded: (B S ...), cu_seqlens: (B + 1)",
        )


def _check(owner: str, name: str, tensor: torch.Tensor, cu_seqlens: torch.Tensor, size: int, side: str) -> None:
    one_device(owner, {name: tensor, "cu_seqlens": cu_seqlens})
    check_dtype(owner, name, tensor, DTYPES)
    check_ids(owner, "cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise BadArgument(f"{owner}: cu_seqlens is {tuple(cu_seqlens.shape)}", why="it has B + 1 elements, from 0 on")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise BadArgument(
            f"{owner}: {size!r} is no number of rows",
            why="the caller knows it; asking the device would stop the host",
            fix="max(lengths) and sum(lengths), as integers of the host",
        )
    if side not in SIDES:
        raise UnknownName("side", side, SIDES)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, cu_seqlens: torch.Tensor, total: int, side: str) -> torch.Tensor:
        ctx.save_for_backward(cu_seqlens)
        ctx.length, ctx.side, ctx.call = padded.shape[1], side, context.current()
        return packed_of(padded, cu_seqlens, total, side)

    @staticmethod
    @first_order("pack")
    def backward(ctx: Any, d_packed: torch.Tensor) -> Any:
        (cu_seqlens,) = ctx.saved_tensors
        with context.restored(ctx.call):
            return padded_of(d_packed, cu_seqlens, ctx.length, ctx.side), None, None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int, side: str) -> torch.Tensor:
        ctx.save_for_backward(cu_seqlens)
        ctx.total, ctx.side, ctx.call = len(packed), side, context.current()
        return padded_of(packed, cu_seqlens, length, side)

    @staticmethod
    @first_order("unpack")
    def backward(ctx: Any, d_padded: torch.Tensor) -> Any:
        (cu_seqlens,) = ctx.saved_tensors
        with context.restored(ctx.call):
            return packed_of(d_padded, cu_seqlens, ctx.total, ctx.side), None, None, None


# --- as torch.compile sees them -----------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensor, cu_seqlens, _, ctx.side = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.length, ctx.total = tensor.shape[1] if tensor.dim() > 1 else 0, tensor.shape[0]


_opaque_unpack: Callable[..., Any]
_opaque_pack = opaque(
    "pack(Tensor padded, Tensor cu_seqlens, SymInt total, str side) -> Tensor",
    packed_of,
    lambda padded, cu_seqlens, total, side: padded.new_empty((total, *padded.shape[2:])),
    save=_save,
    backward=lambda ctx, d: (_opaque_unpack(d, *ctx.saved_tensors, ctx.length, ctx.side), None, None, None),
)
_opaque_unpack = opaque(
    "unpack(Tensor packed, Tensor cu_seqlens, SymInt length, str side) -> Tensor",
    padded_of,
    lambda packed, cu, length, side: packed.new_empty((cu.shape[0] - 1, length, *packed.shape[1:])),
    save=_save,
    backward=lambda ctx, d: (_opaque_pack(d, *ctx.saved_tensors, ctx.total, ctx.side), None, None, None),
)
