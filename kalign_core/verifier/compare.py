"""Bytes, not numbers: whether two runs agree, where they first do not, and a digest that two machines can compare.

NaN, -0.0 and subnormals are bytes like any other. The digest is a sum modulo 2**64 of hashed elements, so that the
order in which a device adds them does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kalign_core.records import Refutation
from kalign_core.verifier.inputs import INTEGERS

GUARD_BYTES = 512
_CHUNK = 1 << 16
_PAIRS_AT_ONCE = 1 << 26
_ELEMENTS_AT_ONCE = 1 << 21
# How many rows an imprint's table has, however large the buffer. On a GPU torch adds down a column with few threads;
# where that leaves a thread 256 numbers, blocks share a column, and each of them takes scratch memory for whole vectors
# of all of its threads, tens of MiB together (setReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh).
_ROWS = 256
_ROUND_BYTES = 16 * _ROWS  # rows of whole vectors, and an even number of words in a seal, to be compared two at a time


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor inside memory of its own, with guard bytes on both sides: ``flat`` is all of it, ``view`` the tensor."""

    flat: torch.Tensor
    view: torch.Tensor

    @property
    def words(self) -> torch.Tensor:
        """All bytes as int32."""
        return self.flat.view(torch.int32)

    @property
    def pairs(self) -> torch.Tensor:
        """All bytes as int64, two words each."""
        return self.flat.view(torch.int64)


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements between the first and the last of a strided tensor, both counted; 0 for an empty one."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))


def bytes_for(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, aligned: bool) -> int:
    """Bytes that a strided tensor takes between its guard bands, as many as an imprint's table holds."""
    extent = max(extent_of(shape, strides), 1)
    return -(-(_offset(dtype, aligned) + extent * dtype.itemsize + GUARD_BYTES) // _ROUND_BYTES) * _ROUND_BYTES


def placed(
    flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, aligned: bool
) -> Buffer:
    """A strided tensor in the middle of ``flat``: ``bytes_for`` bytes; ``aligned=False`` moves it by one element."""
    start = _offset(dtype, aligned)
    inner = flat[start : start + max(extent_of(shape, strides), 1) * dtype.itemsize].view(dtype)
    return Buffer(flat, torch.as_strided(inner, shape, strides))


def _offset(dtype: torch.dtype, aligned: bool) -> int:
    return GUARD_BYTES + (0 if aligned else dtype.itemsize)


def allocate(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, *, aligned: bool, fill: int
) -> Buffer:
    """A strided tensor between guard bands in memory of its own, all bytes ``fill``."""
    # Filled four bytes at a time: devices write words faster.
    words = bytes_for(shape, strides, dtype, aligned=aligned) // 4
    flat = torch.full((words,), repeated(fill, 4), dtype=torch.int32, device=device).view(torch.uint8)
    return placed(flat, shape, strides, dtype, aligned=aligned)


def copy_of(buffer: Buffer) -> Buffer:
    """The same bytes at the same alignment in memory of its own."""
    flat = buffer.flat.clone()
    start = buffer.view.data_ptr() - buffer.flat.data_ptr()
    inner = flat[start : flat.numel() - (flat.numel() - start) % buffer.view.element_size()].view(buffer.view.dtype)
    return Buffer(flat, torch.as_strided(inner, buffer.view.shape, buffer.view.stride()))


def unlike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two int64 vectors differ anywhere, on their device: bool ``()``; nothing is waited for.

    Takes an eighth of the memory of one of them, 64 MiB at most.
    """
    if a.numel() <= _PAIRS_AT_ONCE:
        return (a != b).any()
    parts = (slice(start, start + _PAIRS_AT_ONCE) for start in range(0, a.numel(), _PAIRS_AT_ONCE))
    return torch.stack([(a[part] != b[part]).any() for part in parts]).any()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two int64 vectors are equal; waits for the device."""
    return not bool(unlike(a, b))


def untouched(buffer: Buffer, fill: int) -> bool:
    """Whether all bytes outside the tensor's elements, gaps between rows included, still hold ``fill``.

    Overwrites the elements, so that no copy is needed.
    """
    as_integers(buffer.view).fill_(repeated(fill, buffer.view.element_size()))
    return bool((buffer.pairs == repeated(fill, 8)).all())


def follows(view: torch.Tensor, fill: int) -> torch.Tensor:
    """Which elements of ``view`` hold nothing but the byte ``fill``."""
    return as_integers(view) == repeated(fill, view.element_size())


def repeated(fill: int, size: int) -> int:
    """``size`` bytes ``fill`` as an integer of that width, as torch writes it."""
    return int.from_bytes(bytes([fill] * size), "little", signed=size > 1)


@dataclass(frozen=True, slots=True)
class Seal:
    """An imprint of a buffer: sums modulo 2**32 over the columns and rows of a table with all its bytes.

    The table has 256 rows. Whatever changes a byte changes a sum, but for changes that keep every one of them.
    """

    table: torch.Tensor
    columns: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, buffer: Buffer, into: torch.Tensor) -> Seal:
        """The seal of ``buffer`` kept in ``into``: int32 ``(seal_words(buffer),)``; nothing is taken yet."""
        return cls(buffer.words.view(_ROWS, -1), into[:-_ROWS], into[-_ROWS:])

    def take(self) -> None:
        """Take the imprint of the buffer as it is now."""
        # In their own type: into a wider one torch would copy the whole table first.
        torch.sum(self.table, 0, dtype=torch.int32, out=self.columns)
        torch.sum(self.table, 1, dtype=torch.int32, out=self.rows)


def seal_words(buffer: Buffer) -> int:
    """How many words the seal of ``buffer`` has."""
    return buffer.flat.numel() // (4 * _ROWS) + _ROWS


def divided(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """A vector in pieces of ``sizes``, from its beginning."""
    ends = itertools.accumulate(sizes)
    return [tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers of the same width."""
    return tensor.view(INTEGERS[tensor.element_size()])


def first_difference(check: str, argument: str, reference: Buffer, candidate: Buffer) -> Refutation:
    """A refutation naming the first differing element of ``argument``, or saying that only its surroundings differ."""
    ours, theirs = as_integers(reference.view), as_integers(candidate.view)
    if not ours.dim():
        ours, theirs = ours.view(1), theirs.view(1)
    counts = [int((ours[part] != theirs[part]).sum()) for part in _parts(ours)]
    count = sum(counts)
    if count == 0:
        return Refutation(check, "bytes outside the declared elements differ", argument=argument)
    part = _parts(ours)[next(number for number, found in enumerate(counts) if found)]
    differing = (ours[part] != theirs[part]).contiguous()
    # Of several largest, argmax gives the first.
    first, *others = _coordinate(int(differing.view(-1).view(torch.uint8).argmax()), differing.shape)
    where = (part.start + first, *others)
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


def _parts(tensor: torch.Tensor) -> list[slice]:
    """Parts of the first axis with a bounded number of elements each."""
    step = max(1, _ELEMENTS_AT_ONCE // max(1, tensor[:1].numel()))
    return [slice(start, start + step) for start in range(0, tensor.shape[0], step)]


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
