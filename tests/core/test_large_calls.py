"""The calls that a device makes on tensors past 2**31 elements, made here on few: what they compare is comparable."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kalign_core import context, ops
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


class MostBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, among those made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[tuple[weakref.ref[torch.Tensor], int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor):
                storage = made.untyped_storage()
                self._made.append((weakref.ref(made), storage.data_ptr(), storage.nbytes()))
        self._made = [known for known in self._made if known[0]() is not None]
        self.most = max(self.most, sum({place: size for _, place, size in self._made}.values()))
        return result


@pytest.mark.parametrize("large", LARGE, ids=lambda large: large.name)
def test_no_call_needs_more_memory_than_it_says(large: Large) -> None:
    """What is alive at once fits into what a case says it needs; nothing is launched to find out."""
    elements, recording = 2**24, context.the(context.RECORD, "train")
    with torch.no_grad(), context.restored(recording), MostBytes() as seen:
        for _ in large.run(elements, torch.device("cpu")):
            pass
    assert 2 * elements < seen.most <= large.needs_bytes(elements)


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
