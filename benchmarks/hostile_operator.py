"""An operator of a third party whose kernel has four candidates that no tuner should survive in its own process.

``out = 2 x``, a row to a program, the columns in chunks: way 0 to 3 differ in the length of a chunk alone. Way 4 stores
far outside every allocation, which faults the device for the rest of the process. Way 5 waits for a number that never
comes. Way 6 needs so much local memory for each thread that the device cannot give it beside what else is on it. Way 7
ends its compiler's process.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import kalign_core as kalign
from kalign_core import ops  # noqa: F401  # settles whether kernels are compiled or interpreted
from kalign_core.declare import Config, cdiv, data, kernel, powers_of_two, written
from kalign_core.ops.base import random_tensor
from kalign_core.ops.noting import launch

import triton  # isort: skip
import triton.language as tl  # isort: skip

FINE, WILD, SPINNING, HUNGRY, ABORTING = (0, 1, 2, 3), 4, 5, 6, 7
CHUNKS = (128, 1024, 4096, 512)
DEEDS = {
    WILD: "stores out of bounds",
    SPINNING: "never ends",
    HUNGRY: "exhausts memory",
    ABORTING: "aborts its compiler",
}
BALLAST_BYTES = 40 << 30


@triton.constexpr_function
def give_up(way):  # type: ignore[no-untyped-def]
    import os  # here, because the compiler looks through what a kernel's module has

    os.abort()


@kernel(
    name="hostile",
    family="third party",
    contract="hostile/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={"x": data("T", "H", strides=("H", 1)), "out": written("T", "H", strides=("H", 1))},
    reference=Config(WAY=0, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"WAY": (*FINE, WILD, SPINNING, HUNGRY, ABORTING)},
    grid=lambda p, c: (cdiv(p.T, 1),),
)
@triton.jit(do_not_specialize=["T"])
def hostile_kernel(x, out, T, H, WAY: tl.constexpr):  # type: ignore[no-untyped-def]
    CHUNK: tl.constexpr = 1024 if WAY == 1 else 4096 if WAY == 2 else 512 if WAY == 3 else 128
    row = tl.program_id(0).to(tl.int64) * H
    columns = tl.arange(0, CHUNK)
    for start in range(0, H, CHUNK):
        at = start + columns
        values = tl.load(x + row + at, mask=at < H, other=0.0) * 2.0
        if WAY == 4:
            tl.store(out + row + at + (1 << 42), values, mask=at < H)
        if WAY == 5:
            seen = tl.load(x + row, volatile=True)
            while seen == seen:
                seen = tl.load(x + row, volatile=True)
        if WAY == 6:
            spilled = tl.inline_asm_elementwise(
                """{
                .local .align 16 .b8 heap[520000];
                .reg .b64 base, place;
                .reg .b32 offset, kept;
                mov.u64 base, heap;
                and.b32 offset, $1, 0x7fff0;
                cvt.u64.u32 place, offset;
                add.u64 base, base, place;
                st.local.u32 [base], $1;
                ld.local.u32 kept, [base];
                mov.b32 $0, kept;
                }""",
                "=r,r",
                [values.to(tl.int32, bitcast=True)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            values = spilled.to(tl.float32, bitcast=True)
        if WAY == 7:
            give_up(WAY)
        tl.store(out + row + at, values, mask=at < H)


class Hostile(kalign.Operator):
    """``hostile(x)``: x: ``(T H)`` times two."""

    name: ClassVar[str] = "hostile"
    kernels = (hostile_kernel,)
    dims = ("T", "H")
    dtypes = ("fp32",)
    shapes = ({"T": 4096, "H": 4096},)
    small_shapes = ({"T": 2, "H": 256},)

    def __init__(self) -> None:
        self._ballast: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        launch(hostile_kernel, x, out, *x.shape)
        return out

    def inputs(self, sizes: Any, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        """A matrix, in a process that holds weights and caches as serving does: memory is there, but not all of it."""
        if device.type == "cuda" and self._ballast is None:
            self._ballast = torch.empty(BALLAST_BYTES, dtype=torch.uint8, device=device)
        return (random_tensor((sizes["T"], sizes["H"]), dtype, seed, device),)

    def oracle(self, *args: Any) -> torch.Tensor:
        return args[0].double() * 2.0


hostile = Hostile()
