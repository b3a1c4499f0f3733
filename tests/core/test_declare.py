"""Declarations record what is said and refuse what contradicts the kernel's signature, with what to type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kalign_core.declare import (
    Config,
    Kernel,
    axis_size,
    cdiv,
    data,
    exact,
    index,
    kernel,
    next_power_of_2,
    powers_of_two,
    side_output,
    written,
)
from kalign_core.errors import DeclarationError, UnknownName
from tests.core.cache_samples import constexpr, jit
from tests.core.scripted import SCALE_REFERENCE, scale_kernel, scale_problem

REFERENCE = Config(BLOCK=128, num_warps=4, enable_fp_fusion=False)


def function(x, ids, out, T, H, x_stride, eps, BLOCK: constexpr, WIDE: constexpr) -> None:  # type: ignore[no-untyped-def]
    """A kernel's signature; nothing here launches it."""


def declared(fn: Callable[..., None] = function, **changes: Any) -> Kernel:
    """``function`` declared as a kernel, with ``changes`` to a declaration that holds."""
    said: dict[str, Any] = {
        "name": "k",
        "family": "rowwise",
        "contract": "k/1",
        "dims": ("T", "H"),
        "bucket": {"T": powers_of_two},
        "rows": "T",
        "args": {
            "x": data("T", "H", strides=("x_stride", 1)),
            "ids": index("T", bound="H"),
            "out": written("T", "H", strides=("H", 1)),
        },
        "reference": REFERENCE,
        "knobs": {"BLOCK": (64, 128)},
        "derived": {"WIDE": lambda p: p.index_bits == 64},
        "grid": lambda p, c: (cdiv(p.T, c.BLOCK),),
    }
    made: Kernel = kernel(**{**said, **changes})(jit(fn))
    return made


# --- what a declaration holds -------------------------------------------------------------------------------------


def test_a_declaration_is_inert() -> None:
    """Declaring keeps the function as it was and the parameters apart from the constants."""
    made = declared()
    assert made.fn.fn is function
    assert made.parameters == ("x", "ids", "out", "T", "H", "x_stride", "eps")
    assert made.constants == ("BLOCK", "WIDE")
    assert (str(made), made.outputs()) == ("k", ("out",))


def test_outputs_come_in_the_order_of_parameters() -> None:
    """Everything a kernel may write counts, side outputs too, in the order of the signature."""
    roles = {"out": written("H"), "x": side_output("T", "H", strides=("x_stride", 1))}
    assert declared(args=roles).outputs() == ("x", "out")


def test_kernels_compare_by_identity() -> None:
    """Two declarations of one function are two kernels."""
    one, other = declared(), declared()
    assert one != other
    assert len({one, other}) == 2


def test_the_reference_may_depend_on_the_problem() -> None:
    """A function gives the reference from dtypes and fixed dimensions."""
    made = declared(reference=lambda p: REFERENCE.replace(BLOCK=next_power_of_2(p.F)), knobs={})
    assert made.reference_config(scale_problem(f=40)).BLOCK == 64


def test_constants_come_from_knobs_and_rules() -> None:
    """Every constant has a value: a knob's or a derived one; the rest of a configuration is the compiler's."""
    made = declared()
    assert made.constants_for(scale_problem(), REFERENCE) == {"BLOCK": 128, "WIDE": False}
    assert made.options_for(REFERENCE) == {"num_warps": 4, "enable_fp_fusion": False}


def test_buckets_have_edges() -> None:
    """A bucketed size belongs to the power of two above it, any other to itself."""
    made = declared()
    assert (made.bucket_edge("T", 2049), made.bucket_edge("H", 2049)) == (4096, 2049)


def test_a_module_s_kernel_can_be_imported() -> None:
    """A kernel of a module has a path that a fresh process imports it by."""
    assert scale_kernel.import_path == "tests.core.scripted:scale_kernel"


def test_a_local_kernel_cannot_be_imported() -> None:
    """A kernel made inside a function, or in the main script, has no such path."""

    def local(x, ids, out, T, H, x_stride, eps, BLOCK: constexpr, WIDE: constexpr) -> None:  # type: ignore[no-untyped-def]
        """A closure."""

    assert declared(local).import_path is None
    local.__module__, local.__qualname__ = "__main__", "local"
    assert declared(local).import_path is None


# --- what it refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dims": ("T", "H", "V")}, "dimension 'V' is no run-time parameter"),
        ({"rows": "V"}, "rows='V' is no dimension"),
        ({"bucket": {"V": powers_of_two}}, "bucket for 'V'"),
        ({"args": {"y": data("T")}}, "role for 'y'"),
        ({"args": {"T": data("T")}}, "role for 'T'"),
        ({"args": {"out": written("V")}}, "axis 'V'"),
        ({"args": {"out": written("T", "H", strides=("stride", 1))}}, "stride in 'stride'"),
        ({"args": {"out": written("T"), "ids": index("T")}}, "'ids' indexes ''"),
        ({"args": {"out": written("T"), "ids": index("T", bound="V")}}, "'ids' indexes 'V'"),
        ({"args": {"x": data("T", "H", strides=("x_stride", 1))}}, "no argument is written"),
        ({"derived": {}}, "constant 'WIDE' has no value"),
        ({"derived": {"WIDE": lambda p: 1, "LOG2": lambda p: 1}}, "derived value 'LOG2'"),
        ({"derived": {"WIDE": lambda p: 1, "BLOCK": lambda p: 1}}, "'BLOCK' is a knob and derived"),
        ({"reference": Config(BLOCK=128)}, "leaves enable_fp_fusion to the compiler"),
    ],
)
def test_contradictions_are_refused_where_they_are_declared(changes: dict[str, Any], says: str) -> None:
    """A declaration that the signature or the declaration itself contradicts names the kernel and the word at fault."""
    with pytest.raises(DeclarationError, match="kernel 'k': ") as caught:
        declared(**changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"knobs": {"BLOK": (64,)}},
        {"reference": REFERENCE.replace(BLOK=64)},
        {"knobs": {"BLOK": (64,)}, "reference": lambda p: REFERENCE},
    ],
)
def test_an_unknown_knob_is_refused(changes: dict[str, Any]) -> None:
    """A knob that is neither a constant nor a compiler option is misspelt, and its neighbour is suggested."""
    with pytest.raises(UnknownName, match="unknown knob 'BLOK'") as caught:
        declared(**changes)
    assert caught.value.fix == "did you mean 'BLOCK'?"


@pytest.mark.parametrize(
    ("reference", "error"),
    [
        (Config(num_warps=4, enable_fp_fusion=False), "constant 'BLOCK' has no value"),
        (Config(BLOCK=64), "leaves enable_fp_fusion"),
        (REFERENCE.replace(BLOK=1), "unknown knob 'BLOK'"),
    ],
)
def test_a_computed_reference_is_checked_when_it_is_asked_for(reference: Config, error: str) -> None:
    """A function's reference has to be a complete launch as well."""
    made = declared(reference=lambda p: reference)
    with pytest.raises((DeclarationError, UnknownName), match=error):
        made.reference_config(scale_problem())


def test_constants_stand_last() -> None:
    """A run-time parameter behind a constant is refused, because launches pass constants last."""

    def mixed(out: Any, BLOCK: constexpr, T: Any) -> None:
        """A signature in the wrong order."""

    with pytest.raises(DeclarationError, match=r"write the tl\.constexpr parameters last"):
        kernel(
            name="k", family="f", contract="k/1", dims=("T",), args={"out": written("T")}, reference=REFERENCE,
            knobs={}, grid=lambda p, c: (1,),
        )(jit(mixed))  # fmt: skip


def test_only_jit_functions_are_declared() -> None:
    """A plain function is refused with the order of the decorators."""
    with pytest.raises(DeclarationError, match=r"put @kernel\(...\) above @triton.jit"):
        kernel(
            name="k", family="f", contract="k/1", dims=(), args={}, reference=REFERENCE, knobs={}, grid=lambda p, c: ()
        )(function)


def test_axes_need_strides() -> None:
    """A role with several axes gives the stride of each, since inputs are made from it."""
    with pytest.raises(DeclarationError, match="2 axes and no strides") as caught:
        data("T", "H")
    assert "strides=('x_stride', 1)" in caught.value.fix
    with pytest.raises(DeclarationError, match="2 axes but 1 strides"):
        data("T", "H", strides=(1,))


# --- arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_powers_of_two_round_up(n: int, expected: int) -> None:
    """Both rules give the smallest power of two that holds ``n``."""
    assert (next_power_of_2(n), powers_of_two(n)) == (expected, expected)


def test_a_rule_is_at_home_in_its_bucket() -> None:
    """A bucket's edge belongs to the bucket, so that tuning at the edge answers the whole of it."""
    assert all(powers_of_two(powers_of_two(n)) == powers_of_two(n) >= n for n in range(1, 1025))
    assert [exact(n) for n in (1, 17)] == [1, 17]


def test_axes_may_count_blocks() -> None:
    """``T/64`` is the number of blocks of 64 that hold T."""
    assert [axis_size("T/64", {"T": t}) for t in (1, 64, 65)] == [1, 1, 2]
    assert axis_size("T", {"T": 65}) == 65


def test_the_sample_is_declared_as_the_tests_take_it() -> None:
    """The kernel that other tests launch has the reference that they compare with."""
    assert scale_kernel.reference_config(scale_problem()) == SCALE_REFERENCE
