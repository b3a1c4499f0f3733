"""What is remembered of calls and what never is: paths that cannot be noted, bounds, lifetimes, processes."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from kalign_core.errors import DeclarationError
from kalign_core.ops import noting
from kalign_core.ops.noting import allocate, launch
from kalign_core.ops.recall import Form
from kalign_core.session import Session
from tests.core.pinned import Scaled
from tests.core.scripted import bits, in_threads, normals, ops, scale_kernel

X = normals(3, 40)


pytestmark = pytest.mark.usefixtures("either_check")


def strided(stride: int) -> torch.Tensor:
    """``(3 40)`` with rows ``stride`` apart."""
    return torch.zeros(3, stride)[:, :40]


# --- what is never remembered -------------------------------------------------------------------------------------


def noted(plain: Callable[..., Any], *args: Any, rest: tuple[Any, ...] = ()) -> Any:
    """Two calls of ``plain``, of which the second may be recalled."""
    given, form = tuple(arg for arg in args if isinstance(arg, torch.Tensor)), Form("noted", plain)
    form(given, rest, args)
    return form(given, rest, args)


def test_a_key_without_an_argument_is_an_error(session: Session) -> None:
    """A call whose key leaves an argument out would answer for others."""
    with pytest.raises(DeclarationError, match=r"the key 'noted' of a call does not hold its argument 3\.0"):
        noted(Scaled().plain, X, 3.0)


def test_a_zero_is_remembered_only_where_its_sign_is_told(session: Session) -> None:
    """A key that holds 0.0 as it is would answer for -0.0."""
    scaled = Scaled()
    noted(scaled.plain, X, 0.0, rest=(0.0,))
    assert (scaled.ran, session.calls) == (2, {})


def test_a_number_that_equals_nothing_is_not_remembered(session: Session, scaled: Scaled) -> None:
    """Calls with NaN are computed each time and leave nothing, rather than an entry each that nobody finds."""
    for _ in range(3):
        assert bool(scaled(X, float("nan")).isnan().all())
    assert (scaled.ran, session.calls, len(session.site(scale_kernel).memo)) == (3, {}, 1)


@pytest.mark.parametrize("known", [False, True])
def test_a_call_within_a_noted_one_is_not_left_out(session: Session, scaled: Scaled, known: bool) -> None:
    """An operator that calls another one, known or not, is not remembered by what it launched itself."""
    out = torch.empty(3, 40)

    def plain(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made = allocate(x.shape, x.dtype, x.device)
        scaled(x, 3.0, out=out)
        launch(scale_kernel, x, made, *x.shape, x.stride(0), made.stride(0), 2.0)
        return made

    if known:
        scaled(X, 3.0, out=torch.empty(3, 40))
    noted(plain, X, out.zero_())
    out.zero_()
    noted(plain, X, out)
    assert bits(out) == bits(X * 3)


def test_a_copy_is_made_again(session: Session) -> None:
    """A path that copies its input before it launches is gone through each time."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        dense, made = x.contiguous(), allocate(x.shape, x.dtype, x.device)
        launch(scale_kernel, dense, made, *x.shape, dense.stride(0), made.stride(0), 2.0)
        return made

    x = normals(40, 3).t()
    noted(plain, x)
    x.add_(1)
    assert torch.equal(noted(plain, x), x * 2)


def test_writing_besides_launches_is_an_error(session: Session) -> None:
    """A workspace that torch fills before the launch would be left as it is on the next call."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        made = allocate(x.shape, x.dtype, x.device).zero_()
        launch(scale_kernel, x, made, *x.shape, x.stride(0), made.stride(0), 2.0)
        return made

    with pytest.raises(DeclarationError, match="writes a new tensor by other means than a launch"):
        noted(plain, X)


def test_a_call_that_would_not_be_recalled_itself_is_not_remembered(session: Session, scaled: Scaled) -> None:
    """A path that takes memory which a recalled call may not share costs no entry for each call."""
    x = normals(3, 40)
    given = (x, x.view(3, 40))
    form = Form("noted", scaled.plain, outs=1)
    for _ in range(2):
        form(given, (2.0,), (x, 2.0, given[1]))
    assert session.calls == {}


def test_a_launch_that_does_not_stand_for_good_is_not_remembered(
    session: Session, scaled: Scaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched for the moment, as during a capture, is asked for again."""
    resolve = session.resolve
    monkeypatch.setattr(session, "resolve", lambda *args: (resolve(*args)[0], False))
    for _ in range(3):
        scaled(X)
    assert (scaled.ran, session.calls) == (3, {})


@pytest.mark.parametrize("factor", [[2.0], {}, {2.0}])
def test_what_cannot_be_hashed_goes_to_the_checks(session: Session, factor: Any) -> None:
    """An argument that cannot be a part of a key is left to the operator to refuse."""

    def plain(x: torch.Tensor, factor: Any) -> str:
        return "checked"

    assert Form("noted", plain)((X,), (factor,)) == "checked"


# --- how much is remembered, and by whom --------------------------------------------------------------------------


def test_kinds_are_bounded(session: Session, scaled: Scaled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the number of keys nor that of variants under one key grows without end."""
    monkeypatch.setattr(noting, "MEMO_LIMIT", 4)
    for rows in range(1, 12):
        scaled(normals(rows, 8))
    assert len(session.calls) <= 4
    for stride in range(40, 60):
        x = strided(stride)
        assert torch.equal(scaled(x), x * 2)
    assert max(len(hit.variants) for hit in session.calls.values()) == noting.MOST_VARIANTS  # type: ignore[attr-defined]


def test_every_variant_of_a_key_is_recalled(session: Session, scaled: Scaled) -> None:
    """Layouts that take turns are all remembered."""
    for _ in range(3):
        for stride in (40, 44, 48):
            scaled(strided(stride))
    assert scaled.ran == 3


def test_remembering_keeps_no_tensor_alive(session: Session, scaled: Scaled) -> None:
    """What is remembered holds no tensor of the calls it came from."""
    x, out = normals(3, 40), torch.empty(3, 40)
    made = scaled(x)
    scaled(x, out=out)
    norm = ops.rms_norm(x, x[0], out=out)
    ops.swiglu(x, x)
    watched = [weakref.ref(tensor) for tensor in (x, out, made, norm)]
    del x, out, made, norm
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4
    assert len(session.calls) == 4


FORKED = """
import os, threading, torch
from tests.core.pinned import PinnedPlatform, Scaled
from tests.core.scripted import CountingStore, normals, scripted
from kalign_core import session
from kalign_core.session import Session

if __name__ == "__main__":
    torch.set_num_threads(1)
    made = Session(platform=PinnedPlatform(), store=CountingStore(), configuration=scripted().settings)
    session._current = made
    scaled, x = Scaled(), normals(3, 40)
    scaled(x)
    held = threading.Event()
    threading.Thread(target=lambda: (made._lock.acquire(), held.set(), threading.Event().wait(5)), daemon=True).start()
    held.wait()
    pid = os.fork()
    if not pid:
        right = torch.equal(scaled(x), x * 2) and torch.equal(scaled(normals(9, 40)), normals(9, 40) * 2)
        made.say("the lock is new")
        os._exit(0 if right and scaled.ran == 2 and made.platform.fired == 1 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)
"""


def test_a_child_of_fork_remembers_and_waits_for_nobody(child: Callable[..., Any]) -> None:
    """A child forked while another thread holds the session's lock recalls what its parent knew and learns more."""
    done = child(FORKED, TRITON_INTERPRET="1", KALIGN_PLATFORM="cpu")
    assert done.stdout.split() == ["0"], done.stderr


def computed(seed: int) -> bytes:
    """What a process of its own computes."""
    return bits(ops.swiglu(normals(3, 40, seed=seed), normals(3, 40)))


def test_a_spawned_process_computes_the_same_bits() -> None:
    """A process that starts anew remembers nothing and gives the same bytes."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(computed, 4).result(timeout=600) == computed(4)


def test_threads_each_get_their_own_result(session: Session) -> None:
    """Eight threads that make new and known calls at once never see another's numbers."""

    def work(seed: int) -> bool:
        scaled, right = Scaled(), True
        for rows in (1, 3, 2, 3, 1, 2) * 2:
            x, out = normals(rows, 8, seed=seed), torch.empty(rows, 8)
            right &= bits(scaled(x)) == bits(scaled(x, out=out)) == bits(x * 2)
        return right

    assert in_threads(8, work) == [True] * 8
