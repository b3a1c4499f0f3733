"""Keys: what makes two calls one decision, and what must never do so."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalign_core.cache.key import args_text, at_edge, entry_key, index_bits, layout_class, problem_text
from kalign_core.declare import data, powers_of_two
from kalign_core.errors import BadArgument, DeclarationError, UnknownName
from kalign_core.records import Argument, Toolchain
from tests.core.cache_samples import TOOLCHAIN, scale_rows, scaled

SIZES = st.integers(1, 5000)


def text(problem):
    return problem_text(scale_rows, problem), args_text(scale_rows, problem)


def whole(problem, kernel=scale_rows, toolchain=TOOLCHAIN, suite="2026.1"):
    return entry_key(kernel, problem, toolchain, suite)


@st.composite
def strides_of_x(draw, T, H):
    """Strides of a tensor (T, H) as views have them: dense, sliced, transposed, expanded, or anything."""
    padding = draw(st.integers(0, 40))
    kinds = [(H, 1), (H + padding, 1), (2 * H, 2), (1, T + padding), (0, 1), (H, 0)]
    return draw(st.sampled_from(kinds) | st.tuples(st.integers(0, 99), st.integers(0, 99)))


@st.composite
def problems(draw):
    T, H = draw(SIZES), draw(st.integers(1, 300))
    return scaled(T, H, draw(strides_of_x(T, H)))


def test_a_key_reads_as_documented():
    """A key tells bucket, sizes, dtypes, layouts and classes in the order of the declaration."""
    assert text(scaled(T=3000, H=4096)) == (
        "T<=4096 H=4096",
        "x:bf16:row:a16 weight:bf16:a16 bias:none out:bf16:row:a16 "
        "x_stride_t:d16 x_stride_h:1 out_stride:d16 eps:float index:32",
    )


def test_the_order_of_a_problems_parts_is_not_in_the_key():
    """Keyword arguments in another order are the same call."""
    problem = scaled()
    turned = dataclasses.replace(problem, dims=problem.dims[::-1], args=problem.args[::-1])
    assert text(turned) == text(problem)


@pytest.mark.parametrize("name", ["x", "weight", "out"])
def test_the_dtype_of_every_tensor_is_in_the_key(name):
    """A winner for one dtype of any tensor, outputs included, is none for another."""
    argument = scaled().argument(name)
    other = scaled(**{name: dataclasses.replace(argument, dtype="fp32")})
    assert text(other) != text(scaled())


def test_dtypes_belong_to_names_and_not_to_positions():
    """bf16 and fp32 in each other's place give another key."""
    first = scaled(weight=Argument("weight", "fp32", (1,)))
    second = dataclasses.replace(
        first,
        args=tuple(
            dataclasses.replace(a, dtype={"x": "fp32", "weight": "bf16"}.get(a.name, a.dtype)) for a in first.args
        ),
    )
    assert text(first) != text(second)


def test_five_views_of_one_shape_have_five_keys():
    """Dense, transposed, sliced, expanded and shifted tensors of one shape and dtype are five cases."""
    dense = (4096, 1)
    shifted = scaled(1024, 4096, dense)
    shifted = dataclasses.replace(
        shifted, args=tuple(dataclasses.replace(a, aligned=a.name != "x") if a.strides else a for a in shifted.args)
    )
    views = [scaled(1024, 4096, strides) for strides in (dense, (1, 1024), (8192, 1), (0, 1))]
    assert len({text(view) for view in (*views, shifted)}) == 5


def test_strides_are_in_the_key_by_pattern_only():
    """Paddings of different size, both multiples of 16, are one case."""
    assert text(scaled(1024, 4096, (4112, 1))) == text(scaled(1024, 4096, (4608, 1)))


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((), (), ""),
        ((8,), (1,), ""),
        ((8,), (2,), "strided"),
        ((8,), (0,), "broadcast0"),
        ((1,), (7,), ""),
        ((4, 8), (8, 1), "row"),
        ((4, 8), (9, 1), "padded"),
        ((4, 8), (1, 4), "col"),
        ((4, 8), (1, 6), "col"),
        ((4, 8), (16, 2), "strided"),
        ((4, 8), (4, 1), "strided"),
        ((4, 8), (0, 16), "broadcast0"),
        ((4, 8), (16, 0), "broadcast1"),
        ((4, 8), (0, 0), "broadcast01"),
        ((1, 8), (0, 1), "row"),
        ((1, 8), (99, 1), "row"),
        ((2, 3, 4), (12, 4, 1), "row"),
        ((2, 3, 4), (24, 8, 1), "padded"),
        ((2, 3, 4), (4, 8, 1), "strided"),
        ((2, 3, 4), (1, 2, 6), "col"),
    ],
)
def test_a_layout_is_a_pattern(shape, strides, expected):
    """The layout class follows from shape and strides; an axis of size 1 has no stride that counts."""
    assert layout_class(shape, strides, [size == 1 for size in shape]) == expected


@given(st.integers(), st.integers())
def test_specialisation_classes_never_merge(a, b):
    """Two integers share a class only where the compiler is told the same: is 1, divides by 16, fits 32 bits."""

    def told(n):
        return n == 1, n != 1 and n % 16 == 0, -(2**31) <= n < 2**31

    def written(n):
        return args_text(scale_rows, scaled(out_stride=Argument("out_stride", "int", value=n)))

    assert (written(a) == written(b)) == (told(a) == told(b))


def test_true_is_one():
    """A boolean in the place of an integer has the integer's class."""
    values = [args_text(scale_rows, scaled(out_stride=Argument("out_stride", "int", value=v))) for v in (True, 1)]
    assert values[0] == values[1]


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-5, float("nan"), float("inf")])
def test_the_value_of_a_float_is_not_in_the_key(value):
    """Code does not depend on a float's value, so neither does the key; NaN hits like any other."""
    assert text(scaled(eps=Argument("eps", "float", value=value))) == text(scaled())


def test_an_absent_tensor_is_another_case():
    """None in the place of a tensor gives another key than the tensor."""
    assert text(scaled(bias=Argument("bias", "bf16", (1,)))) != text(scaled())


@given(SIZES, SIZES, st.integers(1, 300))
def test_dense_tensors_of_one_bucket_share_a_key(first, second, H):
    """Row counts share a key exactly where they share a bucket."""
    same_bucket = powers_of_two(first) == powers_of_two(second)
    assert (text(scaled(first, H)) == text(scaled(second, H))) == same_bucket


@given(problems())
def test_a_bucket_is_tuned_under_the_key_of_its_calls(problem):
    """The problem at the bucket's edge has the key of the call it stands for, the same tensors and larger sizes."""
    edge = at_edge(scale_rows, problem)
    if edge is None:
        return
    assert (text(edge), edge.T, edge.H) == (text(problem), powers_of_two(problem.T), problem.H)
    assert edge.args == problem.args


@given(problems(), problems())
def test_one_key_means_one_specialisation(a, b):
    """Calls that share a key share every integer's class, every layout that their strides prove, and every width."""
    if text(a) != text(b):
        return
    for name in ("x_stride_t", "x_stride_h", "out_stride"):
        values = [int(p.value(name)) for p in (a, b)]
        assert (values[0] == 1) == (values[1] == 1)
        assert (values[0] % 16 == 0) == (values[1] % 16 == 0)
    assert a.H == b.H
    used = [powers_of_two(a.T) > 1, a.H > 1]  # no element of a longest axis of 1 is reached by its stride
    repeated = [[s == 0 for s, is_used in zip(p.argument("x").strides, used, strict=True) if is_used] for p in (a, b)]
    assert repeated[0] == repeated[1]


def test_a_tensor_that_grows_inwards_is_tuned_at_its_own_size():
    """There is no edge where the bucketed axis is not outermost in memory: its strides would be others."""
    assert at_edge(scale_rows, scaled(T=1000, H=64, strides=(1, 1000))) is None


def test_an_edge_past_32_bits_of_offset_is_no_edge():
    """A call with offsets of 32 bits is not tuned as one with offsets of 64."""
    near = scaled(T=2**19 + 1, H=4095)
    assert near.T * near.H < 2**31
    assert at_edge(scale_rows, near) is None


def test_the_edge_keeps_what_the_caller_said_of_offsets():
    """A problem that claims 64-bit offsets keeps them at the edge."""
    assert at_edge(scale_rows, dataclasses.replace(scaled(T=1000), index_bits=64)).index_bits == 64


def test_a_size_past_32_bits_leaves_its_bucket():
    """Sizes on both sides of 2**31 are compiled as two types and never share a key."""
    below, at = (scaled(T=T, H=1, strides=(0, 1), out=Argument("out", "bf16", (0, 1))) for T in (2**31 - 1, 2**31))
    assert text(below) != text(at)
    assert at_edge(scale_rows, below) is None


@pytest.mark.parametrize(("T", "bits"), [(2**19, 32), (2**19 + 1, 64)])
def test_offsets_need_64_bits_from_2_to_the_31_on(T, bits):
    """The last offset of the largest tensor decides the index width, in the key too."""
    problem = scaled(T=T, H=4096)
    assert index_bits(scale_rows, dict(problem.dims), problem.args) == bits
    assert args_text(scale_rows, problem).endswith(f"index:{bits}")


def test_phase_contract_toolchain_and_suite_are_in_the_key():
    """Another phase, contract, toolchain fact or suite is another decision."""
    keys = {
        whole(scaled()),
        whole(scaled(phase="decode")),
        whole(scaled(), kernel=dataclasses.replace(scale_rows, contract="scale_rows/2")),
        whole(scaled(), toolchain=Toolchain.of(**{**dict(TOOLCHAIN.facts), "driver": "570.86"})),
        whole(scaled(), suite="2026.2"),
    }
    assert len(keys) == 5


def test_random_row_counts_give_few_keys():
    """Ten thousand row counts make as many keys as there are buckets, and no more."""
    numbers = random.Random(7)
    texts = {problem_text(scale_rows, scaled(T=numbers.randint(1, 131_072))) for _ in range(10_000)}
    assert len(texts) <= 18


def test_an_unknown_dtype_is_named():
    """A dtype that keys have no name for is an error that lists those they have."""
    with pytest.raises(UnknownName, match="unknown dtype 'bfloat16'"):
        whole(scaled(weight=Argument("weight", "bfloat16", (1,))))


def test_a_missing_dimension_is_named():
    """A problem without a declared dimension is an error."""
    with pytest.raises(UnknownName, match="dimension 'H'"):
        whole(dataclasses.replace(scaled(), dims=(("T", 4),)))


def test_an_integer_without_a_value_is_refused():
    """An integer argument needs its value, because the code may depend on it."""
    with pytest.raises(BadArgument, match="out_stride"):
        whole(scaled(out_stride=Argument("out_stride", "int")))


def test_strides_that_contradict_the_declaration_are_refused():
    """A tensor has one stride for each declared axis."""
    with pytest.raises(BadArgument, match="weight"):
        whole(scaled(weight=Argument("weight", "bf16", (8, 1))))


@pytest.mark.parametrize("rule", [lambda n: n // 2, lambda n: n + 1])
def test_a_bucket_rule_has_to_round_up_to_itself(rule):
    """A rule that gives less than the size, or another edge for its own edge, is a wrong declaration."""
    with pytest.raises(DeclarationError, match="bucket rule of T"):
        whole(scaled(), kernel=dataclasses.replace(scale_rows, bucket={"T": rule}))


def test_a_blocked_axis_counts_its_blocks():
    """An axis of T/64 blocks grows with T, and its layout stays the same over the bucket."""
    blocked = dataclasses.replace(scale_rows, args={**scale_rows.args, "x": data("T/64", "H", strides=("H", 1))})
    small, large = scaled(T=3000, H=8), scaled(T=4096, H=8)
    assert args_text(blocked, small) == args_text(blocked, large)
    assert at_edge(blocked, small) == large
