"""Kernels that write over, add to or draw: tuned, repeated and recalled, each call does to its tensors what one launch
of the reference does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.cache.toml_store import TomlStore
from kalign_core.declare import Config, Kernel, accumulated, cdiv, data, kernel, powers_of_two, written
from kalign_core.hal.replay import ReplayPlatform
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import bits, launched, normals, prefers, scripted, warnings

import triton  # isort: skip  # after scripted, which asks for the interpreter
import triton.language as tl  # isort: skip

ROWS, COLUMNS = 3, 8
REFERENCE = Config(BLOCK=16, num_warps=1, num_stages=1, enable_fp_fusion=False)
WINNER = REFERENCE.replace(BLOCK=32)


def over(role: Any) -> Any:
    """An argument of ``(T F)`` elements, row by row."""
    return role("T", "F", strides=("F", 1))


def elementwise(name: str, **roles: Any) -> Callable[[Any], Kernel]:
    """A declaration of a kernel whose two candidates differ in how many elements a program takes."""
    made: Callable[[Any], Kernel] = kernel(
        name=name, family="pointwise", contract=f"{name}/1", dims=("T", "F"), bucket={"T": powers_of_two}, args=roles,
        reference=REFERENCE, knobs={"BLOCK": (16, 32)}, grid=lambda p, c: (cdiv(p.T * p.F, c.BLOCK),),
    )  # fmt: skip
    return made


@elementwise("doubles_in_place", x=over(accumulated))
@triton.jit(do_not_specialize=["T"])
def doubles_in_place(x, T, F, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < T * F) * 2, mask=at < T * F)


@elementwise("adds_atomically", x=over(data), total=over(accumulated))
@triton.jit(do_not_specialize=["T"])
def adds_atomically(x, total, T, F, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total + at, tl.load(x + at, mask=at < T * F), mask=at < T * F)


@elementwise("adds_a_residual", x=over(data), residual=over(accumulated), out=over(written))
@triton.jit(do_not_specialize=["T"])
def adds_a_residual(x, residual, out, T, F, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < T * F) + tl.load(residual + at, mask=at < T * F)
    tl.store(residual + at, total, mask=at < T * F)
    tl.store(out + at, total * 3, mask=at < T * F)


@elementwise("draws", x=over(data), out=over(written))
@triton.jit(do_not_specialize=["T"])
def draws(x, out, T, F, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.where(tl.rand(seed, at) < 0.5, tl.load(x + at, mask=at < T * F), 0.0)
    tl.store(out + at, kept, mask=at < T * F)


@elementwise("writes_undeclared", x=over(data), out=over(written))
@triton.jit(do_not_specialize=["T"])
def writes_undeclared(x, out, T, F, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < T * F)
    tl.store(out + at, values, mask=at < T * F)
    tl.store(x + at, values + 1, mask=at < T * F)


DECLARED = {made.name: made for made in (doubles_in_place, adds_atomically, adds_a_residual, draws)}
declared = pytest.mark.parametrize("made", DECLARED.values(), ids=DECLARED)


def call(session: Session, made: Kernel, mode: str) -> str:
    """What one call of ``made`` on new tensors leaves in each of them, and in torch's random numbers."""
    tensors = [normals(ROWS, COLUMNS, seed=place) for place in range(len(made.args))]
    numbers = (7,) if "seed" in made.parameters else ()
    with session.active(), kalign.using(mode=mode):
        session.site(made)(*tensors, ROWS, COLUMNS, *numbers)
    return " ".join([*(bits(tensor).hex() for tensor in tensors), bits(torch.random.get_rng_state()).hex()])


def on_disk(folder: Path) -> Session:
    """A session whose decisions lie in ``folder`` and whose device is fastest with ``WINNER``."""
    store = TomlStore(Settings(cache_dir=folder, sources={}))
    return Session(platform=ReplayPlatform(prefers(WINNER)), store=store, configuration=scripted().settings)


def recalled(folder: Path) -> dict[str, str]:
    """What a process that finds every decision in ``folder`` gets of each kernel."""
    here = on_disk(folder)
    found = {name: call(here, made, "frozen") for name, made in DECLARED.items()}
    assert {config for _, config in launched(here)} == {WINNER}
    return found


@declared
def test_the_call_that_tunes_launches_once_on_its_tensors(made: Kernel) -> None:
    """First call, which tunes, and second one, which finds the winner, leave what one launch of the reference does."""
    here = scripted(prefers(WINNER))
    expected = call(here, made, "off")
    assert [call(here, made, "tune") for _ in range(2)] == [expected] * 2
    assert launched(here)[-1] == (made.name, WINNER)


def test_another_process_that_finds_the_decision_does_the_same(tmp_path: Path, child: Callable[..., Any]) -> None:
    """What a process gets from decisions of another one is what the reference leaves, byte for byte."""
    torch.manual_seed(0)
    here = on_disk(tmp_path)
    expected = {name: call(here, made, "off") for name, made in DECLARED.items()}
    assert {name: call(here, made, "tune") for name, made in DECLARED.items()} == expected
    assert here.close()
    code = (
        "import json, sys, pathlib, torch; from tests.core import test_session_writes as here; torch.manual_seed(0)\n"
        f"print(json.dumps(here.recalled(pathlib.Path({str(tmp_path)!r}))))"
    )
    done = child(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_an_undeclared_write_happens_once(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel found to write an input keeps its reference, and the call that found it out has written once."""
    here = scripted(prefers(WINNER))
    expected = call(here, writes_undeclared, "off")
    assert [call(here, writes_undeclared, "tune") for _ in range(2)] == [expected] * 2
    assert [text for text in warnings(caplog) if "writes to x, declared as an input" in text]
    assert launched(here)[-1] == ("writes_undeclared", REFERENCE)
