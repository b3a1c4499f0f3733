"""Pack and unpack: rows of a padded batch of sequences side by side, and back.

Contract ``pack/1``: copies. Sequence ``b`` is rows ``starts[b]`` to ``ends[b]``, exclusive, of the packed tensor and
stands at the beginning (or the end) of its ``S`` padded rows. Rows that no sequence fills are +0 on either side;
tokens that do not fit into ``S`` rows are left out.
"""

import itertools
import random

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, index, kernel, next_power_of_2, powers_of_two, written

# A program copies ELEMENTS elements, of as few rows as have them.
REFERENCE = Config(ELEMENTS=2048, num_warps=4, num_stages=1, enable_fp_fusion=False)
KNOBS = {"ELEMENTS": (2048, 4096), "num_warps": (2, 4, 8)}


def block_of(p):
    """Elements of one row that a program copies."""
    return min(2048, next_power_of_2(p.F))


def rows_of(p, c):
    """Rows of which a program copies elements."""
    return c.ELEMENTS // block_of(p)


def side_by_side(p):
    """Where sequences of half of S tokens and more begin and end, all stretched or cut alike to fill T rows."""
    drawn = random.Random(0)  # noqa: S311  # the same lengths every time
    lengths = [p.S * drawn.uniform(0.5, 1.0) for _ in range(p.B)]
    total, whole = sum(lengths), p.B * p.S
    wanted = min(p.T - 1, whole)  # an index stays below its bound
    if wanted <= total:
        lengths = [length * wanted / total for length in lengths]
    else:
        lengths = [p.S - (p.S - length) * (whole - wanted) / (whole - total) for length in lengths]
    ends = [min(p.T - 1, int(end)) for end in itertools.accumulate(lengths)]
    return {"starts": [0, *ends[:-1]], "ends": ends}


@kernel(
    name="pack",
    family="copy",
    contract="pack/1",
    dims=("T", "B", "S", "F"),
    bucket={"T": powers_of_two, "B": powers_of_two, "S": powers_of_two},
    args={
        "padded": data("B", "S", "F", strides=("padded_stride", "padded_row_stride", 1)),
        "starts": index("B", bound="T"),
        "ends": index("B", bound="T"),
        "packed": written("T", "F", strides=("packed_stride", 1)),
    },
    reference=REFERENCE,
    knobs=KNOBS,
    derived={"BLOCK": block_of},
    grid=lambda p, c: (cdiv(p.T, rows_of(p, c)) * cdiv(p.F, block_of(p)),),
    usual=side_by_side,
)
@triton.jit(do_not_specialize=["T", "B", "S"])
def pack_kernel(
    padded, starts, ends, packed, T, B, S, F, padded_stride, padded_row_stride, packed_stride, steps, at_end,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = ELEMENTS // BLOCK
    tiles = tl.cdiv(F, BLOCK)
    rows = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    # The last sequence that begins at or before a row, by halving what is left of 0 to B, ``steps`` times.
    low = tl.zeros((ROWS,), tl.int64)
    high = low + B
    for _ in range(steps):
        middle = (low + high) // 2
        begun = tl.load(starts + middle).to(tl.int64) <= rows
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    start = tl.load(starts + low).to(tl.int64)
    end = tl.load(ends + low).to(tl.int64)
    token = rows - start
    if at_end:
        token += S - (end - start)
    filled = (rows < T) & (rows >= start) & (rows < end) & (token >= 0) & (token < S)
    source = padded + low * padded_stride + token * padded_row_stride
    values = tl.load(source[:, None] + columns[None, :], mask=filled[:, None] & (columns < F)[None, :], other=0)
    inside = (rows < T)[:, None] & (columns < F)[None, :]
    tl.store(packed + rows[:, None] * packed_stride + columns[None, :], values, mask=inside)


@kernel(
    name="unpack",
    family="copy",
    contract="pack/1",
    dims=("T", "B", "S", "F"),
    bucket={"T": powers_of_two, "B": powers_of_two, "S": powers_of_two},
    rows="B",
    args={
        "packed": data("T", "F", strides=("packed_stride", 1)),
        "starts": index("B", bound="T"),
        "ends": index("B", bound="T"),
        "padded": written("B", "S", "F", strides=("padded_stride", "padded_row_stride", 1)),
    },
    reference=REFERENCE,
    knobs=KNOBS,
    derived={"BLOCK": block_of},
    grid=lambda p, c: (p.B * cdiv(p.S, rows_of(p, c)) * cdiv(p.F, block_of(p)),),
    usual=side_by_side,
)
@triton.jit(do_not_specialize=["T", "B", "S"])
def unpack_kernel(
    packed, starts, ends, padded, T, B, S, F, packed_stride, padded_stride, padded_row_stride, at_end,
    ELEMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = ELEMENTS // BLOCK
    tiles = tl.cdiv(F, BLOCK)
    chunks = tl.cdiv(S, ROWS)
    sequence = (tl.program_id(0) // (tiles * chunks)).to(tl.int64)
    tokens = ((tl.program_id(0) // tiles) % chunks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(ends + sequence).to(tl.int64)
    rows = start + tokens
    if at_end:
        rows -= S - (end - start)
    filled = (tokens < S) & (rows >= start) & (rows < end) & (rows >= 0) & (rows < T)
    source = packed + rows * packed_stride
    values = tl.load(source[:, None] + columns[None, :], mask=filled[:, None] & (columns < F)[None, :], other=0)
    target = padded + sequence * padded_stride + tokens * padded_row_stride
    inside = (tokens < S)[:, None] & (columns < F)[None, :]
    tl.store(target[:, None] + columns[None, :], values, mask=inside)
