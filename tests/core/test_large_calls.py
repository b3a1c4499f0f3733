"""The calls that a device makes on tensors past 2**31 elements, made here on few: what they compare is comparable."""

from __future__ import annotations

import pytest
import torch

from kalign_core import ops
from tests.large_calls import LARGE, Large, late, rows_past, softmax_module


@pytest.mark.parametrize("large", LARGE, ids=lambda large: large.name)
def test_last_rows_are_those_computed_alone(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a large result, and sums that only they are part of, have the bytes of a small call's."""
    monkeypatch.setattr(softmax_module, "FEW_ROWS", 2)  # more rows than that take the way of many
    pairs = list(large.run(2**13, torch.device("cpu")))
    assert pairs
    for got, alone in pairs:
        assert torch.equal(got.contiguous().view(torch.uint8), alone.contiguous().view(torch.uint8))
        assert alone.any()


def test_every_operator_is_called() -> None:
    """No shared operator is left out, and none needs more than 20 GB at 2**31 elements."""
    names = " ".join(large.name for large in LARGE) + " log_softmax"
    assert [op.name for op in ops.operators() if op.name not in names] == []
    assert max(large.needs_bytes(2**31) for large in LARGE) < 20e9


@pytest.mark.parametrize(("elements", "width", "step"), [(2**31, 4096, 16), (2**31, 40008, 16), (2**31, 16408, 1)])
def test_the_last_rows_are_past_the_limit(elements: int, width: int, step: int) -> None:
    """All of the rows that are looked at lie behind so many elements, and begin a block of their own."""
    rows = rows_past(elements, width, step, step)
    assert ((rows - step) * width > elements, rows % step) == (True, 0)
    assert late(3, 8, torch.device("cpu"), 1)[:2].count_nonzero() == 0
