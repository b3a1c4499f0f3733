"""Probability ratio and divergence estimates of sampled tokens, forward and backward, element by element.

Contract ``ratio_kl/1``, in float32, no fused multiply-add, ``y = p - ref``, ``k3`` as in ``kernels.kl``:
``ratio = round(exp(p - old))``; ``k1 = round(y)``; ``k2 = round(0.5 * (y * y))``; ``k3 = round(k3(-y))``.
Backward, from +0 and in this order, leaving out gradients that are absent:
``d_p = round(((d_ratio * exp(p - old) + d_k1) + d_k2 * y) + d_k3 * slope(-y))``.
A masked token is +0 in every result, whatever its numbers are: it is selected away, never multiplied.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, data, kernel, mask, powers_of_two, written
from kalign_core.kernels.kl import k3_of, k3_slope
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.tokens import load_floats, load_mask, store_rounded, tile_of, tiles_of_sequences

# No family that vendors know: at the 64 elements a thread they try with pointwise kernels, these spill.
KNOBS = {"BLOCK": (512, 1024, 2048), "num_warps": (2, 4, 8)}
# Four elements a thread: masks of bytes and numbers of four are then loaded in the same layout.
REFERENCE = Config(BLOCK=1024, num_warps=8, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _forward(logp, old_logp, ref_logp, keep, ratio, k1, k2, k3, columns, inside):
    p = load_floats(logp + columns, inside)
    old = load_floats(old_logp + columns, inside)
    r = tl.exp(p - old)
    y = p - load_floats(ref_logp + columns, inside)
    if keep is not None:
        kept = load_mask(keep + columns, inside)
        r = tl.where(kept, r, 0.0)
        y = tl.where(kept, y, 0.0)
    store_rounded(ratio + columns, r, inside)
    store_rounded(k1 + columns, y, inside)
    store_rounded(k2 + columns, 0.5 * (y * y), inside)
    store_rounded(k3 + columns, k3_of(-y), inside)


@kernel(
    name="ratio_kl",
    family="tokens",
    contract="ratio_kl/1",
    dims=("B", "S"),
    bucket={"B": powers_of_two, "S": powers_of_two},
    rows="B",
    args={
        "logp": data("B", "S", strides=("logp_stride", 1)),
        "old_logp": data("B", "S", strides=("old_stride", 1)),
        "ref_logp": data("B", "S", strides=("ref_stride", 1)),
        "keep": mask("B", "S", strides=("keep_stride", 1)),
        "ratio": written("B", "S", strides=("out_stride", 1), observe="fp32"),
        "k1": written("B", "S", strides=("out_stride", 1), observe="fp32"),
        "k2": written("B", "S", strides=("out_stride", 1), observe="fp32"),
        "k3": written("B", "S", strides=("out_stride", 1), observe="fp32"),
    },
    reference=REFERENCE,
    knobs=KNOBS,
    grid=tiles_of_sequences,
)
@triton.jit(do_not_specialize=["B", "S"])
def ratio_kl_kernel(
    logp, old_logp, ref_logp, keep, ratio, k1, k2, k3, B, S, logp_stride, old_stride, ref_stride, keep_stride,
    out_stride,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(BLOCK)
    logp += row * logp_stride
    old_logp += row * old_stride
    ref_logp += row * ref_stride
    if keep is not None:
        keep += row * keep_stride
    ratio += row * out_stride
    k1 += row * out_stride
    k2 += row * out_stride
    k3 += row * out_stride
    columns = first + tl.arange(0, BLOCK)
    after_predecessor(OVERLAP)
    if first + BLOCK <= S:
        _forward(logp, old_logp, ref_logp, keep, ratio, k1, k2, k3, columns, None)
    else:
        _forward(logp, old_logp, ref_logp, keep, ratio, k1, k2, k3, columns, columns < S)


@triton.jit
def _backward(logp, old_logp, ref_logp, keep, d_ratio, d_k1, d_k2, d_k3, d_logp, columns, inside, BLOCK: tl.constexpr):
    p = load_floats(logp + columns, inside)
    total = tl.zeros((BLOCK,), tl.float32)
    if d_ratio is not None:
        total += load_floats(d_ratio + columns, inside) * tl.exp(p - load_floats(old_logp + columns, inside))
    if d_k1 is not None:
        total += load_floats(d_k1 + columns, inside)
    if d_k2 is not None:
        total += load_floats(d_k2 + columns, inside) * (p - load_floats(ref_logp + columns, inside))
    if d_k3 is not None:
        total += load_floats(d_k3 + columns, inside) * k3_slope(load_floats(ref_logp + columns, inside) - p)
    if keep is not None:
        total = tl.where(load_mask(keep + columns, inside), total, 0.0)
    store_rounded(d_logp + columns, total, inside)


@kernel(
    name="ratio_kl_backward",
    family="tokens",
    contract="ratio_kl/1",
    dims=("B", "S"),
    bucket={"B": powers_of_two, "S": powers_of_two},
    rows="B",
    args={
        "logp": data("B", "S", strides=("logp_stride", 1)),
        "old_logp": data("B", "S", strides=("old_stride", 1)),
        "ref_logp": data("B", "S", strides=("ref_stride", 1)),
        "keep": mask("B", "S", strides=("keep_stride", 1)),
        "d_ratio": data("B", "S", strides=("d_ratio_stride", 1)),
        "d_k1": data("B", "S", strides=("d_k1_stride", 1)),
        "d_k2": data("B", "S", strides=("d_k2_stride", 1)),
        "d_k3": data("B", "S", strides=("d_k3_stride", 1)),
        "d_logp": written("B", "S", strides=("d_logp_stride", 1), observe="fp32"),
    },
    reference=REFERENCE.replace(BLOCK=512),
    knobs=KNOBS,
    grid=tiles_of_sequences,
)
@triton.jit(do_not_specialize=["B", "S"])
def ratio_kl_backward_kernel(
    logp, old_logp, ref_logp, keep, d_ratio, d_k1, d_k2, d_k3, d_logp, B, S, logp_stride, old_stride, ref_stride,
    keep_stride, d_ratio_stride, d_k1_stride, d_k2_stride, d_k3_stride, d_logp_stride,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, first = tile_of(BLOCK)
    logp += row * logp_stride
    old_logp += row * old_stride
    ref_logp += row * ref_stride
    if keep is not None:
        keep += row * keep_stride
    if d_ratio is not None:
        d_ratio += row * d_ratio_stride
    if d_k1 is not None:
        d_k1 += row * d_k1_stride
    if d_k2 is not None:
        d_k2 += row * d_k2_stride
    if d_k3 is not None:
        d_k3 += row * d_k3_stride
    d_logp += row * d_logp_stride
    columns = first + tl.arange(0, BLOCK)
    after_predecessor(OVERLAP)
    if first + BLOCK <= S:
        _backward(logp, old_logp, ref_logp, keep, d_ratio, d_k1, d_k2, d_k3, d_logp, columns, None, BLOCK)
    else:
        _backward(logp, old_logp, ref_logp, keep, d_ratio, d_k1, d_k2, d_k3, d_logp, columns, columns < S, BLOCK)
