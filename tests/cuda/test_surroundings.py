"""Calls in the middle of somebody's program on a device: what the thread is under, and outputs over inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402  # only where there is a device

import kalign_core as kalign  # noqa: E402
from kalign_core import ops  # noqa: E402
from kalign_core.api import recorded  # noqa: E402
from kalign_core.cache.base import MemoryStore  # noqa: E402
from kalign_core.records import Entry  # noqa: E402
from kalign_core.session import Session  # noqa: E402
from kalign_core.tuner.report import effort_named  # noqa: E402

DEVICE = torch.device("cuda")


@contextlib.contextmanager
def a_session() -> Iterator[Session]:
    """One of its own with an empty store, which tries few candidates."""
    made = Session(store=MemoryStore())
    made.observer.effort = effort_named("quick")
    with made.active():
        yield made
    made.close()


@pytest.fixture
def here() -> Iterator[Session]:
    with a_session() as made:
        yield made


def inputs() -> tuple[Any, Any]:
    x, weight = ops.rms_norm.inputs({"T": 64, "H": 1024}, "bf16", 0, DEVICE)
    return x.detach(), weight.detach()


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[str, ...]]:
    """The digests of a decision made in an empty program."""
    with a_session() as made:
        kalign.tune(ops.rms_norm, *inputs())
        return digests(made)


@contextlib.contextmanager
def set_for_the_process(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "deterministic algorithms": lambda: set_for_the_process(torch.use_deterministic_algorithms, True, False),
    "bfloat16 by default": lambda: set_for_the_process(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "the GPU by default": lambda: torch.device("cuda"),
    "autocast": lambda: torch.autocast("cuda", torch.float16),
    "a counter of flops": lambda: FlopCounterMode(display=False),
}


def digests(here: Session) -> dict[str, tuple[str, ...]]:
    """The digests of every decision of the session, by kernel."""
    return {entry.key.kernel: entry.digests for entry in here.store.entries(here.facts(0).identity)}


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_what_is_in_force_changes_no_digest(here: Session, plain: Any, around: Callable[[], Any]) -> None:
    """A call that tunes comes to a decision under anything, with the evidence of one in an empty program."""
    x, weight = inputs()
    expected = ops.rms_norm(x, weight)
    with around(), kalign.using(mode="tune"):
        assert torch.equal(ops.rms_norm(x, weight).view(torch.int16), expected.view(torch.int16))
    assert digests(here) == plain != {}


IN_PLACE: dict[str, tuple[Any, dict[str, int]]] = {
    "rms_norm": (ops.rms_norm, {"T": 300, "H": 1024}),
    "swiglu": (ops.swiglu, {"T": 300, "F": 1024}),
    "softmax": (ops.softmax, {"T": 300, "V": 1000}),
}


@pytest.mark.parametrize(("op", "sizes"), IN_PLACE.values(), ids=IN_PLACE)
def test_every_candidate_may_write_over_its_input(here: Session, op: Any, sizes: dict[str, int]) -> None:
    """With ``out=`` on its first input each candidate gives the reference's bytes: no program reads another's rows."""
    args = tuple(t.detach() for t in op.inputs(sizes, "bf16", 0, DEVICE))
    expected = op(*args)
    (call,) = recorded(op, *args)
    key, tried = here.key(call.kernel, call.problem, call.device), 0
    for config in here.space(call.kernel, call.problem, call.device).candidates:
        here.store.put(here.facts(call.device).identity, Entry(key, config, decided="2026-01-01T00:00:00Z"))
        here.forget()
        with kalign.using(mode="frozen"):
            over = args[0].clone()
            op(over, *args[1:], out=over)
        assert torch.equal(over.view(torch.int16), expected.view(torch.int16)), config
        tried += 1
    assert tried > 1
