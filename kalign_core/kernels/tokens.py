"""What kernels over a batch of token sequences share: which tile a program has, and tiles that need no mask.

Numbers of sequences and of tokens change from step to step, so neither is specialised on, and a mask made of one
forbids the compiler to load several elements at once. A tile that lies inside its row takes none.
"""

import triton
import triton.language as tl

from kalign_core.declare import cdiv

# Programs along the second axis of a grid; the first takes 2**31.
MOST_TILES = 65535
MOST_TOKENS = MOST_TILES * 512


def tiles_of_sequences(p, c):
    """One program per sequence and tile of it: two axes, so that no program has to divide."""
    return (p.B, cdiv(p.S, c.BLOCK))


@triton.jit
def tile_of(TILE: tl.constexpr):
    """Sequence and first token of this program's tile."""
    return tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE


@triton.jit
def load_floats(pointers, inside):
    """Numbers in float32; ``inside`` is None where all of them are there."""
    if inside is None:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def load_mask(pointers, inside):
    """Which tokens count; none behind the end of a row."""
    if inside is None:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=0)
    return values != 0


@triton.jit
def store_rounded(pointers, values, inside):
    """Store ``values`` in the pointers' dtype."""
    if inside is None:
        tl.store(pointers, values.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, values.to(pointers.dtype.element_ty), mask=inside)
