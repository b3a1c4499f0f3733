"""What the gate binds is compiled in killable processes first: nothing is compiled in ours that was not tried there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

import kalign_core as kalign
from kalign_core import ops
from kalign_core.api import Verified
from kalign_core.cache.base import MemoryStore
from kalign_core.cli.main import main
from kalign_core.declare import Kernel, Lowered, lower
from kalign_core.errors import NotTunable
from kalign_core.hal.base import Launch
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.records import Case, Config, Problem
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.tuner.compile import CompilePool, Compiling
from kalign_core.verifier.ahead import problems_apart
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.repeat import command
from tests.core.scripted import FASTER, SCALE_REFERENCE, X, scale, scale_kernel, scale_problem, store_winner
from tests.core.tuner_samples import FAKE_WORKER

TARGET = ("fake", 1, 32)


class Pool(CompilePool):
    """Compile processes that do as they are told, and what they were given."""

    def __init__(self) -> None:
        super().__init__(2, FAKE_WORKER)
        self.jobs: list[Lowered] = []

    def start(self, jobs: Sequence[Lowered], target: tuple[str, int | str, int], deadline_s: float) -> Compiling:
        self.jobs += jobs
        return super().start(jobs, target, deadline_s)


class Device(ReplayPlatform):
    """A scripted device for which something is compiled, and what was bound on it: what a GPU would compile here."""

    def __init__(self) -> None:
        super().__init__(Script(target=TARGET))
        self.bound: list[Lowered] = []

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        self.bound.append(lower(kernel, problem, config))
        return super().launcher(kernel, problem, config, args)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def here(device: Device, pool: Pool) -> Iterator[Session]:
    """A session on that device with those processes."""
    made = Session(platform=device, store=MemoryStore(), configuration=Settings(sources={}))
    made._pool = pool
    with made.active():
        yield made


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """``plan({"out=*fp64": "abort"})`` says what becomes of compiles with that argument, option or constant."""
    return lambda said: monkeypatch.setenv("FAKE_WORKER_PLAN", json.dumps(said))


def verified(here: Session, *, strict: bool = True) -> Verified:
    """The verdict on a stored winner of ``scale``."""
    store_winner(here, X)
    [found] = kalign.verify(scale, X, strict=strict)
    return found


# --- which code that is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_nothing_is_bound_that_was_not_compiled_elsewhere(
    here: Session, device: Device, pool: Pool, strict: bool
) -> None:
    """Every code of reference and winner that verifying binds went through a compile process before."""
    assert verified(here, strict=strict).verdict.state == "not refuted"
    assert device.bound
    assert set(device.bound) <= set(pool.jobs)


def test_each_code_is_compiled_once(here: Session, device: Device, pool: Pool) -> None:
    """However many cases run it, and whoever asks; the strict suite has code beyond the problem's own."""
    verified(here)
    assert len(pool.jobs) == len(set(pool.jobs)) > 2
    assert set(pool.jobs) == set(device.bound)


@pytest.mark.parametrize(("op", "sizes"), [(ops.matmul, {"M": 4, "N": 16, "K": 16}), (ops.rms_norm, {"T": 3, "H": 40})])
def test_the_command_compiles_nothing_here(
    here: Session, device: Device, pool: Pool, op: Any, sizes: dict[str, int]
) -> None:
    """``kalign verify --strict`` sends the wide output, every layout and every width to the compile processes."""
    shape = ",".join(f"{dim}={size}" for dim, size in sizes.items())
    result = CliRunner().invoke(main, ["verify", op.name, "--shape", shape, "--strict", "--json"])
    assert result.exit_code == 0, result.output
    assert set(device.bound) <= set(pool.jobs)
    assert any(("out" if op is ops.rms_norm else "c", "*fp32") in code.signature for code in device.bound)


def test_one_case_is_compiled_elsewhere_too(here: Session, device: Device, pool: Pool) -> None:
    """The command that a refutation prints compiles what its case needs: two configurations, of two layouts each."""
    case = Case("layout", variant="unaligned")
    text = command(scale_kernel, scale_problem(), scale_kernel, FASTER, case, -1)
    result = CliRunner().invoke(main, [*shlex.split(text)[1:], "--json"])
    assert result.exit_code == 0, result.output
    assert set(device.bound) == set(pool.jobs)
    assert len(pool.jobs) == 4


def test_cases_that_compile_alike_are_one_problem() -> None:
    """Bucketed sizes are no other code; another layout is; a case for which there is no problem is left out."""
    bench = Bench(Device(), scale_kernel, scale_problem(), -1)
    cases = [Case("", dims=(("T", 3),)), Case("", variant="unaligned"), Case("", variant="nowhere")]
    found = problems_apart(bench, scale_kernel, SCALE_REFERENCE, [*cases, *cases])
    assert found == [bench.problem, bench.problem_for(cases[1])]


# --- what goes wrong there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["abort", "garbage"])
def test_what_takes_its_compiler_along_is_not_compiled_here(
    here: Session, device: Device, plan: Any, what: str
) -> None:
    """A winner whose compiler is lost is refuted with the reason, and the process that asks lives."""
    plan({f"{_place('ROWS')}={FASTER['ROWS']}": what})
    found = verified(here).verdict
    assert found.refutation is not None
    assert found.refutation.reason.startswith("failed to launch: the compiler")
    assert not any(("ROWS", FASTER["ROWS"]) in _constants(code) for code in device.bound)


def test_a_layout_that_takes_its_compiler_along_says_nothing(here: Session, plan: Any) -> None:
    """As one that cannot be launched: it is named as skipped, and the others are looked at."""
    plan({f"{_place('F')}=1": "abort"})
    found = verified(here).verdict
    assert (found.state, found.skipped) == ("not refuted", ("F=1",))


def test_a_reference_that_takes_its_compiler_along_is_not_tunable(here: Session, plan: Any) -> None:
    """There are no bits to be equal to."""
    plan({f"{_place('ROWS')}={SCALE_REFERENCE['ROWS']}": "abort"})
    with pytest.raises(NotTunable, match="the compiler died of SIGABRT"):
        verified(here)


def test_what_fails_to_compile_there_fails_here(here: Session, device: Device, plan: Any) -> None:
    """An orderly failure is the compiler's to repeat: it is bound here and raises what it raises."""
    plan({f"{_place('ROWS')}={FASTER['ROWS']}": "fails"})
    assert verified(here).verdict.state == "not refuted"
    assert any(("ROWS", FASTER["ROWS"]) in _constants(code) for code in device.bound)


@pytest.mark.parametrize("what", ["unimportable", "closure", "no process"])
def test_what_no_process_compiles_is_compiled_here_and_said_so(
    here: Session, plan: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Kernels of notebooks, and machines that start no processes, are verified all the same; it is said once."""
    plan({"num_warps=1": "unimportable"} if what == "unimportable" else {})
    if what == "closure":
        monkeypatch.setattr(type(scale_kernel), "import_path", None)
    elif what == "no process":
        monkeypatch.setenv("FAKE_WORKER_START", "dies")
    states = [verified(here).verdict.state for _ in range(2)]
    said = [r.getMessage() for r in caplog.records if "compiled in this process" in r.getMessage()]
    assert states == ["not refuted"] * 2
    assert len(said) == 1
    assert said[0].startswith("scale is compiled in this process, where a compiler that dies takes it along: ")


def test_an_interpreter_compiles_nothing(here: Session, device: Device, pool: Pool) -> None:
    """Without a compile target no process is asked."""
    device.script.target = None
    assert verified(here).verdict.state == "not refuted"
    assert pool.jobs == []


def _place(constant: str) -> int:
    return (scale_kernel.parameters + scale_kernel.constants).index(constant)


def _constants(code: Lowered) -> set[tuple[str, Any]]:
    names = scale_kernel.parameters + scale_kernel.constants
    return {(names[at], value) for at, value in code.constants}
