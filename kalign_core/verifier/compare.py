"""Bytes, not numbers: whether two runs agree, where they first do not, and a digest that two machines can compare.

NaN, -0.0 and subnormals are bytes like any other. Questions to a device are asked together, because each answer waits
for it. The digest is a sum modulo 2**64 of hashed elements, so that the order in which a device adds them does not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kalign_core.records import Refutation
from kalign_core.verifier.inputs import INTEGERS

GUARD_BYTES = 512
_CHUNK = 1 << 20
_WORDS_AT_ONCE = 1 << 27
_FOLD = 4096
_ROUND_BYTES = 4 * _FOLD


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor inside memory of its own, with guard bytes on both sides: ``flat`` is all of it, ``view`` the tensor."""

    flat: torch.Tensor
    view: torch.Tensor

    @property
    def words(self) -> torch.Tensor:
        """All bytes as int32."""
        return self.flat.view(torch.int32)


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements between the first and the last of a strided tensor, both counted; 0 for an empty one."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))


def allocate(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, *, aligned: bool, fill: int
) -> Buffer:
    """A strided tensor between guard bands, all bytes ``fill``; ``aligned=False`` moves its base by one element."""
    extent = max(extent_of(shape, strides), 1)
    offset = GUARD_BYTES + (0 if aligned else dtype.itemsize)
    total = -(-(offset + extent * dtype.itemsize + GUARD_BYTES) // _ROUND_BYTES) * _ROUND_BYTES
    # Filled four bytes at a time: devices write words faster.
    flat = torch.full((total // 4,), _repeated(fill, 4), dtype=torch.int32, device=device).view(torch.uint8)
    inner = flat[offset : offset + extent * dtype.itemsize].view(dtype)
    return Buffer(flat, torch.as_strided(inner, shape, strides))


def copy_of(buffer: Buffer) -> Buffer:
    """The same bytes at the same alignment in memory of its own."""
    flat = buffer.flat.clone()
    start = buffer.view.data_ptr() - buffer.flat.data_ptr()
    inner = flat[start : flat.numel() - (flat.numel() - start) % buffer.view.element_size()].view(buffer.view.dtype)
    return Buffer(flat, torch.as_strided(inner, buffer.view.shape, buffer.view.stride()))


def first_unlike(ours: Sequence[Buffer], theirs: Sequence[Buffer]) -> int | None:
    """Number of the first pair whose bytes differ anywhere, guard bands and gaps included; None if all agree."""
    if all(buffer.flat.device.type == "cpu" for buffer in ours):
        answers = [not torch.equal(a.words, b.words) for a, b in zip(ours, theirs, strict=True)]
    else:
        flags = [_unlike(a.words, b.words) for a, b in zip(ours, theirs, strict=True)]
        answers = torch.stack(flags).tolist() if flags else []
    return answers.index(True) if True in answers else None


def _unlike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two int32 vectors differ, as a tensor nobody has waited for yet."""
    parts = [
        (a[start : start + _WORDS_AT_ONCE] != b[start : start + _WORDS_AT_ONCE]).any()
        for start in range(0, a.numel(), _WORDS_AT_ONCE)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).any()


def untouched(buffer: Buffer, fill: int) -> bool:
    """Whether all bytes outside the tensor's elements, gaps between rows included, still hold ``fill``."""
    rest = copy_of(buffer)
    as_integers(rest.view).fill_(_repeated(fill, buffer.view.element_size()))
    return bool((rest.words == _repeated(fill, 4)).all())


def follows(view: torch.Tensor, fill: int) -> torch.Tensor:
    """Which elements of ``view`` hold nothing but the byte ``fill``."""
    return as_integers(view) == _repeated(fill, view.element_size())


def _repeated(fill: int, size: int) -> int:
    return int.from_bytes(bytes([fill] * size), "little", signed=size > 1)


def imprint(buffers: Sequence[Buffer]) -> torch.Tensor:
    """Sums modulo 2**32 over the words of ``buffers`` by row and column of a 4096-wide table, on the device.

    Whatever changes a byte changes it, but for changes that keep every row's and every column's sum.
    """
    parts = []
    for buffer in buffers:
        table = buffer.words.view(-1, _FOLD)
        # In their own type: into a wider one torch would copy the whole table first.
        parts += [table.sum(0, dtype=torch.int32), table.sum(1, dtype=torch.int32)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers of the same width."""
    return tensor.view(INTEGERS[tensor.element_size()])


def first_difference(check: str, argument: str, reference: Buffer, candidate: Buffer) -> Refutation:
    """A refutation naming the first differing element of ``argument``, or saying that only its surroundings differ."""
    ours, theirs = as_integers(reference.view), as_integers(candidate.view)
    differing = (ours != theirs).contiguous()
    count = int(differing.sum())
    if count == 0:
        return Refutation(check, "bytes outside the declared elements differ", argument=argument)
    # Of several largest, argmax gives the first.
    flat = int(differing.view(-1).to(torch.uint8).argmax())
    where = _coordinate(flat, differing.shape)
    width = reference.view.element_size() * 2
    mask = (1 << (width * 4)) - 1
    one, other = int(ours[where]) & mask, int(theirs[where]) & mask
    return Refutation(
        check,
        "bytes differ",
        argument=argument,
        coordinate=where,
        reference=f"{one:0{width}x}",
        candidate=f"{other:0{width}x}",
        reference_value=float(reference.view[where]),
        candidate_value=float(candidate.view[where]),
        differing=count,
        compared=ours.numel(),
        ulps=ulps_between(reference.view[where], candidate.view[where]),
    )


def _coordinate(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Where element number ``flat`` of a row-major ``shape`` lies; torch's own imports sympy, which takes seconds."""
    where = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        where.append(at)
    return tuple(reversed(where))


def ulps_between(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """How many steps between neighbouring numbers lie between two elements of one dtype; None where one is NaN.

    -0.0 and 0.0 are one step apart, since their bytes differ.
    """
    if not a.dtype.is_floating_point:
        return abs(int(a) - int(b))
    if bool(a.isnan()) or bool(b.isnan()):
        return None
    return abs(_place(a) - _place(b))


def _place(x: torch.Tensor) -> int:
    """Where the number stands in the order of its dtype's numbers: 0 for +0, -1 for -0."""
    sign = 1 << (x.element_size() * 8 - 1)
    pattern = int(as_integers(x)) & (2 * sign - 1)
    return -1 - (pattern - sign) if pattern & sign else pattern


def digest(tensors: list[torch.Tensor]) -> str:
    """16 hexadecimal digits over the elements of ``tensors``, by position and bytes; equal bytes give equal digests."""
    sums = []
    for number, tensor in enumerate(tensors):
        flat = as_integers(tensor.contiguous()).reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].to(torch.int64)
            where = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
            sums.append(_mix64(part ^ _mix64(where + (number << 40))).sum())
    total = int(torch.stack(sums).sum()) if sums else 0
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit finaliser with the constants of splitmix64 (S. Vigna, public domain)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
