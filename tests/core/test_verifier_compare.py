"""Bytes are compared, not numbers, and a digest stands for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalign_core.verifier import compare
from kalign_core.verifier.compare import (
    GUARD_BYTES,
    Buffer,
    Seal,
    allocate,
    copy_of,
    digest,
    first_difference,
    follows,
    same,
    seal_words,
    ulps_between,
    untouched,
)

HOST = torch.device("cpu")
FLOATS = st.floats(width=32, allow_nan=False)


def buffer(
    shape: tuple[int, ...] = (3, 5), dtype: torch.dtype = torch.float32, fill: int = 0xA5, **changes: object
) -> Buffer:
    strides = changes.get("strides") or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return allocate(shape, strides, dtype, HOST, aligned=bool(changes.get("aligned", True)), fill=fill)  # type: ignore[arg-type]


def zeros(dtype: torch.dtype = torch.float32) -> Buffer:
    made = buffer(dtype=dtype)
    made.view.zero_()
    return made


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_tensor_lies_between_guard_bands(dtype: torch.dtype, aligned: bool) -> None:
    """At least 512 bytes on both sides, and the base is a multiple of 16 bytes exactly where it should be."""
    made = buffer(dtype=dtype, aligned=aligned)
    before = made.view.data_ptr() - made.flat.data_ptr()
    after = made.flat.numel() - before - made.view.numel() * dtype.itemsize
    assert min(before, after) >= GUARD_BYTES
    assert (made.view.data_ptr() % 16 == 0) is aligned
    assert bool((made.flat == 0xA5).all())


def test_a_copy_keeps_bytes_layout_and_alignment() -> None:
    """Everything but the place is the same."""
    made = buffer(strides=(7, 1), aligned=False)
    made.view.copy_(torch.arange(15.0).view(3, 5))
    copied = copy_of(made)
    assert torch.equal(copied.flat, made.flat)
    assert copied.view.tolist() == made.view.tolist()
    assert (copied.view.stride(), copied.view.data_ptr() % 16) == (made.view.stride(), made.view.data_ptr() % 16)
    assert copied.flat.data_ptr() != made.flat.data_ptr()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_an_empty_tensor_has_memory_around_it_all_the_same(shape: tuple[int, ...]) -> None:
    """No elements, whole guard bands."""
    made = buffer(shape)
    assert made.view.numel() == 0
    assert made.flat.numel() >= 2 * GUARD_BYTES


# --- comparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [1, 7, 1 << 27])
@given(draw=st.data())
def test_any_changed_byte_is_seen(draw: st.DataObject, at_once: int) -> None:
    """A byte of an element, of a gap or of a guard band, however much is compared at once."""
    ours = buffer(strides=(9, 1))
    theirs = copy_of(ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_PAIRS_AT_ONCE", at_once << 8)
        assert same(ours.pairs, theirs.pairs)
        theirs.flat[draw.draw(st.integers(0, theirs.flat.numel() - 1))] ^= draw.draw(st.integers(1, 255))
        assert not same(ours.pairs, theirs.pairs)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1.0, math.nan)])
def test_zeros_of_other_sign_differ(one: float, other: float) -> None:
    """What counts as equal, or as equal to nothing, as a number is bytes here."""
    a, b = zeros(), zeros()
    a.view[1, 2], b.view[1, 2] = one, other
    assert not same(a.pairs, b.pairs)


def test_the_same_nan_is_equal_to_itself() -> None:
    """NaN is a pattern like any other."""
    a, b = zeros(), zeros()
    a.view[0, 0] = b.view[0, 0] = math.nan
    assert same(a.pairs, b.pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_payloads_differ(dtype: torch.dtype) -> None:
    """Two NaN with other payloads are other bytes."""
    a, b = zeros(dtype), zeros(dtype)
    a.view[2, 4] = b.view[2, 4] = math.nan
    b.flat[b.view[2, 4].data_ptr() - b.flat.data_ptr()] ^= 1
    assert bool(b.view[2, 4].isnan())
    assert not same(a.pairs, b.pairs)


def test_bytes_that_follow_the_fill_are_told_from_others() -> None:
    """Elements that hold nothing but the fill byte are the unwritten ones."""
    made = buffer(dtype=torch.bfloat16)
    made.view[1] = 1.0
    assert follows(made.view, 0xA5).all(-1).tolist() == [True, False, True]


@pytest.mark.parametrize("place", ["left guard", "right guard", "gap"])
def test_a_store_outside_the_elements_is_noticed(place: str) -> None:
    """Writing elements leaves the surroundings untouched; a byte in a guard band or between rows does not."""
    made = buffer(strides=(7, 1))
    made.view.fill_(3.0)
    assert untouched(made, 0xA5)
    start = made.view.data_ptr() - made.flat.data_ptr()
    made.flat[{"left guard": 0, "right guard": made.flat.numel() - 1, "gap": start + 5 * 4}[place]] = 0
    assert not untouched(made, 0xA5)


# --- what a refutation says ---------------------------------------------------------------------------------------


def test_the_first_difference_is_named_with_both_values() -> None:
    """Coordinate in row-major order, bytes, numbers, distance and how many differ."""
    a, b = zeros(torch.bfloat16), zeros(torch.bfloat16)
    a.view[1, 3], b.view[1, 3], b.view[2, 0] = 1.0, 1.0078125, -0.0
    found = first_difference("check", "out", a, b)
    assert (found.argument, found.coordinate) == ("out", (1, 3))
    assert (found.reference, found.candidate) == ("3f80", "3f81")
    assert (found.reference_value, found.candidate_value) == (1.0, 1.0078125)
    assert (found.ulps, found.differing, found.compared) == (1, 2, 15)


@pytest.mark.parametrize("at_once", [1, 5, 11, 1 << 22])
def test_the_first_difference_is_found_part_by_part(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many elements are looked at at once."""
    monkeypatch.setattr(compare, "_ELEMENTS_AT_ONCE", at_once)
    a, b = zeros(), zeros()
    b.view[1, 4], b.view[2, 0] = 1.0, 2.0
    found = first_difference("check", "out", a, b)
    assert (found.coordinate, found.differing, found.candidate_value) == ((1, 4), 2, 1.0)


def test_the_order_of_coordinates_does_not_follow_memory() -> None:
    """A transposed tensor's first difference is the first by its axes."""
    a, b = buffer(strides=(1, 3)), buffer(strides=(1, 3))
    b.view[0, 4], b.view[1, 0] = 9.0, 9.0
    assert first_difference("check", "out", a, b).coordinate == (0, 4)


def test_differences_outside_the_elements_say_so() -> None:
    """Where all elements agree there is no coordinate to give."""
    a, b = zeros(), zeros()
    b.flat[0] ^= 1
    found = first_difference("check", "out", a, b)
    assert (found.coordinate, found.differing) == ((), 0)
    assert "outside" in found.reason


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.0, 0),
        (0.0, -0.0, 1),
        (1.0, math.nan, None),
        (math.nan, math.nan, None),
        (math.inf, 3.4028234663852886e38, 1),
    ],
)
def test_distances_in_units_of_the_last_place(one: float, other: float, expected: int | None) -> None:
    """Neighbours are one apart, the zeros too; NaN is no distance from anything."""
    assert ulps_between(torch.tensor(one), torch.tensor(other)) == expected


@given(FLOATS, FLOATS)
def test_the_distance_is_symmetric_and_zero_for_equal_bytes_only(one: float, other: float) -> None:
    """A distance, of bytes."""
    a, b = torch.tensor(one), torch.tensor(other)
    assert ulps_between(a, b) == ulps_between(b, a)
    assert (ulps_between(a, b) == 0) is (int(a.view(torch.int32)) == int(b.view(torch.int32)))


def test_integers_are_as_far_apart_as_their_values() -> None:
    """No last place there."""
    assert ulps_between(torch.tensor(-3), torch.tensor(4)) == 7


# --- imprints and digests -----------------------------------------------------------------------------------------


def imprint(made: Buffer) -> torch.Tensor:
    """The imprint of ``made`` as it is now."""
    into = torch.empty(seal_words(made), dtype=torch.int32)
    Seal.of(made, into).take()
    return into


@settings(max_examples=40)
@given(st.data())
def test_an_imprint_sees_any_changed_byte_and_swapped_words(draw: st.DataObject) -> None:
    """Sums by row and by column move when a byte does, and when two words change places."""
    made = buffer((3000,))
    made.view.copy_(torch.arange(3000.0))
    before = imprint(made)
    first, second = draw.draw(st.lists(st.integers(0, 2999), min_size=2, max_size=2, unique=True))
    made.view[[first, second]] = made.view[[second, first]]
    assert not torch.equal(before, imprint(made))
    made.view[[first, second]] = made.view[[second, first]]
    assert torch.equal(before, imprint(made))
    made.flat[draw.draw(st.integers(0, made.flat.numel() - 1))] ^= 1
    assert not torch.equal(before, imprint(made))


def test_a_digest_is_what_it_was() -> None:
    """The same elements give the same 16 digits on every machine and in every version."""
    values = torch.arange(1000, dtype=torch.int32).view(torch.float32)
    assert digest([values, values.bfloat16()]) == "730ff4eb8f952699"


@given(st.lists(FLOATS, min_size=2, max_size=20))
def test_a_digest_knows_positions_and_bytes(numbers: list[float]) -> None:
    """It is a function of the bytes in order: layout does not matter, exchanging or flipping one does."""
    values = torch.tensor(numbers)
    spread = torch.zeros(len(numbers), 3)
    spread[:, 1] = values
    assert digest([values]) == digest([spread[:, 1]])
    assert digest([values, values + 1]) != digest([values + 1, values]) or torch.equal(values, values + 1)
    flipped = values.clone()
    flipped.view(torch.int32)[-1] ^= 1
    assert digest([values]) != digest([flipped])


def test_a_digest_does_not_depend_on_how_it_is_cut() -> None:
    """More elements than are hashed at once are hashed as one."""
    values = torch.arange((1 << 22) + 5, dtype=torch.int32)
    whole = digest([values])
    values[-1] += 1
    assert digest([values]) != whole
