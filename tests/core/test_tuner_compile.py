"""Compiling in processes that may do anything: each misdeed costs one candidate, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kalign_core.declare import Lowered
from kalign_core.tuner.child import Child
from kalign_core.tuner.compile import Compiled, CompilePool

FAKE = [sys.executable, "-S", str(Path(__file__).with_name("fake_worker.py"))]
TARGET = ("fake", 1, 32)
LONG = 120.0


def job(kernel: str) -> Lowered:
    return Lowered(kernel, "module:name", (), (), (), ())


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(holds: Callable[[], bool], limit_s: float = LONG) -> bool:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """The ids of every process that fake workers were or started, so far."""
    path = tmp_path / "pids"
    path.touch()
    monkeypatch.setenv("FAKE_WORKER_PIDS", str(path))
    return lambda: [int(line) for line in path.read_text().split()]


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    made = CompilePool(1, FAKE)
    yield made
    made.close()


def compiled(pool: CompilePool, *kernels: str) -> list[Compiled]:
    found = dict(pool.compile([job(kernel) for kernel in kernels], TARGET, LONG))
    return [found[position] for position in range(len(kernels))]


MISDEEDS = {
    "abort": "the compiler died of SIGABRT: LLVM ERROR: no layout for this tile",
    "segfault": "the compiler died of SIGSEGV",
    "killed": "the compiler died of SIGKILL",
    "exit": "the compiler ended with status 3",
    "half": "the compiler ended with status 0",
    "sleep": "timeout at 120 s",
    "stubborn": "timeout at 120 s",
    "grandchild": "timeout at 120 s",
    "grandchild, then abort": "the compiler died of SIGABRT",
    "garbage": "the compiler's answer could not be read (Expecting value: line 1 column 1 (char 0))",
    "list": "the compiler's answer could not be read ([1, 2] is no object)",
    "unknown field": "the compiler answered {'hash': 'x', 'speed': 1}",
    "fails": "PTXASError: register allocation failed",
}


@pytest.mark.usefixtures("standstill")
@pytest.mark.parametrize("misdeed", sorted(MISDEEDS))
def test_a_misdeed_costs_one_candidate(pool: CompilePool, misdeed: str) -> None:
    """Whatever a compile process does is a short reason for its candidate, and the next one compiles."""
    (bad,) = compiled(pool, misdeed)
    (good,) = compiled(pool, "fine")
    assert bad.failure == MISDEEDS[misdeed]
    assert (good.failure, good.hash) == ("", "hash of [[], []]")


@pytest.mark.usefixtures("standstill")
def test_what_a_misdeed_started_dies_with_it(pool: CompilePool, pids: Callable[[], list[int]]) -> None:
    """A process that is given up is killed with its whole group, signals ignored or not."""
    compiled(pool, "grandchild", "stubborn")
    compiled(pool, "grandchild, then abort", "garbage", "list", "unknown field")
    left = pids()
    assert len(left) == 8  # six workers and two grandchildren
    assert wait_until(lambda: not any(map(alive, left)))


@pytest.mark.usefixtures("standstill")
def test_a_late_answer_is_nobody_elses(pool: CompilePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the deadline is not taken for the answer to the next job."""
    monkeypatch.setenv("FAKE_WORKER_GO", str(tmp_path / "go"))
    (late,) = compiled(pool, "late")
    (tmp_path / "go").touch()
    first, second = compiled(pool, "code of the first", "code of the second")
    assert [late.hash, first.code, second.code] == ["", "code of the first", "code of the second"]


@pytest.mark.usefixtures("standstill")
@pytest.mark.parametrize(
    ("what", "transient"), [("sleep", True), ("killed", True), ("abort", False), ("garbage", False), ("fails", False)]
)
def test_faults_of_the_moment_are_marked(pool: CompilePool, what: str, transient: bool) -> None:
    """A deadline and a kill for want of memory say nothing of the candidate; a crash of the compiler does."""
    (result,) = compiled(pool, what)
    assert result.transient is transient


def test_a_worker_is_kept(pool: CompilePool, pids: Callable[[], list[int]]) -> None:
    """The start of a process is paid once: the same one answers job after job, batch after batch."""
    numbers = {result.num_warps for result in [*compiled(pool, "a", "b"), *compiled(pool, "c")]}
    assert numbers == set(pids())
    assert len(numbers) == 1


@pytest.mark.parametrize("name", ["TRITON_DEFAULT_FP_FUSION", "TRITON_CACHE_DIR", "PYTHONPATH"])
def test_workers_follow_the_environment(
    pool: CompilePool, pids: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After a variable or the module path changed another process compiles, and the one before is gone."""
    with pool.start([job("before")], TARGET, LONG) as compiling:
        assert len(list(compiling.results())) == 1
        if name == "PYTHONPATH":
            monkeypatch.syspath_prepend("/somewhere/else")
        else:
            monkeypatch.setenv(name, "changed")
        (during,) = compiled(pool, "during")
    (after,) = compiled(pool, "after")
    assert (len(pids()), after.num_warps) == (2, during.num_warps)
    assert wait_until(lambda: not alive(pids()[0]))


def test_a_worker_given_back_while_others_are_replaced_compiles_no_more(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another thread is done with just then is of the variables before, and ends with the others."""
    with pool.start([job("before")], TARGET, LONG) as before:
        assert len(list(before.results())) == 1
    close, late, ended = Child.close, Child(FAKE, {}), list[Child]()

    def closing(child: Child) -> None:
        close(child)
        ended.append(child)
        if child is not late:
            before.given_back([late])

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    with monkeypatch.context() as during:
        during.setattr(Child, "close", closing)
        after = pool.start([job("after")], TARGET, LONG)
    assert (late in after.children, late in ended) == (False, True)


def test_workers_end_with_their_pool(pids: Callable[[], list[int]]) -> None:
    """Closing the pool leaves no process."""
    pool = CompilePool(2, FAKE)
    compiled(pool, "a", "b", "c")
    started = pids()
    pool.close()
    assert started
    assert not any(map(alive, started))


def test_no_more_workers_than_asked(pids: Callable[[], list[int]]) -> None:
    """``jobs`` is how many processes compile side by side."""
    pool = CompilePool(2, FAKE)
    compiled(pool, *"abcdef")
    pool.close()
    assert 1 <= len(pids()) <= 2


def test_leaving_early_kills_what_compiles(pool: CompilePool, pids: Callable[[], list[int]]) -> None:
    """Leaving the block ends the jobs that are running and starts none that waits."""
    with pool.start([job("sleep"), job("sleep")], TARGET, LONG):
        assert wait_until(lambda: len(pids()) == 1)
    assert not any(map(alive, pids()))
    assert len(pids()) == 1


def test_leaving_at_once_leaves_nobody(pool: CompilePool, pids: Callable[[], list[int]]) -> None:
    """A block that is left while its processes are being started leaves none of them."""
    for _ in range(5):
        with pool.start([job("sleep")], TARGET, LONG):
            pass
    assert not any(map(alive, pids()))


def test_a_batch_ends_when_time_is_up(pool: CompilePool, pids: Callable[[], list[int]]) -> None:
    """With no time left the results so far are all there are, and the rest is killed."""
    left = iter([LONG, 0.2])
    with pool.start([job("fine"), job("sleep"), job("fine")], TARGET, LONG) as compiling:
        positions = [position for position, _ in compiling.results(lambda: next(left))]
    assert positions == [0]
    assert not any(map(alive, pids()))


def test_a_worker_that_cannot_start_is_not_waited_for_again(
    pool: CompilePool, pids: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the process itself does not start, every candidate says so and one start was tried."""
    monkeypatch.setenv("FAKE_WORKER_START", "dies")
    results = compiled(pool, "a", "b", "c")
    reason = "no compile process: the compiler ended with status 1: ModuleNotFoundError: No module named 'triton'"
    assert [(result.failure, result.transient) for result in results] == [(reason, True)] * 3
    assert len(pids()) == 1


def test_a_command_that_does_not_exist_is_no_error() -> None:
    """Where no process can be made at all the candidates fail with the system's reason."""
    (result,) = compiled(CompilePool(1, ["/nonexistent/python"]), "a")
    assert result.failure.startswith("no compile process: the compiler's process did not start: [Errno 2]")


def test_what_cannot_be_sent_costs_its_candidate(pool: CompilePool) -> None:
    """A constant that is no plain value is that candidate's failure and the worker's next job is another."""
    odd = Lowered("odd", "module:name", (), ((0, object()),), (), ())
    found = dict(pool.compile([odd, job("fine")], TARGET, LONG))
    assert found[0].failure.startswith("cannot be sent to a compile process: Object of type object")
    assert found[1].failure == ""


def test_threads_share_a_pool() -> None:
    """Two threads that compile at once get their own answers."""
    pool = CompilePool(2, FAKE)
    found: dict[str, list[str]] = {}

    def compile_all(name: str) -> None:
        found[name] = [result.code for result in compiled(pool, *(f"code {name} {n}" for n in range(5)))]

    threads = [threading.Thread(target=compile_all, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert found == {name: [f"code {name} {n}" for n in range(5)] for name in "ab"}


def test_a_fork_leaves_the_parents_workers(pids: Callable[[], list[int]]) -> None:
    """Closing an inherited pool in a child of fork kills nobody."""
    pool = CompilePool(1, FAKE)
    compiled(pool, "a")
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert all(map(alive, pids()))
    pool.close()


INTERRUPTED = """
import sys
from kalign_core.declare import Lowered
from kalign_core.tuner.compile import CompilePool
pool = CompilePool(2, {command!r})
jobs = [Lowered(what, "m:n", (), (), (), ()) for what in ("fine", "grandchild", "sleep", "sleep")]
try:
    for position, result in pool.compile(jobs, ("fake", 1, 32), 60.0):
        print(position, flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def spawn(code: str) -> int:
    """Run ``code`` in a process of its own; gives its id."""
    return os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)


def started(pids: Callable[[], list[int]], count: int) -> list[int]:
    assert wait_until(lambda: len(pids()) == count)
    return pids()


def test_ctrl_c_leaves_no_orphans(pids: Callable[[], list[int]]) -> None:
    """An interrupt half-way ends everything that was compiling."""
    parent = spawn(INTERRUPTED.format(command=FAKE))
    left = started(pids, 3)  # two workers and a grandchild
    os.kill(parent, signal.SIGINT)
    _, status = os.waitpid(parent, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert wait_until(lambda: not any(map(alive, left)))


def test_workers_do_not_outlive_a_killed_parent(pids: Callable[[], list[int]]) -> None:
    """A worker whose parent dies without a word ends as soon as it has nothing to do."""
    code = INTERRUPTED.format(command=FAKE).replace('"fine", "grandchild", "sleep", "sleep"', '"fine",')
    parent = spawn(f"{code}\nimport time; time.sleep(3600)")
    (worker,) = started(pids, 1)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert wait_until(lambda: not alive(worker))
