"""Sessions: which launch answers a call in each mode, when tuning happens, and what it leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core import context
from kalign_core.cache.base import MemoryStore
from kalign_core.cache.toml_store import TomlStore
from kalign_core.declare import Kernel
from kalign_core.errors import CandidateFailed, MissingEntry
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.ops.noting import launch
from kalign_core.records import Config, Problem
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    X,
    bits,
    counts,
    decide,
    launched,
    leaf,
    normals,
    ops,
    prefers,
    scale,
    scale_kernel,
    scripted,
    served,
    store_winner,
    warnings,
)

# --- modes --------------------------------------------------------------------------------------------------------


def test_off_launches_the_reference_and_touches_no_store() -> None:
    """In mode off a stored winner is not even looked up."""
    made = scripted()
    store_winner(made, X)
    before = counts(made)
    assert (served(made, "off"), counts(made)) == (SCALE_REFERENCE, before)


def test_read_uses_an_entry() -> None:
    """In mode read a stored winner serves the call."""
    made = scripted()
    store_winner(made, X)
    assert served(made, "read") == FASTER


def test_read_never_tunes() -> None:
    """In mode read a problem without an entry is served by the reference, once and for all, and nothing is timed."""
    made = scripted(prefers(FASTER))
    assert [served(made, "read") for _ in range(3)] == [SCALE_REFERENCE] * 3
    assert counts(made) == (1, 0)
    assert len(launched(made)) == 3


def test_frozen_uses_an_entry() -> None:
    """In mode frozen a stored winner serves the call."""
    made = scripted()
    store_winner(made, X)
    assert served(made, "frozen") == FASTER


def test_frozen_raises_without_an_entry() -> None:
    """In mode frozen a problem without an entry is an error that launches nothing."""
    made = scripted()
    with pytest.raises(MissingEntry, match=r"scale T<=4 F=40 train") as caught:
        served(made, "frozen")
    assert "kalign.using(mode='read')" in caught.value.fix
    assert launched(made) == []


def test_frozen_says_what_to_type() -> None:
    """The error holds the command that tunes this very problem."""
    x, weight = normals(3, 16).bfloat16(), normals(16).bfloat16()
    with scripted().active(), kalign.using(mode="frozen", phase="decode"), pytest.raises(MissingEntry) as caught:
        ops.rms_norm(x, weight)
    assert "kalign tune rms_norm --shape T=3,H=16 --dtype bf16 --phase decode" in str(caught.value)


def test_tune_tunes_once() -> None:
    """In mode tune the first call of a problem is tuned and served by the winner, and so are all after it."""
    made = scripted(prefers(FASTER))
    assert served(made, "tune") == FASTER
    timed = len(launched(made))
    assert [served(made, "tune"), served(made, "tune", normals(4, 40)), served(made, "read")] == [FASTER] * 3
    assert (len(launched(made)), counts(made)[1]) == (timed + 3, 1)


def test_the_reference_may_be_best() -> None:
    """Where nothing is faster the reference is the decision, which is kept like any other."""
    made = scripted()
    assert served(made, "tune") == SCALE_REFERENCE
    timed = len(launched(made))
    made.forget()
    assert (served(made, "frozen"), len(launched(made))) == (SCALE_REFERENCE, timed + 1)


def test_modes_give_the_same_bytes() -> None:
    """Off, tune and read give byte-identical results although they launch different things."""
    made = scripted(prefers(FASTER))
    results = []
    with made.active():
        for mode in ("off", "tune", "read", "frozen"):
            with kalign.using(mode=mode):
                results.append(bits(scale(X)))
    assert results == results[:1] * 4
    assert {config for _, config in launched(made)} == {SCALE_REFERENCE, FASTER}


def test_a_phase_has_its_own_entries() -> None:
    """A decision for one phase does not answer another."""
    made = scripted()
    store_winner(made, X, phase="decode")
    assert [served(made, "read", phase=p) for p in ("decode", "train")] == [FASTER, SCALE_REFERENCE]


def test_a_second_session_times_nothing(tmp_path: Path) -> None:
    """What one session decided and wrote, another reads from the file and launches."""

    def fresh() -> Session:
        store = TomlStore(Settings(cache_dir=tmp_path, sources={}))
        return Session(platform=scripted(prefers(FASTER)).platform, store=store)

    first, second = fresh(), fresh()
    assert served(first, "tune") == FASTER
    assert (len(launched(first)) > 1, first.store.flush()) == (True, True)
    assert served(second, "frozen") == FASTER
    assert len(launched(second)) == 1


def test_every_tensor_s_dtype_is_part_of_the_decision() -> None:
    """A decision for one combination of dtypes answers no other, and its own however the arguments are passed."""
    made = scripted()
    narrow, wide = torch.bfloat16, torch.float32
    with made.active(), kalign.using(mode="tune"):
        for x, weight in ((narrow, narrow), (wide, narrow), (narrow, wide)):
            ops.rms_norm(normals(2, 8, dtype=x), normals(8, dtype=weight))
        assert counts(made)[1] == 3
        made.forget()
        before = len(launched(made))
        ops.rms_norm(weight=normals(8, dtype=narrow), x=normals(2, 8, dtype=narrow))
    assert (counts(made)[1], len(launched(made))) == (3, before + 1)


class NarrowOnly(ReplayPlatform):
    """A scripted platform on which the faster launch fits numbers of two bytes and not of four."""

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Any:
        if config == FASTER and problem.dtype("x") == "fp32":
            raise CandidateFailed("out of resource: shared memory")
        return super().launcher(kernel, problem, config, args)


def test_what_fits_narrow_numbers_is_not_launched_on_wide_ones(caplog: pytest.LogCaptureFixture) -> None:
    """A winner for numbers of two bytes leaves those of four to their reference, and nobody hears of its limits."""
    made = Session(platform=NarrowOnly(prefers(FASTER)), store=MemoryStore())
    assert [served(made, "tune", X.to(dtype)) for dtype in (torch.float16, torch.float32)] == [FASTER, SCALE_REFERENCE]
    assert [served(made, "read", X.to(dtype)) for dtype in (torch.float16, torch.float32)] == [FASTER, SCALE_REFERENCE]
    assert warnings(caplog) == []


def test_many_row_counts_are_few_decisions() -> None:
    """Any number of rows falls into a bucket, so that varying lengths do not tune again and again."""
    made = scripted()
    with made.active(), kalign.using(mode="tune"):
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 3, 5):
            scale(normals(rows, 8))
    assert counts(made)[1] == 4


def test_torch_s_own_switches_change_nothing() -> None:
    """Precision and determinism of torch's matrix products are no part of a kernel: hits stay hits, bits stay bits."""
    made = scripted(prefers(FASTER))
    a, b = normals(3, 16, dtype=torch.bfloat16), normals(16, 8, dtype=torch.bfloat16, seed=1)
    backends = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision(), backends.allow_tf32, torch.are_deterministic_algorithms_enabled()
    with made.active():
        with kalign.using(mode="tune"):
            expected, tuned, facts = bits(ops.matmul(a, b)), counts(made)[1], CpuPlatform().toolchain(-1)
        try:
            torch.set_float32_matmul_precision("medium" if before[0] == "highest" else "highest")
            backends.allow_tf32 = not before[1]
            torch.use_deterministic_algorithms(not before[2])
            made.forget()
            assert CpuPlatform().toolchain(-1) == facts
            with kalign.using(mode="frozen"):
                assert bits(ops.matmul(a, b)) == expected
        finally:
            backends.allow_tf32 = before[1]
            torch.set_float32_matmul_precision(before[0])
            torch.use_deterministic_algorithms(before[2])
    assert (tuned, counts(made)[1]) == (1, 1)


# --- backward -----------------------------------------------------------------------------------------------------


def test_backward_runs_in_forward_s_mode_and_phase() -> None:
    """A backward pass that another thread runs, outside of any block, is resolved as its forward was."""
    made = scripted()
    seen: list[tuple[str, context.Call]] = []
    resolve = made.resolve
    made.resolve = lambda site, call, args: seen.append((site.kernel.name, call)) or resolve(site, call, args)  # type: ignore[method-assign]
    x, weight = leaf(2, 8), leaf(8)
    with made.active():
        with kalign.using(mode="read", phase="prefill"):
            loss = ops.rms_norm(x, weight).sum() + ops.swiglu(x, x).sum()
            loss = loss + ops.matmul(x.bfloat16(), weight.bfloat16()[:, None]).float().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert {"rms_norm_backward", "rms_norm_dweight_fold", "swiglu_backward", "matmul"} <= {name for name, _ in seen}
    assert {call for _, call in seen} == {context.Call("read", "prefill")}


def test_gradients_are_the_same_in_every_mode() -> None:
    """Tuning the first backward pass changes no byte of the gradients."""
    grads = []
    made = scripted(Script(time_us=lambda kernel, config: 50.0 if config.num_warps == 2 else 100.0))
    for mode in ("off", "tune", "read"):
        x = leaf(3, 8)
        with made.active(), kalign.using(mode=mode):
            ops.rms_norm(x, normals(8, seed=1)).backward(normals(3, 8, seed=2))
        grads.append(bits(x.grad))  # type: ignore[arg-type]
    assert grads == grads[:1] * 3
    tuned = [(name, config.num_warps) for name, config in launched(made)[-2:]]
    assert tuned == [("rms_norm", 2), ("rms_norm_backward", 2)]


# --- what tuning leaves alone -------------------------------------------------------------------------------------


def test_tuning_leaves_the_caller_s_tensors_alone() -> None:
    """Neither inputs nor their version counters, nor the random generator, change by tuning."""
    x, weight, state = leaf(3, 8), leaf(8), torch.random.get_rng_state()
    before = bits(x), x._version, bits(weight), weight._version
    with scripted().active(), kalign.using(mode="tune"):
        out = ops.rms_norm(x, weight)
    assert (bits(x), x._version, bits(weight), weight._version) == before
    assert (x.grad, weight.grad) == (None, None)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert out.requires_grad


@pytest.mark.parametrize("call", [kalign.tune, kalign.explain], ids=["tune", "explain"])
def test_asking_leaves_gradients_alone(call: Callable[..., Any]) -> None:
    """``kalign.tune`` and ``kalign.explain`` go back through the operator, but not into the caller's graph."""
    x, weight = leaf(3, 8), normals(8)
    hooked: list[int] = []
    x.register_hook(lambda grad: hooked.append(1))
    product = x * 2
    with scripted().active():
        call(ops.rms_norm, product, weight)
    assert (x.grad, hooked) == (None, [])
    product.sum().backward()
    assert hooked == [1]


def test_a_call_in_place_is_computed_once() -> None:
    """An operator that writes into its input does so once, on the call that tunes as on every other."""
    made = scripted(prefers(FASTER))
    x = X.clone()
    with made.active(), kalign.using(mode="tune"):
        for factor in (2, 4):
            launch(scale_kernel, x, x, 3, 40, 40, 40, 2.0)
            assert torch.equal(x, X * factor)
    assert counts(made)[1] == 1


@pytest.mark.parametrize(
    ("x", "config"),
    [
        (torch.zeros(3, 80)[:, :40], FASTER),  # another stride of the same class
        (torch.zeros(3, 40), SCALE_REFERENCE),  # no gaps
        (torch.zeros(3, 41)[:, :40], SCALE_REFERENCE),  # rows that are not aligned
        (torch.zeros(1, 64)[:, :40].expand(3, 40), SCALE_REFERENCE),  # one row for all
        (torch.zeros(193)[1:].view(3, 64)[:, :40], SCALE_REFERENCE),  # an address that is not aligned
        (torch.zeros(6, 40)[::2], FASTER),  # every other row is rows with gaps
    ],
)
def test_a_decision_holds_for_its_layout_class(x: torch.Tensor, config: Config) -> None:
    """A decision answers layouts of its class, whatever the numbers, and no other class."""
    made = scripted()
    padded = torch.zeros(3, 64)[:, :40]
    with made.active(), kalign.using(mode="read"):
        store_winner(made, padded)
        assert served(made, "read", x) == config


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: normals(8, 64),
    "transposed": lambda: normals(64, 8).t(),
    "every other row": lambda: normals(16, 64)[::2],
    "every other column": lambda: normals(8, 128)[:, ::2],
    "one row for all": lambda: normals(1, 64).expand(8, 64),
    "unaligned": lambda: normals(1, 8 * 64 + 1)[0, 1:].view(8, 64),
}


@pytest.mark.parametrize("view", VIEWS)
def test_every_layout_is_tuned_as_it_lies(view: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever view an operator is given, it is tuned once, its result is right, and nothing is wrong with that."""
    made, x = scripted(), VIEWS[view]()
    with made.active(), kalign.using(mode="tune"):
        got = [ops.swiglu(x, x) for _ in range(2)]
    assert counts(made)[1] == 1
    for result in got:
        assert torch.allclose(result.double(), ops.swiglu.oracle(x, x), atol=1e-5)
    assert warnings(caplog) == []


def test_empty_tensors_never_tune() -> None:
    """A call without rows or columns is answered in every mode, and leaves no entry and no look-up."""
    made = scripted()
    with made.active():
        for mode in ("tune", "frozen", "read", "off"):
            with kalign.using(mode=mode):
                assert scale(torch.empty(0, 40)).shape == (0, 40)
                assert ops.swiglu(torch.empty(2, 0), torch.empty(2, 0)).shape == (2, 0)
                assert ops.matmul(torch.empty(2, 0).half(), torch.empty(0, 3).half()).tolist() == [[0.0] * 3] * 2
    assert counts(made) == (0, 0)


def test_an_empty_call_settles_nothing() -> None:
    """A call without rows does not decide for the calls with rows that share its bucket."""
    made = scripted(prefers(FASTER))
    with made.active(), kalign.using(mode="tune"):
        scale(torch.empty(0, 40))
        scale(normals(1, 40))
    assert counts(made)[1] == 1


# --- moments at which nothing is tuned ----------------------------------------------------------------------------


def test_without_a_budget_nothing_is_tuned(caplog: pytest.LogCaptureFixture) -> None:
    """With a budget of no seconds every problem stays with its reference, after one warning and one look-up."""
    made = scripted(prefers(FASTER), tune_budget_s=0.0)
    assert [served(made, "tune") for _ in range(3)] == [SCALE_REFERENCE] * 3
    assert served(made, "tune", normals(3, 8)) == SCALE_REFERENCE
    assert (counts(made), len(launched(made))) == ((2, 0), 4)
    assert warnings(caplog) == ["the tuning budget of 0 s is spent; using references"]


def test_the_budget_runs_out() -> None:
    """Once the process has spent its budget, problems that were not tuned yet stay with their reference."""
    made = scripted(prefers(FASTER), tune_budget_s=1e-9)
    served(made, "tune")
    assert served(made, "tune", normals(3, 8)) == SCALE_REFERENCE
    assert counts(made)[1] <= 1


def test_asking_for_it_needs_no_budget() -> None:
    """``kalign.tune`` tunes whatever the budget of first executions is, and what it finds is used."""
    made = scripted(prefers(FASTER), tune_budget_s=0.0)
    assert served(made, "tune") == SCALE_REFERENCE
    decide(made, scale, X)
    assert served(made, "tune") == FASTER
