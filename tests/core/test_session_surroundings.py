"""Tuning in the middle of somebody's program: what the calling thread is under changes no decision."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kalign_core as kalign
from kalign_core.session import Session
from kalign_core.verifier import selftest
from tests.core.scripted import FASTER, X, ops, prefers, scale, scripted

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Dispatched(TorchDispatchMode):
    """Counts what torch dispatches, as counters of flops and of memory do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Counts what is called of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Context] = {
    "another default device": lambda: torch.device("meta"),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "deterministic algorithms": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "saved tensors' hooks": lambda: torch.autograd.graph.save_on_cpu(),
    "a dispatch mode": Dispatched,
    "a function mode": Called,
}
surroundings = pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)


@pytest.fixture(autouse=True)
def suite_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite is tried in each test anew, in the surroundings of the test."""
    monkeypatch.setattr(selftest, "_found", {})


def decided(here: Session) -> list[tuple[Any, ...]]:
    """What the session's store holds, without times and dates."""
    return [(e.key, e.config, e.tried, e.digests) for e in here.store.entries(here.facts(-1).identity)]


@surroundings
def test_what_is_in_force_changes_no_decision(around: Context) -> None:
    """Winner, counts and digests of a tuning are the same whatever the call that tunes is made under."""
    plain, here = scripted(prefers(FASTER)), scripted(prefers(FASTER))
    with kalign.using(mode="tune"):
        with plain.active():
            scale(X)
        with here.active(), around():
            out = scale(X)
    assert torch.equal(out, X * 2)
    assert decided(here) == decided(plain) != []


@surroundings
def test_what_is_in_force_changes_no_verdict(around: Context) -> None:
    """Verifying on request gives the digests of a verdict in an empty program."""
    with scripted().active():
        expected = kalign.verify(scale, X)
        with around():
            assert kalign.verify(scale, X) == expected


@pytest.mark.parametrize("mode", [Dispatched, Called])
def test_a_mode_does_not_see_the_tuning(mode: Callable[[], Any]) -> None:
    """Whoever counts what torch does sees of a call that tunes what it sees of one that does not."""
    seen = []
    for how in ("off", "tune"):
        with scripted(prefers(FASTER)).active(), kalign.using(mode=how), mode() as counting:
            scale(X)
        seen.append(counting.seen)
    assert seen[0] == seen[1]


def test_inputs_by_size_are_made_under_a_default_device() -> None:
    """Warming up by sizes makes its inputs where the platform's tensors lie, whatever the default device is."""
    with scripted().active(), torch.device("meta"):
        for op in ops.operators():
            assert kalign.warmup(op, [dict(op.small_shapes[0])])


def test_a_mode_that_is_left_is_in_force_again() -> None:
    """After a call that tunes the caller is under what it was under before."""
    around = (torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), Dispatched())
    with scripted().active(), kalign.using(mode="tune"), contextlib.ExitStack() as stack:
        counting = [stack.enter_context(context) for context in around][-1]
        scale(X)
        before = sum(counting.seen.values())
        assert torch.empty(2).device.type == "meta"
        assert sum(counting.seen.values()) == before + 1
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
