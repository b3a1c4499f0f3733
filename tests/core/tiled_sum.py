"""An operator by an author who takes the tile of a sum for a schedule knob: what tuning has to refute."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import kalign_core as kalign
from kalign_core import ops  # noqa: F401  # asks for the interpreter
from kalign_core.declare import Config, data, kernel, powers_of_two, written
from kalign_core.ops.base import random_tensor
from kalign_core.ops.noting import launch

import triton  # isort: skip
import triton.language as tl  # isort: skip


@kernel(
    name="tiled_sum",
    family="rowwise",
    contract="tiled_sum/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={"x": data("T", "H", strides=("x_stride", 1)), "out": written("T")},
    reference=Config(TILE=16, num_warps=1, num_stages=1, enable_fp_fusion=False),
    knobs={"TILE": (16, 32)},
    grid=lambda p, c: (p.T,),
)
@triton.jit(do_not_specialize=["T"])
def tiled_sum_kernel(x, out, T, H, x_stride, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, H, TILE):
        total += tl.load(x + row * x_stride + first + columns, mask=first + columns < H, other=0.0).to(tl.float32)
    tl.store(out + row + tl.arange(0, 1), tl.sum(tl.reshape(total, (1, TILE)), axis=1))


class TiledSum(kalign.Operator):
    """``tiled_sum(x)``: x: ``(T H)`` -> ``(T)`` float32, the sums of its rows."""

    name: ClassVar[str] = "tiled_sum"
    kernels = (tiled_sum_kernel,)
    dims = ("T", "H")
    dtypes = ("bf16",)
    shapes = ({"T": 4, "H": 100},)
    small_shapes = shapes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        launch(tiled_sum_kernel, x, out, *x.shape, x.stride(0))
        return out

    def inputs(self, sizes: Any, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        return (random_tensor((sizes["T"], sizes["H"]), dtype, seed, device),)

    def oracle(self, *args: Any) -> torch.Tensor:
        return args[0].double().sum(-1)


tiled_sum = TiledSum()
