"""The clipped policy-gradient loss of GRPO with a KL penalty, forward and backward.

Contract ``grpo_loss/2``, in float32, no fused multiply-add; ``P`` is the adjacent-pair sum of ``kernels.pairs``. Per
token, with ``x = ref - p`` and ``k3`` as in ``kernels.kl``: ``r = exp(p - old)``; ``c`` is ``r`` clipped to
``[low, high]``; ``s = min(r * A, c * A)``; ``loss = beta * k3(x) - s``, without the reference ``-s``. A masked token
is +0, whatever its numbers are: it is selected away, never multiplied.

A sequence's sum: ``P`` over each 1,024 tokens, ``P`` over each 16 such blocks, these in ascending order from +0. Over
sequences: ``P`` over each 64, these in ascending order from +0. So masked tokens at the end of the sequences and
sequences without a token, at the end of the batch, change nothing. ``N`` is the number of tokens, ``n`` that of
sequences that have one:
``token: div_rn(sum, N)``; ``sequence: div_rn(sum of div_rn(sequence's sum, its tokens), n)``;
``fixed: div_rn(sum, n * length)``; all +0 where there is no token.

Backward: ``w = d * share`` with ``share = div_rn(1, what the sum is divided by)``, and by sequences
``w = (d * share) * div_rn(1, its tokens)``; ``g = r * A`` where ``not c * A < r * A``, else +0;
``d_p = round(w * (beta * slope(x) - g))``.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, mask, powers_of_two, side_output, written
from kalign_core.kernels.kl import k3_of, k3_slope
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.pairs import line_of, pair_sum
from kalign_core.kernels.tokens import load_floats, load_mask, store_rounded, tile_of, tiles_of_sequences

# Part of the contract: tokens summed to one partial result, and what the fold adds by pairs.
TOKENS = 1024
FOLD_BLOCKS = 16
FOLD_ROWS = 64
BUCKET = {"B": powers_of_two, "S": powers_of_two}
TOKEN_ARGS = {
    "logp": data("B", "S", strides=("logp_stride", 1)),
    "old_logp": data("B", "S", strides=("old_stride", 1)),
    "ref_logp": data("B", "S", strides=("ref_stride", 1)),
    "advantages": data("B"),
    "token_advantages": data("B", "S", strides=("advantages_stride", 1)),
    "keep": mask("B", "S", strides=("keep_stride", 1)),
}


@triton.jit
def _surrogate(p, old, advantage, low, high):
    """The unclipped and the clipped objective."""
    r = tl.exp(p - old)
    c = tl.where(r < low, low, tl.where(r > high, high, r))
    return r * advantage, c * advantage


@triton.jit
def _advantage(advantages, token_advantages, row, columns, inside):
    if token_advantages is None:
        advantage = tl.load(advantages + row).to(tl.float32)
    else:
        advantage = load_floats(token_advantages + columns, inside)
    return advantage


@triton.jit
def _token_losses(
    logp, old_logp, ref_logp, advantages, token_advantages, keep, row, columns, inside, low, high, beta,
):  # fmt: skip
    """What each token adds to the sum and to the count."""
    p = load_floats(logp + columns, inside)
    old = load_floats(old_logp + columns, inside)
    advantage = _advantage(advantages, token_advantages, row, columns, inside)
    plain, clipped = _surrogate(p, old, advantage, low, high)
    least = tl.where(clipped < plain, clipped, plain)
    if ref_logp is not None:
        loss = beta * k3_of(load_floats(ref_logp + columns, inside) - p) - least
    else:
        loss = -least
    if keep is not None:
        kept = load_mask(keep + columns, inside)
    elif inside is not None:
        kept = inside
    else:
        kept = columns >= 0
    return tl.where(kept, loss, 0.0), kept.to(tl.int32)


@kernel(
    name="grpo_loss_blocks",
    family="tokens",
    contract="grpo_loss/2",
    dims=("B", "S"),
    bucket=BUCKET,
    rows="B",
    args={
        **TOKEN_ARGS,
        "sums": written("B", "S/1024", strides=("blocks_stride", 1)),
        "counts": written("B", "S/1024", strides=("blocks_stride", 1)),
    },
    reference=Config(BLOCKS=1, TOKENS=TOKENS, LOG2=10, num_warps=2, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCKS": (1, 2), "num_warps": (2, 4, 8)},
    grid=lambda p, c: (p.B, cdiv(p.S, c.BLOCKS * TOKENS)),
)
@triton.jit(do_not_specialize=["B", "S"])
def grpo_loss_blocks_kernel(
    logp, old_logp, ref_logp, advantages, token_advantages, keep, sums, counts, B, S,
    logp_stride, old_stride, ref_stride, advantages_stride, keep_stride, blocks_stride, low, high, beta,
    BLOCKS: tl.constexpr, TOKENS: tl.constexpr, LOG2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(BLOCKS * TOKENS)
    logp += row * logp_stride
    old_logp += row * old_stride
    if ref_logp is not None:
        ref_logp += row * ref_stride
    if token_advantages is not None:
        token_advantages += row * advantages_stride
    if keep is not None:
        keep += row * keep_stride
    columns = first + tl.arange(0, BLOCKS * TOKENS)
    after_predecessor(OVERLAP)
    if first + BLOCKS * TOKENS <= S:
        losses, kept = _token_losses(
            logp, old_logp, ref_logp, advantages, token_advantages, keep, row, columns, None, low, high, beta
        )
    else:
        losses, kept = _token_losses(
            logp, old_logp, ref_logp, advantages, token_advantages, keep, row, columns, columns < S, low, high, beta
        )
    total = pair_sum(tl.reshape(losses, (BLOCKS, TOKENS)), BLOCKS, LOG2)
    count = pair_sum(tl.reshape(kept, (BLOCKS, TOKENS)), BLOCKS, LOG2)
    blocks = first // TOKENS + tl.arange(0, BLOCKS)
    there = blocks < tl.cdiv(S, TOKENS)
    tl.store(sums + row * blocks_stride + blocks, total, mask=there)
    tl.store(counts + row * blocks_stride + blocks, count, mask=there)


@triton.jit
def _sequences(sums, counts, rows, B, BLOCKS, ROWS: tl.constexpr, COLS: tl.constexpr, LOG2: tl.constexpr):
    """Sums and counts of the sequences ``rows``."""
    total = tl.zeros((ROWS,), tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for first in range(0, BLOCKS, COLS):
        blocks = first + tl.arange(0, COLS)
        there = (rows < B)[:, None] & (blocks < BLOCKS)[None, :]
        offsets = rows[:, None] * BLOCKS + blocks[None, :]
        total += pair_sum(tl.load(sums + offsets, mask=there, other=0.0), ROWS, LOG2)
        count += pair_sum(tl.load(counts + offsets, mask=there, other=0), ROWS, LOG2)
    return total, count


@kernel(
    name="grpo_loss_fold",
    family="fold",
    contract="grpo_loss/2",
    dims=("B", "BLOCKS"),
    bucket={"B": powers_of_two, "BLOCKS": powers_of_two},
    args={
        "sums": data("B", "BLOCKS", strides=("BLOCKS", 1)),
        "counts": mask("B", "BLOCKS", strides=("BLOCKS", 1)),
        "loss": written(strides=()),
        "shares": side_output("B"),
        "share": side_output(strides=()),
    },
    reference=Config(
        UNROLL=1,
        ROWS=FOLD_ROWS,
        ROWS_LOG2=6,
        COLS=FOLD_BLOCKS,
        COLS_LOG2=4,
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,
    ),
    knobs={"UNROLL": (1, 2, 4), "num_warps": (4, 8, 16)},
    grid=lambda p, c: (1,),
)
@triton.jit(do_not_specialize=["B", "BLOCKS"])
def grpo_loss_fold_kernel(
    sums, counts, loss, shares, share, B, BLOCKS, length, UNROLL: tl.constexpr,
    ROWS: tl.constexpr, ROWS_LOG2: tl.constexpr, COLS: tl.constexpr, COLS_LOG2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """By sequences where ``shares`` is there, fixed where ``length`` is, else by tokens."""
    after_predecessor(OVERLAP)
    # Vectors of one element: what is stored to the two scalars.
    total = tl.zeros((1,), tl.float32)
    number = tl.zeros((1,), tl.int64)
    for first in range(0, B, UNROLL * ROWS):
        rows = first + tl.arange(0, UNROLL * ROWS)
        sum, count = _sequences(sums, counts, rows, B, BLOCKS, UNROLL * ROWS, COLS, COLS_LOG2)
        if shares is not None:
            width = count.to(tl.float32)
            tl.store(shares + rows, tl.where(count > 0, tl.div_rn(1.0, width), 0.0), mask=rows < B)
            sum = tl.where(count > 0, tl.div_rn(sum, width), 0.0)
        if shares is not None or length is not None:
            count = (count > 0).to(tl.int32)
        parts = pair_sum(tl.reshape(sum, (UNROLL, ROWS)), UNROLL, ROWS_LOG2)[:, None]
        # In ascending order; parts behind the last sequence are +0.
        for step in tl.static_range(UNROLL):
            total += line_of(parts, step, UNROLL, 1)
        number += tl.sum(count.to(tl.int64), axis=0)
    divisor = number.to(tl.float32)
    if length is not None:
        divisor *= tl.cast(length, tl.float32)
    only = tl.arange(0, 1)
    tl.store(loss + only, tl.where(number > 0, tl.div_rn(total, divisor), 0.0))
    tl.store(share + only, tl.where(number > 0, tl.div_rn(1.0, divisor), 0.0))


@triton.jit
def _gradient(
    logp, old_logp, ref_logp, advantages, token_advantages, keep, shares, share, d_loss, d_logp,
    row, columns, inside, low, high, beta,
):  # fmt: skip
    p = load_floats(logp + columns, inside)
    old = load_floats(old_logp + columns, inside)
    advantage = _advantage(advantages, token_advantages, row, columns, inside)
    plain, clipped = _surrogate(p, old, advantage, low, high)
    gain = tl.where(clipped < plain, 0.0, plain)
    if ref_logp is not None:
        slope = beta * k3_slope(load_floats(ref_logp + columns, inside) - p) - gain
    else:
        slope = -gain
    # Multiplied behind the tile's branch: ahead of it, the product would wait before any token is asked for.
    weight = tl.load(d_loss) * tl.load(share)
    if shares is not None:
        weight *= tl.load(shares + row)
    result = weight * slope
    if keep is not None:
        result = tl.where(load_mask(keep + columns, inside), result, 0.0)
    store_rounded(d_logp + columns, result, inside)


@kernel(
    name="grpo_loss_backward",
    family="tokens",
    contract="grpo_loss/2",
    dims=("B", "S"),
    bucket=BUCKET,
    rows="B",
    args={
        **TOKEN_ARGS,
        "shares": data("B"),
        "share": data(strides=()),
        "d_loss": data(strides=()),
        "d_logp": written("B", "S", strides=("d_logp_stride", 1), observe="fp32"),
    },
    reference=Config(BLOCK=1024, num_warps=8, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCK": (512, 1024, 2048), "num_warps": (2, 4, 8)},
    grid=tiles_of_sequences,
)
@triton.jit(do_not_specialize=["B", "S"])
def grpo_loss_backward_kernel(
    logp, old_logp, ref_logp, advantages, token_advantages, keep, shares, share, d_loss, d_logp, B, S,
    logp_stride, old_stride, ref_stride, advantages_stride, keep_stride, d_logp_stride, low, high, beta,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(BLOCK)
    logp += row * logp_stride
    old_logp += row * old_stride
    if ref_logp is not None:
        ref_logp += row * ref_stride
    if token_advantages is not None:
        token_advantages += row * advantages_stride
    if keep is not None:
        keep += row * keep_stride
    d_logp += row * d_logp_stride
    after_predecessor(OVERLAP)
    columns = first + tl.arange(0, BLOCK)
    if first + BLOCK <= S:
        _gradient(
            logp, old_logp, ref_logp, advantages, token_advantages, keep, shares, share, d_loss, d_logp,
            row, columns, None, low, high, beta,
        )  # fmt: skip
    else:
        _gradient(
            logp, old_logp, ref_logp, advantages, token_advantages, keep, shares, share, d_loss, d_logp,
            row, columns, columns < S, low, high, beta,
        )  # fmt: skip
