"""Problems for the shipped kernels, made from their declarations: contiguous, row-major, no optional argument."""

from __future__ import annotations

import math

from kalign_core.declare import Kernel, axis_size
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_kernel
from kalign_core.kernels.softmax import softmax_kernel
from kalign_core.kernels.swiglu import swiglu_kernel
from kalign_core.records import Argument, Config, Problem

OPTIONAL = ("bias",)


def problem(kernel: Kernel, dtype: str = "bf16", **dims: int) -> Problem:
    """The problem that ``dims`` and ``dtype`` pose to ``kernel``."""
    numbers: dict[str, int] = {}
    tensors: dict[str, Argument] = {}
    for name, role in kernel.args.items():
        sizes = [axis_size(axis, dims) for axis in role.shape]
        strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        numbers.update({s: v for s, v in zip(role.strides, strides, strict=True) if isinstance(s, str)})
        kind = "none" if name in OPTIONAL else "fp32" if name == "rstd" else dtype
        tensors[name] = Argument(name, kind, () if kind == "none" else strides)
    rest = [name for name in kernel.parameters if name not in dims]
    args = tuple(tensors.get(name) or _number(name, numbers) for name in rest)
    return Problem(kernel.name, tuple((dim, dims[dim]) for dim in kernel.dims), args)


def _number(name: str, numbers: dict[str, int]) -> Argument:
    return Argument(name, "int", value=numbers[name]) if name in numbers else Argument(name, "float", value=1e-6)


def matmul(m: int, dtype: str = "bf16", n: int = 4096, k: int = 4096) -> tuple[Kernel, Problem]:
    """``a: (m k), b: (k n) -> (m n)``."""
    return matmul_kernel, problem(matmul_kernel, dtype, M=m, N=n, K=k)


def rms_norm(t: int, h: int) -> tuple[Kernel, Problem]:
    """``x: (t h) -> (t h)``."""
    return rms_norm_kernel, problem(rms_norm_kernel, T=t, H=h)


def softmax(t: int, v: int) -> tuple[Kernel, Problem]:
    """``x: (t v) -> (t v)``."""
    return softmax_kernel, problem(softmax_kernel, T=t, V=v)


def swiglu(t: int, f: int) -> tuple[Kernel, Problem]:
    """``gate, up: (t f) -> (t f)``."""
    return swiglu_kernel, problem(swiglu_kernel, T=t, F=f)


def parsed(kernel: Kernel, problem: Problem, text: str) -> Config:
    """The reference with what ``text`` (``BM=16 num_warps=4``) says."""
    return kernel.reference_config(problem).replace(**Config.parse(text))


ALL = {
    "matmul, one row": matmul(1),
    "matmul, few rows": matmul(64),
    "matmul, some rows": matmul(256),
    "matmul, many rows": matmul(4096),
    "matmul, fp32": matmul(4096, "fp32"),
    "matmul, fp8": matmul(4096, "fp8e4nv"),
    "matmul, tiny": matmul(3, n=5, k=7),
    "rms_norm": rms_norm(4096, 4096),
    "rms_norm, short rows": rms_norm(65536, 128),
    "rms_norm, long rows": rms_norm(1024, 16384),
    "rms_norm, one row": rms_norm(1, 128),
    "swiglu": swiglu(4096, 12288),
    "swiglu, tiny": swiglu(1, 3),
}
# What the operators accept: kernels take other types, whose references no operator ever launches.
SHIPPED = {name: sample for name, sample in ALL.items() if sample[1].args[0].dtype == "bf16"}
# triton is imported first, so that choosing a platform does not have it interpret.
COMPILES = """
import json, sys, triton
from kalign_core.declare import lower
from kalign_core.hal import triton_compat
from tests.cuda import samples
target, texts = json.loads(sys.argv[1])
kernel, problem = samples.matmul(4096)
for text in texts:
    lowered = lower(kernel, problem, samples.parsed(kernel, problem, text))
    compiled = triton_compat.compile_lowered(kernel.fn, lowered, tuple(target))
    print(triton_compat.resources(compiled)["shared_bytes"])
"""
