"""The interpreter's arithmetic: a matrix product, a rounding and an exponential whose bits no tile can change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.hal import triton_compat
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hal.triton_compat import fix_interpreter_dot, fix_interpreter_rounding
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.problems import problem_of
from tests.core.scripted import bits, normals

import triton  # isort: skip  # after kalign, which asks for the interpreter
import triton.language as tl  # isort: skip

REFERENCE: dict[str, Any] = {
    "BM": 16, "BN": 16, "BK": 16, "GROUP_M": 1, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def platform() -> CpuPlatform:
    """The embedded platform, whose making mends the interpreter."""
    return CpuPlatform()


@pytest.fixture
def multiply(platform: CpuPlatform) -> Any:
    """``multiply(a, b, BM=32)``: the product with the shared kernel under a configuration."""
    from kalign_core.records import Config

    def run(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float32, **knobs: int) -> torch.Tensor:
        c = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
        args = (a, b, None, c, a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride(), *c.stride())
        problem = problem_of(matmul_kernel, args, "train")
        platform.launcher(matmul_kernel, problem, Config(**{**REFERENCE, **knobs}), args)(*args)
        return c

    return run


def in_steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float32, products and sums rounded one after the other, K ascending."""
    left, right = a.float().numpy(), b.float().numpy()
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for k in range(left.shape[1]):
        total = total + left[:, k : k + 1] * right[k : k + 1, :]
    return torch.from_numpy(total)


# --- the product --------------------------------------------------------------------------------------------------


def test_it_took_effect(platform: CpuPlatform) -> None:
    """With the Triton that is installed the interpreter could be mended, and mending twice changes nothing."""
    assert (platform.exact_dot, fix_interpreter_dot(), fix_interpreter_rounding()) == (True, True, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_adds_one_step_at_a_time(multiply: Any, dtype: torch.dtype) -> None:
    """The product is that of a model that adds K in ascending order, with numbers that tell every other order."""
    scale = torch.logspace(-6, 6, 40, base=2)
    a, b = (normals(5, 40) * scale).to(dtype), normals(40, 7, dtype=dtype, seed=1)
    assert bits(multiply(a, b)) == bits(in_steps(a, b))
    assert bits(in_steps(a, b)) != bits(in_steps(a.flip(1), b.flip(0)))


@pytest.mark.parametrize(
    "tile", [{"BM": 32}, {"BN": 64}, {"BK": 32}, {"BK": 64}, {"BM": 64, "BN": 32, "BK": 32}, {"GROUP_M": 4}]
)
def test_no_tile_changes_its_bits(multiply: Any, tile: dict[str, int]) -> None:
    """Every tile shape and order of tiles gives the bits of the smallest."""
    a, b = normals(35, 50, dtype=torch.bfloat16), normals(50, 33, dtype=torch.bfloat16, seed=1)
    assert bits(multiply(a, b, **tile)) == bits(multiply(a, b))


@pytest.mark.parametrize("m", [1, 2, 16, 17, 33])
def test_no_number_of_rows_changes_its_bits(multiply: Any, m: int) -> None:
    """A row has the same bits in every batch."""
    a, b = normals(33, 50, dtype=torch.bfloat16), normals(50, 9, dtype=torch.bfloat16, seed=1)
    assert bits(multiply(a[:m], b)) == bits(multiply(a, b)[:m])


def test_the_shipped_product_is_not_good_enough() -> None:
    """A numpy product of the same numbers has other bits, or other bits for another number of rows."""
    a, b = normals(64, 200), normals(200, 64, seed=1)
    whole = a.numpy() @ b.numpy()
    alone = np.concatenate([a[i : i + 1].numpy() @ b.numpy() for i in range(64)])
    assert whole.tobytes() != in_steps(a, b).numpy().tobytes() or alone.tobytes() != whole.tobytes()


def test_numbers_that_are_none_stay_with_their_rows(multiply: Any) -> None:
    """NaN and infinities reach every element of their own row and none of another."""
    a, b = normals(4, 20), normals(20, 5, seed=1)
    clean = multiply(a, b)
    a[1, 3], a[2, 0] = torch.nan, torch.inf
    spoilt = multiply(a, b)
    assert bits(spoilt[[0, 3]]) == bits(clean[[0, 3]])
    assert spoilt[1].isnan().all()
    assert not spoilt[2].isfinite().any()


def test_other_versions_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that nobody looked at is not touched, and that is told."""
    monkeypatch.setattr(triton_compat, "MINOR", (9, 9))
    assert (fix_interpreter_dot(), fix_interpreter_rounding()) == (False, False)


# --- roundings and functions --------------------------------------------------------------------------------------


@triton.jit
def convert(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def exponential(x, out, n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, tl.exp(tl.load(x + at, mask=at < n, other=0.0)), mask=at < n)


def converted(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``numbers``, whose count is a power of two, in another dtype."""
    out = torch.empty(numbers.shape, dtype=dtype)
    convert[(1,)](numbers, out, N=numbers.numel())
    return out


PATTERNS = torch.cat(
    [
        torch.randint(-(2**31), 2**31, (8192 - 32,), generator=torch.Generator().manual_seed(0)).to(torch.int32),
        torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF, 0x1, 0x8000, 0x7F800001, 0x7F800000] * 2),
        torch.tensor([0xFFFF, 0x10000, 0x7FFFFF, 0x800000, 0, 0x7FC00000, 0x33000000, 0x7F7F8000] * 2),
    ]
).to(torch.int32)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_to_nearest_even(platform: CpuPlatform, dtype: torch.dtype) -> None:
    """Every kind of float32, ties, subnormals and overflows among them, rounds as torch rounds it."""
    numbers = PATTERNS.view(torch.float32)
    got, expected = converted(numbers, dtype), numbers.to(dtype)
    number = ~numbers.isnan()
    assert bits(got[number]) == bits(expected[number])
    assert got[~number].isnan().all()


def test_widening_is_exact(platform: CpuPlatform) -> None:
    """Every bfloat16 becomes the float32 that it is, NaN payloads and subnormals included."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert bits(converted(numbers, torch.float32)) == bits(numbers.to(torch.float32))


@pytest.mark.parametrize("block", [1, 8, 64, 256])
def test_an_exponential_does_not_depend_on_its_place(platform: CpuPlatform, block: int) -> None:
    """An element's exponential has the same bits in tiles of every size and at every place in them."""
    numbers = normals(200) * 10
    whole = torch.empty(200)
    exponential[(1,)](numbers, whole, 200, N=256)
    parts = torch.empty(200)
    for start in range(0, 200, block):
        count = min(block, 200 - start)
        exponential[(1,)](numbers[start:], parts[start:], count, N=block)
    assert bits(parts) == bits(whole)
