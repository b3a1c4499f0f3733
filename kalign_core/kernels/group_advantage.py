"""Group-relative advantages: rewards less their group's mean, over the group's deviation when asked.

Contract ``group_advantage/1``, in float32, no fused multiply-add. ``P`` is the adjacent-pair sum of ``kernels.pairs``
over the group padded with +0 to a power of two: ``c = r - div_rn(P(r), G)``; plain: ``round(c)``; normalised:
``round(div_rn(c, sqrt_rn(div_rn(P(c * c), G - 1))))``. A group whose rewards all equal its first is +0 throughout: its
mean, rounded, need not be that reward.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, next_power_of_2, powers_of_two, written
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.pairs import pair_sum


def whole_groups(p):
    """Reference: about 256 rewards a program, a warp per 64 of them, at most 16 groups and 16 warps."""
    block = next_power_of_2(p.G)
    rows = max(1, min(16, 256 // block))
    return Config(ROWS=rows, num_warps=max(1, min(16, block * rows // 64)), num_stages=1, enable_fp_fusion=False)


@kernel(
    name="group_advantage",
    family="rowwise",
    contract="group_advantage/1",
    dims=("B", "G"),
    bucket={"B": powers_of_two},
    rows="B",
    args={
        "rewards": data("B", "G", strides=("G", 1)),
        "out": written("B", "G", strides=("G", 1), observe="fp32"),
    },
    reference=whole_groups,
    knobs={"ROWS": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8, 16)},
    derived={
        "BLOCK": lambda p: next_power_of_2(p.G),
        "LOG2": lambda p: next_power_of_2(p.G).bit_length() - 1,
    },
    grid=lambda p, c: (cdiv(p.B, c.ROWS),),
)
@triton.jit(do_not_specialize=["B"])
def group_advantage_kernel(
    rewards, out, B, G, normalise,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < B)[:, None] & (columns < G)[None, :]
    offsets = rows[:, None] * G + columns[None, :]
    after_predecessor(OVERLAP)
    r = tl.load(rewards + offsets, mask=inside, other=0.0).to(tl.float32)
    head = tl.load(rewards + rows * G, mask=rows < B, other=0.0).to(tl.float32)
    others = pair_sum((inside & (r != head[:, None])).to(tl.int32), ROWS, LOG2)
    mean = tl.div_rn(pair_sum(r, ROWS, LOG2), tl.cast(G, tl.float32))
    centred = tl.where(inside, r - mean[:, None], 0.0)
    result = centred
    if normalise:
        variance = tl.div_rn(pair_sum(centred * centred, ROWS, LOG2), tl.cast(G - 1, tl.float32))
        result = tl.div_rn(centred, tl.broadcast_to(tl.sqrt_rn(variance)[:, None], (ROWS, BLOCK)))
    result = tl.where((others > 0)[:, None], result, 0.0)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
