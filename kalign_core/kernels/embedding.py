"""Embedding: rows of a table by number, and the gradient of the table.

Contract ``embedding/1``. Forward: a copy; a number outside the table gives a row of +0. Backward: a row of the table
takes the upstream rows of the tokens that named it, in float32, in ascending token order from +0, with one rounding to
the table's dtype; a row that nobody named is +0. Tokens whose number lies outside the table add nothing.
"""

import bisect
import itertools
import math
import random

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, index, kernel, mask, next_power_of_2, powers_of_two, written
from kalign_core.kernels.pairs import line_of

KNOBS = {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)}
# Of Mandelbrot's form of Zipf's law, for text: S. T. Piantadosi, Psychonomic Bulletin & Review 21, 2014.
OFFSET = 2.7


def wide_tiles(p):
    """Reference: 16 elements a thread, up to 2,048 a program."""
    block = max(256, min(2048, next_power_of_2(p.H)))
    return Config(BLOCK=block, num_warps=max(1, block // 512), num_stages=1, enable_fp_fusion=False)


def wide_tiles_back(p):
    """Reference of the backward pass: as forward, and two rows at a time, since most of a table have none or one."""
    return wide_tiles(p).replace(UNROLL=2)


def text_ids(p):
    """Ids of T tokens as text has them: the n-th most frequent of V takes a share of about 1 / (n + OFFSET).

    Ids count down in frequency, as in vocabularies that were built by merging the most frequent pair first.
    """
    drawn = random.Random(0)  # noqa: S311  # the same tokens every time
    low = 0.5 + OFFSET
    steps = math.log((p.V + low) / low)
    return [min(p.V - 1, int(low * math.exp(drawn.random() * steps) - low)) for _ in range(p.T)]


def text_runs(p):
    """What the backward kernel is given for these ids."""
    ids = text_ids(p)
    order = sorted(range(p.T), key=ids.__getitem__)
    ordered = [ids[token] for token in order]
    joined = [False, *(one == other for one, other in itertools.pairwise(ordered))]
    place = [min(bisect.bisect_left(ordered, number), p.T - 1) for number in range(p.V)]
    named = [ordered[at] == number for number, at in enumerate(place)]
    return {"order": order, "joined": joined, "place": place, "named": named}


@kernel(
    name="embedding",
    family="pointwise",
    contract="embedding/1",
    dims=("T", "V", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "ids": index("T", bound="V"),
        "weight": data("V", "H", strides=("weight_stride", 1)),
        "out": written("T", "H", strides=("out_stride", 1)),
    },
    reference=wide_tiles,
    knobs=KNOBS,
    grid=lambda p, c: (p.T * cdiv(p.H, c.BLOCK),),
    usual=lambda p: {"ids": text_ids(p)},
)
@triton.jit(do_not_specialize=["T"])
def embedding_kernel(ids, weight, out, T, V, H, weight_stride, out_stride, BLOCK: tl.constexpr):
    tiles = tl.cdiv(H, BLOCK)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    width = tl.where((row >= 0) & (row < V), H, 0)
    values = tl.load(weight + row * weight_stride + columns, mask=columns < width, other=0.0)
    tl.store(out + token * out_stride + columns, values, mask=columns < H)


@kernel(
    name="embedding_backward",
    family="gather",
    contract="embedding/1",
    dims=("T", "V", "H"),
    bucket={"T": powers_of_two},
    args={
        "order": index("T", bound="T"),
        "joined": mask("T"),
        "place": index("V", bound="T"),
        "named": mask("V"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)),
        "d_weight": written("V", "H", strides=("H", 1), observe="fp32"),
    },
    reference=wide_tiles_back,
    knobs={"UNROLL": (2, 4, 8), "BLOCK": (1024, 2048), "num_warps": (4, 8)},
    grid=lambda p, c: (p.V * cdiv(p.H, c.BLOCK),),
    usual=text_runs,
)
@triton.jit(do_not_specialize=["T"])
def embedding_backward_kernel(
    order, joined, place, named, d_out, d_weight, T, V, H, d_out_stride, UNROLL: tl.constexpr, BLOCK: tl.constexpr
):
    """``order`` sorts the tokens by number, ``joined`` says which of them has the number of the one before it,
    ``place`` is where a number's tokens begin, if it is ``named`` at all.
    """
    tiles = tl.cdiv(H, BLOCK)
    number = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.arange(0, UNROLL)
    total = tl.zeros((BLOCK,), tl.float32)
    # UNROLL tokens at a time: which they are, and how many of them are of this number, none where it is not named.
    here = tl.load(place + number).to(tl.int64) + steps
    there = here < tl.where(tl.load(named + number) != 0, T, 0)
    rows = tl.load(order + here, mask=there, other=0).to(tl.int64)
    more = tl.load(joined + here, mask=there & (steps > 0), other=1)
    count = tl.min(tl.where(there & (more != 0), UNROLL, steps), axis=0)
    while count > 0:
        inside = (steps < count)[:, None] & (columns < H)[None, :]
        source = d_out + rows[:, None] * d_out_stride + columns[None, :]
        values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        # The next ones are looked up while these rows are on their way.
        here += UNROLL
        there = here < tl.where(count == UNROLL, T, 0)
        rows = tl.load(order + here, mask=there, other=0).to(tl.int64)
        more = tl.load(joined + here, mask=there, other=0)
        count = tl.min(tl.where(more != 0, UNROLL, steps), axis=0)
        # In ascending order; a row that is not there adds +0.
        for step in tl.static_range(UNROLL):
            total += line_of(values, step, UNROLL, BLOCK)
    tl.store(d_weight + number * H + columns, total.to(d_weight.dtype.element_ty), mask=columns < H)
