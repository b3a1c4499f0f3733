"""The launch path: what a call is remembered by, and that a call remembered asks nobody."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core import launch as launch_path
from kalign_core.errors import BadArgument, CandidateFailed
from kalign_core.hal.replay import Script
from kalign_core.ops import noting
from kalign_core.records import Config
from kalign_core.session import Session
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    CountingPlatform,
    CountingStore,
    bits,
    launched,
    normals,
    ops,
    scale,
    scale_kernel,
    scripted,
    store_winner,
)


@pytest.fixture
def session() -> Iterator[Session]:
    """A session in use whose store and platform count what they are asked."""
    made = Session(platform=CountingPlatform(), store=CountingStore(), configuration=scripted().settings)
    with made.active():
        yield made


@pytest.fixture
def resolved(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call that the memo did not answer."""
    seen: list[Any] = []
    resolve = session.resolve
    monkeypatch.setattr(session, "resolve", lambda site, call, args: seen.append(args) or resolve(site, call, args))
    return seen


def questions(session: Session) -> tuple[int, int]:
    """How often store and platform have been asked anything."""
    return session.store.lookups + session.store.puts, session.platform.asked  # type: ignore[attr-defined]


@pytest.mark.parametrize("known", [False, True])
def test_numbers_of_another_library_are_refused(session: Session, known: bool) -> None:
    """An integer or fraction that is not Python's own is refused, though a call with an equal one is known."""
    numpy = pytest.importorskip("numpy")
    x, out = normals(4, 40), torch.empty(4, 40)
    site, own = session.site(scale_kernel), (4, 40, 40, 40, 2.0)
    if known:
        site(x, out, *own)
    for place, (kind, fix) in enumerate(
        [(numpy.int64, "int(T)"), (numpy.int32, "int(F)"), (numpy.uint8, "int(x_stride)")]
    ):
        wrong = [kind(number) if i == place else number for i, number in enumerate(own)]
        with pytest.raises(BadArgument) as caught:
            site(x, out, *wrong)
        assert caught.value.fix == fix
    with pytest.raises(BadArgument, match=r"float\(factor\)"):
        site(x, out, *own[:4], numpy.float32(2.0))
    for no_integer in (4.0, torch.tensor(4), "4", None, True):
        with pytest.raises(BadArgument, match=r"scale: T is .* which is no integer$"):
            site(x, out, no_integer, *own[1:])


def test_the_value_of_a_fraction_is_no_part_of_a_call(session: Session, resolved: list[Any]) -> None:
    """Calls that differ in a float's value, NaN and numpy's own float among them, are resolved once."""
    numpy = pytest.importorskip("numpy")
    x, out = normals(4, 40), torch.empty(4, 40)
    for factor in (2.0, 3.0, float("nan"), float("nan"), numpy.float64(0.5), numpy.float64(0.25)):
        session.site(scale_kernel)(x, out, 4, 40, 40, 40, factor)
        assert bits(out) == bits(x * float(factor))
    assert len(resolved) == 1


# --- what a call like one before costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "read", "tune", "frozen"])
def test_a_call_like_one_before_asks_nobody(session: Session, mode: str) -> None:
    """In every mode the second call of its kind reaches neither the store nor the platform."""
    x = normals(3, 40)
    store_winner(session, x)
    with kalign.using(mode=mode):
        expected = scale(x)
        before = questions(session)
        assert bits(scale(x)) == bits(expected)
    assert questions(session) == before


@pytest.mark.parametrize("name", ["swiglu", "rms_norm", "matmul"])
def test_shared_operators_ask_nobody_either(session: Session, name: str) -> None:
    """The shared operators remember whole calls, which reach not even the kernel's own memo."""
    op = ops.named(name)
    args = op.inputs(op.small_shapes[0], "bf16", 0, torch.device("cpu"))
    with torch.no_grad():
        expected = op(*args)
        before = questions(session)
        site = session.site(op.kernels[0])
        site.memo.clear()
        assert bits(op(*args)) == bits(expected)
    assert (questions(session), site.memo) == (before, {})


# --- what a call is remembered by ---------------------------------------------------------------------------------


def strided(stride: int) -> torch.Tensor:
    """Three rows of 40, ``stride`` apart."""
    return torch.zeros(3, stride)[:, :40]


X = torch.zeros(3, 40)


@pytest.mark.parametrize(
    ("x", "factor", "again"),
    [
        (torch.zeros(4, 40), 2.0, False),  # the bucket of 3
        (torch.zeros(3, 40), 3.0, False),  # numbers are passed at run time
        (torch.zeros(5, 40), 2.0, True),  # the next bucket
        (torch.zeros(3, 41), 2.0, True),
        (torch.zeros(3, 40, dtype=torch.float16), 2.0, True),
        (torch.zeros(121)[1:].view(3, 40), 2.0, True),  # not aligned
        (strided(48), 2.0, True),
        (torch.zeros(3, 40), 2, True),  # an integer is specialised on
    ],
)
def test_what_the_code_depends_on_is_resolved_again(
    session: Session, resolved: list[Any], x: torch.Tensor, factor: float, again: bool
) -> None:
    """Dtype, alignment, strides, sizes and integers make another call; sizes within a bucket and floats do not."""
    scale(X)
    resolved.clear()
    assert torch.equal(scale(x, factor), x * factor)
    assert bool(resolved) is again


@pytest.mark.parametrize("change", [{"mode": "read"}, {"phase": "decode"}])
def test_mode_and_phase_are_resolved_again(session: Session, resolved: list[Any], change: dict[str, str]) -> None:
    """A call in another mode or phase may be answered by another launch."""
    scale(X)
    with kalign.using(**change):
        scale(X)
    assert len(resolved) == 2


def test_sessions_do_not_share_what_they_remember(session: Session, resolved: list[Any]) -> None:
    """What one session resolved says nothing in another."""
    with scripted().active():
        scale(X)
    scale(X)
    assert len(resolved) == 1


@pytest.mark.parametrize("absent", [True, False])
def test_an_absent_tensor_is_another_call(session: Session, absent: bool) -> None:
    """A product with a bias and one without have launches of their own, in either order."""
    a, b, bias = (normals(*shape).bfloat16() for shape in ((2, 8), (8, 4), (4,)))
    calls = [lambda: ops.matmul(a, b), lambda: ops.matmul(a, b, bias)]
    results = [bits(call()) for call in (calls if absent else reversed(calls))]
    assert results[0] != results[1]


def test_another_size_of_a_bucket_has_its_own_grid(session: Session) -> None:
    """One launch serves every number of rows of a bucket, and computes all of them."""
    for rows in (5, 8, 6):
        x = normals(rows, 40)
        assert torch.equal(scale(x), x * 2)
    assert len(session.site(scale_kernel).memo) == 1


def test_rows_of_none_are_no_rows_of_one(session: Session) -> None:
    """An empty call shares the bucket of a single row and yet launches nothing, whichever came first."""
    for rows in (0, 1, 0, 1):
        x = normals(rows, 40)
        assert torch.equal(scale(x), x * 2)


# --- how much is remembered ---------------------------------------------------------------------------------------


def test_the_memo_is_bounded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many kinds of calls a process makes, its memory does not grow with them."""
    monkeypatch.setattr(launch_path, "MEMO_LIMIT", 4)
    monkeypatch.setattr(noting, "MEMO_LIMIT", 4)
    for width in range(1, 12):
        x = normals(2, width)
        assert torch.equal(scale(x), x * 2)
        ops.swiglu(x, x)
    assert len(session.site(scale_kernel).memo) <= 4
    assert len(session.calls) <= 4


def test_forgetting_one_kernel_leaves_the_others(session: Session, resolved: list[Any]) -> None:
    """What was resolved for another kernel stays."""
    scale(X)
    ops.swiglu(X, X)
    session.forget(scale_kernel)
    scale(X)
    ops.swiglu(X, X)
    assert len(resolved) == 3


# --- launches that fail -------------------------------------------------------------------------------------------


def broken(config: Config) -> Callable[[str, Config, int], BaseException | None]:
    """A script's ``raises`` under which every launch of ``config`` fails."""
    return lambda kernel, tried, run: CandidateFailed("out of resources") if tried == config else None


def test_a_winner_that_fails_when_launched_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """The reference serves the call and all later ones, after one warning that says why."""
    session = scripted(Script(raises=broken(FASTER)))
    x = normals(3, 40)
    store_winner(session, x)
    with session.active(), kalign.using(mode="read"), caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(scale(x), x * 2)
    assert [record.message for record in caplog.records] == [
        "scale: a launch failed (out of resources); using the reference"
    ]
    assert [config for _, config in launched(session)] == [FASTER, *[SCALE_REFERENCE] * 3]


def test_a_reference_that_fails_is_an_error() -> None:
    """Where the reference itself cannot run the caller is told what the launch said."""
    session = scripted(Script(raises=broken(SCALE_REFERENCE)))
    with session.active(), pytest.raises(CandidateFailed, match="out of resources"):
        scale(normals(3, 40))


@pytest.mark.parametrize("wrong", [lambda: 65536, lambda: 1 // 0], ids=["too large", "not computable"])
def test_a_grid_that_is_wrong_for_a_size_falls_back(
    session: Session, caplog: pytest.LogCaptureFixture, wrong: Callable[[], int]
) -> None:
    """A winner that is legal where it was tuned and not at another size of its bucket gives way to the reference."""

    def grid(problem: Any, config: Config) -> tuple[int, ...]:
        rows = -(-problem.T // config.ROWS)
        return (rows, wrong()) if config == FASTER and problem.T == 4 else (rows,)

    made = dataclasses.replace(scale_kernel, grid=grid)
    store_winner(session, normals(3, 40), made)
    with kalign.using(mode="read"), caplog.at_level(logging.WARNING):
        for rows in (3, 4, 3):
            x = normals(rows, 40)
            out = torch.empty_like(x)
            session.site(made)(x, out, rows, 40, 40, 40, 2.0)
            assert torch.equal(out, x * 2)
    assert len(caplog.records) == 1
