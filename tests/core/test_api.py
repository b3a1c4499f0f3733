"""``kalign.tune``, ``kalign.verify``, ``kalign.explain``: what they decide, hold to the gate and say."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.api import recorded
from kalign_core.cache.toml_store import TomlStore
from kalign_core.errors import BadArgument, MixedDevices, NotTunable
from kalign_core.hal.replay import Script
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Condition, EntryKey, Identity
from kalign_core.settings import Settings
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    CountingStore,
    bits,
    launched,
    leaf,
    normals,
    ops,
    prefers,
    scale,
    scripted,
    store_winner,
)

X = normals(3, 40)
CALLS = [kalign.tune, kalign.verify, kalign.explain]


# --- tune ---------------------------------------------------------------------------------------------------------


def test_tuning_gives_its_decisions() -> None:
    """A decision names kernel and problem, and holds the winner with its times."""
    with scripted(prefers(FASTER)).active():
        (decided,) = kalign.tune(scale, X)
    assert (decided.kernel, decided.problem) == ("scale", "T<=4 F=40")
    assert decided.entry is not None
    assert (decided.entry.config, decided.entry.warm_us, decided.entry.reference_warm_us) == (FASTER, 50.0, 100.0)
    assert decided.how == "kept"  # this store has no file


def test_what_is_known_is_a_hit() -> None:
    """A problem that is decided is not measured again."""
    made = scripted()
    entry = store_winner(made, X)
    with made.active():
        (decided,) = kalign.tune(scale, X)
    assert (decided.how, decided.entry, launched(made)) == ("hit", entry, [])


def test_retuning_measures_what_is_known() -> None:
    """``retune=True`` decides again."""
    made = scripted(prefers(SCALE_REFERENCE))
    store_winner(made, X)
    with made.active():
        (decided,) = kalign.tune(scale, X, retune=True)
    assert decided.entry is not None
    assert (decided.how, decided.entry.config) == ("kept", SCALE_REFERENCE)


def test_a_decision_that_is_not_stored_says_why() -> None:
    """A winner found on a throttled device comes with the reason why no file will hold it."""
    made = scripted(Script(condition=Condition(throttle=("thermal",))))
    with made.active():
        (decided,) = kalign.tune(scale, X)
    assert (decided.how, "thermal" in decided.reason) == ("kept", True)


@pytest.mark.parametrize(
    ("x_needs", "weight_needs", "kernels"),
    [
        (False, False, ["rms_norm"]),
        (True, False, ["rms_norm", "rms_norm_backward"]),
        (False, True, ["rms_norm", "rms_norm_backward", "rms_norm_dweight_fold"]),
        (True, True, ["rms_norm", "rms_norm_backward", "rms_norm_dweight_fold"]),
    ],
)
def test_every_kernel_that_a_call_runs_is_asked_about(x_needs: bool, weight_needs: bool, kernels: list[str]) -> None:
    """Forward always, backward as far as the arguments require gradients."""
    x, weight = normals(2, 8).requires_grad_(x_needs), normals(8).requires_grad_(weight_needs)
    with scripted().active():
        assert [call.kernel.name for call in recorded(ops.rms_norm, x, weight)] == kernels


def test_the_phase_is_the_block_s() -> None:
    """Decisions are made for the phase in force."""
    made = scripted()
    with made.active(), kalign.using(phase="decode"):
        (decided,) = kalign.tune(scale, X)
    assert decided.entry is not None
    assert decided.entry.key.phase == "decode"


def test_a_kernel_that_cannot_be_tuned_says_why() -> None:
    """Asked for outright, a tuning that must not be is an error."""
    made = scripted(Script(corrupts=lambda kernel, config, run: run == 2))
    with made.active(), pytest.raises(NotTunable, match="scale"):
        kalign.tune(scale, X)


# --- verify -------------------------------------------------------------------------------------------------------


def test_a_sound_winner_is_not_refuted() -> None:
    """A stored winner whose bytes are the reference's is ``not refuted`` on a named suite."""
    made = scripted()
    store_winner(made, X)
    with made.active():
        (verified,) = kalign.verify(scale, X)
    assert (verified.kernel, verified.config) == ("scale", FASTER)
    assert (verified.verdict.state, verified.verdict.refutation) == ("not refuted", None)
    assert verified.verdict.cases > 3


def test_a_lying_winner_is_refuted() -> None:
    """A stored winner that writes one wrong bit is refuted, with the element."""
    made = scripted(Script(corrupts=lambda kernel, config, run: config == FASTER))
    store_winner(made, X)
    with made.active():
        (verified,) = kalign.verify(scale, X)
    assert verified.verdict.state == "refuted"
    assert verified.verdict.refutation is not None
    assert (verified.verdict.refutation.argument, verified.verdict.refutation.differing) == ("out", 1)


@pytest.mark.parametrize("refuted", [True, False])
def test_a_winner_serves_until_it_is_refuted(refuted: bool) -> None:
    """Once a stored winner was refuted its reference serves, in this process and in those that read the store."""
    made = scripted(Script(corrupts=lambda kernel, config, run: refuted and config == FASTER and run > 1))
    store_winner(made, X)
    with made.active(), kalign.using(mode="read"):
        scale(X)
        (verified,) = kalign.verify(scale, X)
        scale(X)
    served = SCALE_REFERENCE if refuted else FASTER
    assert (launched(made)[0][1], launched(made)[-1][1]) == (FASTER, served)
    assert (verified.removed, len(made.store.entries(made.facts(-1).identity))) == (refuted, not refuted)


class Keeping(CountingStore):
    """A store whose disk lets nothing be removed."""

    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        return 0


@pytest.mark.parametrize("mode", ["read", "tune"])
def test_a_refuted_winner_serves_no_more_though_its_store_keeps_it(mode: str) -> None:
    """Where a decision cannot be removed, the reference serves here, and that winner is not found again."""
    made = scripted(
        Script(
            time_us=lambda kernel, config: 50.0 if config == FASTER else 100.0,
            corrupts=lambda kernel, config, run: config == FASTER and run == 2,  # serves, is refuted, would be sound
        )
    )
    made._store = Keeping()
    store_winner(made, X)
    with made.active(), kalign.using(mode=mode):
        scale(X)
        (verified,) = kalign.verify(scale, X)
        scale(X)
    assert (verified.verdict.state, verified.removed) == ("refuted", False)
    assert (launched(made)[0][1], launched(made)[-1][1]) == (FASTER, SCALE_REFERENCE)


def test_a_refuted_winner_is_chosen_by_no_later_process(tmp_path: Path) -> None:
    """What only strict cases refute is not promoted again by a tuning that runs the quick ones."""
    script = prefers(FASTER)
    first, second = (scripted(script) for _ in range(2))
    for made in (first, second):
        made._store = TomlStore(Settings(cache_dir=tmp_path))
    with first.active(), kalign.using(mode="read"):
        store_winner(first, X)
        script.corrupts = lambda kernel, config, run: config == FASTER
        (verified,) = kalign.verify(scale, X)
        script.corrupts = Script().corrupts
    assert (verified.verdict.state, verified.removed) == ("refuted", True)
    with second.active():
        (decided,) = kalign.tune(scale, X)
    assert decided.entry is not None
    assert decided.entry.config != FASTER
    (kept,) = tmp_path.glob("*.failures.toml")
    assert "kalign verify refuted it: " in kept.read_text(encoding="utf-8")


def test_a_check_that_raises_removes_nothing() -> None:
    """A suite that is none refutes every launch and says nothing of this one: the decision stays."""

    @hookimpl(any_platform=True)
    def kalign_checks(kernel: Any, problem: Any) -> Any:
        raise ValueError("no check")

    made = scripted()
    module = types.ModuleType("broken")
    vars(module).update(KALIGN_API=1, kalign_checks=kalign_checks)
    made._plugins = made.plugins.with_module("broken", module)
    store_winner(made, X)
    with made.active():
        (verified,) = kalign.verify(scale, X)
    assert (verified.verdict.state, verified.removed) == ("refuted", False)
    assert len(made.store.entries(made.facts(-1).identity)) == 1


def test_without_a_winner_the_reference_is_verified() -> None:
    """Where nothing is stored the reference is held to its own promises."""
    with scripted().active():
        (verified,) = kalign.verify(scale, X)
    assert (verified.config, verified.verdict.state) == (SCALE_REFERENCE, "not refuted")


# --- explain ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "stored", "config", "why"),
    [
        ("off", True, SCALE_REFERENCE, "tuning is off"),
        ("read", True, FASTER, "decided 2026-01-01"),
        ("read", False, SCALE_REFERENCE, "no entry matches: the reference runs"),
        ("tune", False, SCALE_REFERENCE, "no entry matches: it would be tuned now"),
        ("frozen", False, SCALE_REFERENCE, "no entry matches: an error"),
        ("frozen", True, FASTER, "decided 2026-01-01"),
    ],
)
def test_explaining_says_what_would_run(mode: str, stored: bool, config: Any, why: str) -> None:
    """The explanation is that of the mode in force, and nothing is launched or tuned for it."""
    made = scripted()
    if stored:
        store_winner(made, X)
    with made.active(), kalign.using(mode=mode):
        (explained,) = kalign.explain(scale, X)
    assert (explained.config, explained.mode, launched(made)) == (config, mode, [])
    assert why in explained.why


def test_an_explanation_says_how_much_faster() -> None:
    """A measured winner comes with its gain, a reference that won is called that."""
    for script, why in ((prefers(FASTER), "2.00 times the reference's speed"), (Script(), "the reference is best")):
        with scripted(script).active(), kalign.using(mode="read"):
            kalign.tune(scale, X)
            (explained,) = kalign.explain(scale, X)
        assert why in str(explained)


@pytest.mark.parametrize("mode", ["off", "read", "tune"])
def test_an_explanation_holds(mode: str) -> None:
    """What is launched afterwards is what was explained, tuning apart."""
    made = scripted()
    store_winner(made, X)
    with made.active(), kalign.using(mode=mode):
        (explained,) = kalign.explain(scale, X)
        scale(X)
    assert launched(made) == [("scale", explained.config)]


# --- asking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("op", [torch.matmul, "rms_norm", None])
def test_what_is_no_operator_is_refused(call: Any, op: Any) -> None:
    """Anything but an operator is refused with an example of the call."""
    with scripted().active(), pytest.raises(BadArgument, match="is no operator") as caught:
        call(op, X)
    assert caught.value.fix == "kalign.tune(kalign.ops.rms_norm, x, weight)"


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_arguments_are_the_operator_s_own(call: Any) -> None:
    """What the operator refuses is refused in the same words."""
    with scripted().active(), pytest.raises(BadArgument, match="swiglu: up is"):
        call(ops.swiglu, X, X[:2])
    with scripted().active(), pytest.raises(MixedDevices, match="cpu"):
        call(ops.swiglu, X, X.to("meta"))


def test_asking_launches_nothing() -> None:
    """An operator is asked for its kernels without computing anything, so that its arguments stay as they are."""
    made = scripted()
    x = leaf(3, 8)
    before = bits(x)
    with made.active(), kalign.using(mode="tune"):
        assert [call.kernel.name for call in recorded(ops.swiglu, x, x)] == ["swiglu", "swiglu_backward"]
    assert (launched(made), bits(x), x.grad) == ([], before, None)
    assert isinstance(made.store, CountingStore)
    assert (made.store.lookups, made.store.puts) == (0, 0)


def test_a_problem_is_recorded_once() -> None:
    """Two launches that pose the same problem are one question."""

    class Twice(type(scale)):  # type: ignore[misc]
        def __call__(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
            return super().__call__(super().__call__(x, factor), factor)  # type: ignore[no-any-return]

    with scripted().active():
        assert len(recorded(Twice(), X)) == 1


def test_threads_do_not_mix_their_questions() -> None:
    """A question that is asked while another thread's is being answered waits for it, and both get their own."""
    made = scripted()
    others: list[list[str]] = []

    def ask() -> None:
        others.append([call.kernel.name for call in recorded(ops.swiglu, X, X)])

    class Interrupted(type(scale)):  # type: ignore[misc]
        def __call__(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
            result = super().__call__(x, factor)
            thread.start()
            thread.join(timeout=0.2)  # as long as this question is open the other one is not answered
            return result  # type: ignore[no-any-return]

    thread = threading.Thread(target=ask)
    with made.active():
        names = [call.kernel.name for call in recorded(Interrupted(), X)]
        thread.join()
    assert (names, others) == (["scale"], [["swiglu"]])


def test_an_operator_of_one_s_own_does_everything() -> None:
    """A kernel and an operator that a user declares are tuned, gated, remembered, launched and explained."""
    made = scripted(prefers(FASTER))
    with made.active():
        untuned = bits(scale(X))
        with kalign.using(mode="tune"):
            tuned = bits(scale(X))
        with kalign.using(mode="frozen"):
            frozen = bits(scale(X))
            (explained,) = kalign.explain(scale, X)
        (verified,) = kalign.verify(scale, X)
    assert untuned == tuned == frozen == bits(X * 2)
    assert (explained.config, verified.config, verified.verdict.state) == (FASTER, FASTER, "not refuted")
    assert torch.equal(scale.oracle(X).float(), X * 2)
