"""Input families: numbers assembled from a counter-based integer hash, the same on every machine.

An element's value depends on the family, the seed, the argument's name, its row's number and its column, and on
nothing else, so that a row of one case can be found again in another. Everything is integer arithmetic modulo 2**32
followed by exact conversions and one rounding to the argument's dtype; no library's random stream is involved. Where a
sum needs factors that fit together (near-cancelling products), operand 0 carries the pattern and the others follow.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kalign_core.records import DTYPES, InputFamily

TORCH_DTYPES: dict[str, torch.dtype] = {short: getattr(torch, name) for name, short in DTYPES.items()}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensor = torch.Tensor
_SIGN = -(1 << 31)
_MANTISSA = 0x007FFFFF
# How many kinds of row a family has: as many rows, or seeds, it takes to see all of them.
ROW_KINDS = {"signed_zeros": 2, "subnormals": 4, "infinities": 7}
# One quiet NaN with a payload that bfloat16 keeps. One only, because where two different ones meet, a compiler may
# choose whose payload survives.
_NANS = {"bf16": 0x7FD5, "fp16": 0x7F55, "fp32": 0x7FD50000, "fp64": 0x7FFAA00000000000, "fp8e4nv": 0x7F, "fp8e5": 0x7E}


@dataclass(frozen=True)
class Request:
    """A block of numbers to make: rows numbered ``rows: (r,)`` (int32), ``columns`` wide, in ``dtype``.

    ``name`` is the argument's name and ``seed`` the case's seed; both enter the hash. ``length`` is the size of the
    axis along which the kernel adds, the innermost of ``columns`` (all of it where 0). ``operand`` counts the kernel's
    data arguments from 0.
    """

    name: str
    dtype: str
    rows: Tensor
    columns: int
    seed: int
    length: int = 0
    operand: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def narrow(self) -> bool:
        """Whether the dtype has the range of fp16 or less."""
        return self.dtype in ("fp16", "fp8e4nv", "fp8e5")

    def hash(self, salt: int = 0) -> Tensor:
        """32 random bits per element as int32: ``(r c)``."""
        return _stir((self._mixed_rows ^ self._start(salt))[:, None] ^ _column_hash(self.columns, self.rows.device))

    def row_hash(self, salt: int = 0) -> Tensor:
        """32 random bits per row as int32: ``(r,)``."""
        return _stir(self._mixed_rows ^ self._start(salt))

    @functools.cached_property
    def _mixed_rows(self) -> Tensor:
        return _mix(self.rows * signed(0x9E3779B1) + 1)

    def only(self, index: slice | Tensor) -> Request:
        """The same block with the rows at ``index`` alone."""
        return replace(self, rows=self.rows[index])._mixed_as(self._mixed_rows[index])

    def about(self, **changes: Any) -> Request:
        """The same rows of another block: this request with ``changes`` to anything but its rows."""
        return replace(self, **changes)._mixed_as(self._mixed_rows)

    def on(self, device: torch.device) -> Request:
        """The same block, to be made on ``device``."""
        return replace(self, rows=self.rows.to(device))._mixed_as(self._mixed_rows.to(device))

    def _mixed_as(self, mixed: Tensor) -> Request:
        vars(self)["_mixed_rows"] = mixed  # where the cached property looks first; ``replace`` leaves it behind
        return self

    def row_kind(self, family: str) -> Tensor:
        """Which of the kinds of row that ``family`` has each row is: ``(r 1)``; the next seed moves them on by one."""
        return ((self.rows + (self.seed - 1)) % ROW_KINDS[family])[:, None]

    def _start(self, salt: int) -> int:
        return signed(zlib.crc32(f"{self.name}/{self.seed}/{salt}".encode()))

    def along(self) -> Tensor:
        """Where each column stands on the axis that is added along: int32 ``(c,)``."""
        columns = torch.arange(self.columns, dtype=torch.int32, device=self.rows.device)
        return columns % self.length if self.length else columns

    def ends(self, first: Tensor, last: Tensor) -> Tensor:
        """Where a sum begins in the rows ``first: (r 1)`` and where it ends in the rows ``last: (r 1)``: ``(r c)``."""
        along = self.along()[None, :]
        return (first & (along == 0)) | (last & (along == (self.length or self.columns) - 1))

    def block(self) -> Tensor:
        """An uninitialised block of the right shape and dtype."""
        return torch.empty((len(self.rows), self.columns), dtype=self.torch_dtype, device=self.rows.device)

    def ones(self) -> Tensor:
        """A block of ones."""
        return self.block().fill_(1.0)


def signed(value: int) -> int:
    """``value`` modulo 2**32 as a signed 32-bit integer."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser, constants of C. Wellons' low-bias search (nullprogram.com, 2018); overwrites ``x``."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return _stir(x)


def _stir(x: Tensor) -> Tensor:
    """The finaliser without its first step, for what is random in all bits already; overwrites ``x``."""
    x *= signed(0x7FEB352D)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= signed(0x846CA68B)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


@functools.lru_cache(maxsize=64)
def _column_hash(columns: int, device: torch.device) -> Tensor:
    """32 random bits per column as int32: ``(c,)``; shared, not to be written to."""
    numbers = torch.arange(columns, dtype=torch.int32, device=device)
    return _mix(numbers * signed(0x85EBCA77) + 2)


def bits(pattern: Tensor) -> Tensor:
    """An int32 pattern as the float32 it spells."""
    return pattern.view(torch.float32)


def nan_of(dtype: str, seed: int) -> int:
    """The bit pattern of the NaN that a case of ``seed`` uses in ``dtype``, negative for odd seeds, signed."""
    size = torch.empty((), dtype=TORCH_DTYPES[dtype]).element_size() * 8
    pattern = _NANS[dtype] | (seed & 1) << (size - 1)
    return pattern - (1 << size) if pattern >> (size - 1) and size > 8 else pattern


def normals(request: Request) -> Tensor:
    """Nearly normal numbers of variance one: four 16-bit uniforms added, six more bits below, scaled in float32.

    The bits below fill float32's mantissa; without them most sums in float32 would be exact and show no order.
    """
    first = request.hash(0)
    second = _stir(first ^ signed(0x9E3779B1))
    total = (first ^ second).bitwise_right_shift_(13).bitwise_and_(63).sub_(131070 * 64)
    high = first >> 16
    high.bitwise_and_(0xFFFF)
    first += second
    high += second.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    first.sub_(high, alpha=0xFFFF)  # low halves and high ones, each once
    total.add_(first, alpha=64)
    # Not in one step: torch would multiply an integer by a fraction in the process's default dtype.
    return bits(high).copy_(total).mul_(1.75 / (65536 * 64)).to(request.torch_dtype)


def spread(request: Request) -> Tensor:
    """Full random mantissas with exponents spread evenly over +-20 (-10 to 5 where the dtype's range is fp16's)."""
    noise = request.hash(2)
    low, count = (-10, 16) if request.narrow else (-20, 41)
    exponent = (noise >> 23).bitwise_and_(0xFF).remainder_(count).add_(127 + low).bitwise_left_shift_(23)
    return bits(noise.bitwise_and_(_SIGN | _MANTISSA).bitwise_or_(exponent)).to(request.torch_dtype)


def cancelling(request: Request) -> Tensor:
    """Neighbours of opposite sign that differ in the last bits their type keeps, exponents spread over +-12.

    A sum loses nearly everything of each pair. Only operand 0 alternates in sign, so that products cancel as well.
    """
    along = request.along()
    columns = torch.arange(request.columns, dtype=torch.int64, device=request.rows.device)
    noise = request.hash(4)
    paired = noise[:, columns - (along & 1)]
    low, count = (-8, 12) if request.narrow else (-12, 25)
    exponent = (paired >> 23).bitwise_and_(0xFF).remainder_(count).add_(127 + low).bitwise_left_shift_(23)
    jitter = noise.bitwise_right_shift_(8).bitwise_and_(7).bitwise_left_shift_(13 if request.narrow else 16)
    paired.bitwise_and_(_MANTISSA).bitwise_or_(exponent).bitwise_xor_(jitter)
    if request.operand == 0:
        paired |= (along & 1)[None, :] << 31
    return bits(paired).to(request.torch_dtype)


def swallowing(request: Request) -> Tensor:
    """(1e20, -1e20, 3, 0) round and round against ones: whether the 3 survives depends on the order of summation."""
    if request.operand:
        return request.ones()
    big = 3e4 if request.narrow else 1e20
    small = 2.0**-23 if request.narrow else 3.0
    table = torch.tensor([big, -big, small, 0.0], dtype=torch.float32, device=request.rows.device)
    turn = (request.along()[None, :] + request.rows[:, None]).bitwise_and_(3)
    return table.to(request.torch_dtype)[turn.long()]


def signed_zeros(request: Request) -> Tensor:
    """Zeros of both signs, every other row of nothing else, and a few ones."""
    noise = request.hash(6)
    one = ((noise & 15) == 0) & (request.row_kind("signed_zeros") == 0)
    noise.bitwise_and_(_SIGN).bitwise_or_(one.to(torch.int32).mul_(127 << 23))
    return bits(noise).to(request.torch_dtype)


def subnormals(request: Request) -> Tensor:
    """The smallest numbers the dtype has, both signs, beside normals with which their products stay as small.

    Operand 0 has them everywhere but in one column of eight of odd rows, where an odd operand has some, or an even one.
    """
    slot = (request.along() & 7)[None, :]
    kind = request.row_kind("subnormals")
    if request.operand:
        small = slot == (7 if request.operand & 1 else 3)
    else:
        small = ((kind != 1) | (slot != 7)) & ((kind != 3) | (slot != 3))
    return torch.where(small, _smallest(request), normals(request))


def _smallest(request: Request) -> Tensor:
    """Random subnormal numbers of the dtype, a few of them zero."""
    noise = request.hash(7)
    if request.dtype in ("bf16", "fp16"):
        mantissa = 0x7F if request.dtype == "bf16" else 0x3FF
        low = noise & mantissa
        low |= noise.bitwise_right_shift_(16).bitwise_and_(-32768)
        return low.to(torch.int16).view(request.torch_dtype)
    if request.torch_dtype.itemsize == 1:
        mantissa = 7 if request.dtype == "fp8e4nv" else 3
        return noise.bitwise_and_(0x80 | mantissa).to(torch.uint8).view(request.torch_dtype)
    return bits(noise.bitwise_and_(_SIGN | _MANTISSA)).to(request.torch_dtype)


def infinities(request: Request) -> Tensor:
    """Normals with an infinity of either sign in one element of 64 and at either end of some rows, and whole rows.

    Other rows have the largest numbers of the dtype in one element of eight, and in operand 0 nothing but zeros: beside
    an infinity in another operand they make NaN, unless somebody thinks that zeros need not be multiplied.
    """
    values = normals(request).float()
    noise = request.hash(8)
    kind = request.row_kind("infinities")
    hit = ((noise & 63) == 0) | request.ends(kind == 0, kind == 6)
    values.masked_fill_(hit, torch.inf)
    values.masked_fill_(hit & (noise < 0), -torch.inf)
    values.masked_fill_(kind == 1, -torch.inf).masked_fill_(kind == 4, torch.inf)
    if request.operand == 0:
        values.masked_fill_(kind == 2, 0.0)
    large = (kind == 3) & ((noise & 7) == 0)
    most = torch.finfo(request.torch_dtype).max
    values.masked_fill_(large, most).masked_fill_(large & (noise < 0), -most)
    return values.to(request.torch_dtype)


def not_numbers(request: Request) -> Tensor:
    """Normals with NaN, one payload for the whole case, somewhere in every third row, at either end of some.

    Other rows must not notice.
    """
    values = normals(request)
    kind = (request.rows % 9)[:, None]
    hit = (((request.hash(9) & 31) == 0) & (kind % 3 == 0)) | request.ends(kind == 0, kind == 3)
    values.view(INTEGERS[values.element_size()]).masked_fill_(hit, nan_of(request.dtype, request.seed))
    return values


def integers(request: Request, bound: int) -> Tensor:
    """Whole numbers from 0 up to ``bound``, exclusive, both ends of the range in one element of 64 each."""
    noise = request.hash(10).bitwise_and_(0x7FFFFFFF)
    end = noise >> 25
    numbers = noise.remainder_(bound)
    return numbers.masked_fill_(end == 0, 0).masked_fill_(end == 1, bound - 1).to(request.torch_dtype)


def choices(request: Request) -> Tensor:
    """Zeros and ones; a row of four has nothing but zeros, another one nothing but ones."""
    chosen = request.hash(10).bitwise_and_(1)
    kind = (request.rows & 3)[:, None]
    return chosen.masked_fill_(kind == 1, 0).masked_fill_(kind == 2, 1).to(request.torch_dtype)


CORE_FAMILIES: tuple[InputFamily, ...] = (
    InputFamily("normals", normals),
    InputFamily("spread", spread, sees_order=True),
    InputFamily("cancelling", cancelling, sees_order=True),
    InputFamily("swallowing", swallowing, sees_order=True),
    InputFamily("signed_zeros", signed_zeros),
    InputFamily("subnormals", subnormals),
    InputFamily("infinities", infinities),
    InputFamily("not_numbers", not_numbers),
)

Fill = Callable[[Request], Any]
