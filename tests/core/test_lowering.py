"""Lowering: what the compiler is told of a call, the same in a compile worker and in the process that launches."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kalign_core.declare import Config, Lowered, lower
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_kernel
from tests.core.scripted import SCALE_REFERENCE, problem, scale_kernel, scale_problem

CONFIG = Config(BM=64, BN=32, BK=32, GROUP_M=8, num_warps=4, num_stages=3, enable_fp_fusion=False)


def product(m: int = 48, n: int = 32, k: int = 64, **changes: Any) -> Lowered:
    """``matmul_kernel`` lowered for a row-major product."""
    said: dict[str, Any] = {
        "a": ("bf16", (k, 1)), "b": ("bf16", (n, 1)), "bias": None, "c": ("bf16", (n, 1)),
        "a_stride_m": k, "a_stride_k": 1, "b_stride_k": n, "b_stride_n": 1, "c_stride_m": n, "c_stride_n": 1,
    }  # fmt: skip
    made = problem(matmul_kernel, {"M": m, "N": n, "K": k}, **{**said, **changes})
    return lower(matmul_kernel, made, CONFIG)


def test_a_product_is_lowered_as_written_here() -> None:
    """Pointers by dtype, absent ones and ones as constants, multiples of 16 marked, M never specialised on."""
    assert product() == Lowered(
        kernel="matmul",
        import_path="kalign_core.kernels.matmul:matmul_kernel",
        signature=(
            ("a", "*bf16"), ("b", "*bf16"), ("bias", "constexpr"), ("c", "*bf16"), ("M", "i32"), ("N", "i32"),
            ("K", "i32"), ("a_stride_m", "i32"), ("a_stride_k", "constexpr"), ("b_stride_k", "i32"),
            ("b_stride_n", "constexpr"), ("c_stride_m", "i32"), ("c_stride_n", "constexpr"), ("BM", "constexpr"),
            ("BN", "constexpr"), ("BK", "constexpr"), ("GROUP_M", "constexpr"), ("WIDE", "constexpr"),
        ),
        constants=((2, None), (8, 1), (10, 1), (12, 1), (13, 64), (14, 32), (15, 32), (16, 8), (17, False)),
        divisible=(0, 1, 3, 5, 6, 7, 9, 11),
        options=(("enable_fp_fusion", False), ("num_stages", 3), ("num_warps", 4)),
    )  # fmt: skip


def test_a_row_kernel_is_lowered_as_written_here() -> None:
    """Derived constants follow the row's length, floats are float32, an odd length is not marked."""
    made = problem(
        rms_norm_kernel, {"T": 3, "H": 24}, x=("fp32", (24, 1)), weight=("bf16", (1,), False), out=("fp32", (24, 1)),
        rstd="fp32", x_stride=24, out_stride=32, eps=1e-6,
    )  # fmt: skip
    lowered = lower(rms_norm_kernel, made, rms_norm_kernel.reference_config(made))
    assert lowered.signature[:9] == (
        ("x", "*fp32"), ("weight", "*bf16"), ("out", "*fp32"), ("rstd", "*fp32"), ("T", "i32"), ("H", "i32"),
        ("x_stride", "i32"), ("out_stride", "i32"), ("eps", "fp32"),
    )  # fmt: skip
    assert (lowered.constants, lowered.divisible) == (((9, 16), (10, 32), (11, 5), (12, False)), (0, 2, 3, 7))


@pytest.mark.parametrize("t", [1, 2, 16, 17, 4096, 65536])
def test_bucketed_sizes_compile_once(t: int) -> None:
    """No size of a bucketed dimension, 1 and multiples of 16 included, gives other code."""
    assert lower(scale_kernel, scale_problem(t), SCALE_REFERENCE) == lower(
        scale_kernel, scale_problem(3), SCALE_REFERENCE
    )


def test_a_bucketed_size_past_32_bits_is_wide() -> None:
    """A size that does not fit 32 bits is passed as 64, bucketed or not."""
    assert dict(lower(scale_kernel, scale_problem(2**31), SCALE_REFERENCE).signature)["T"] == "i64"


@pytest.mark.parametrize(
    ("stride", "kind", "marked"), [(1, "constexpr", False), (15, "i32", False), (16, "i32", True), (2**31, "i64", True)]
)
def test_integers_are_specialised_as_the_compiler_does(stride: int, kind: str, marked: bool) -> None:
    """One is a constant, multiples of 16 are marked, what does not fit 32 bits is wide."""
    lowered = lower(scale_kernel, scale_problem(f=40, x_stride=stride), SCALE_REFERENCE)
    position = scale_kernel.parameters.index("x_stride")
    assert (dict(lowered.signature)["x_stride"], position in lowered.divisible) == (kind, marked)


@pytest.mark.parametrize(
    "changes",
    [
        {"a": ("fp16", (64, 1))},
        {"a": ("bf16", (64, 1), False)},
        {"bias": "bf16"},
        {"a_stride_m": 72},
        {"a_stride_k": 2},
        {"k": 65},
        {"n": 1},
    ],
)
def test_what_the_code_depends_on_changes_it(changes: dict[str, Any]) -> None:
    """Another dtype, alignment, argument or specialisation class is another compile."""
    assert product(**changes) != product()


def test_wide_offsets_are_a_constant() -> None:
    """Where an offset may pass 2**31 the kernel is told so."""
    wide = dataclasses.replace(
        problem(
            matmul_kernel, {"M": 4, "N": 4, "K": 4}, a=("bf16", (4, 1)), b=("bf16", (4, 1)), bias=None,
            c=("bf16", (4, 1)), a_stride_m=4, a_stride_k=1, b_stride_k=4, b_stride_n=1, c_stride_m=4, c_stride_n=1,
        ),
        index_bits=64,
    )  # fmt: skip
    assert dict(lower(matmul_kernel, wide, CONFIG).constants)[17] is True


def test_a_lowered_kernel_is_plain_data() -> None:
    """What is sent to a compile worker survives as JSON, so that the worker compiles the very same thing."""
    lowered = product()
    sent = json.loads(json.dumps(dataclasses.asdict(lowered)))
    again = Lowered(**{name: _tuples(value) for name, value in sent.items()})
    assert again == lowered


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def test_a_configuration_read_from_a_file_lowers_to_the_same_options() -> None:
    """A switch that a file holds as 0 reaches the compiler as False, so that both find the same compiled code."""
    from kalign_core.kernels.rms_norm import rms_norm_kernel
    from kalign_core.records import Config

    given = Config(ROWS=2, num_warps=4, num_stages=1, enable_fp_fusion=False)
    options = rms_norm_kernel.options_for(Config.parse(str(given)))
    assert options["enable_fp_fusion"] is False
    assert repr(options) == repr(rms_norm_kernel.options_for(given))
