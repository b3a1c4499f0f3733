"""Compile candidates in killable processes with a deadline each.

Workers stay for the life of a session, so that their start is paid once. One that aborts, hangs or dies costs the
candidate it held; its whole process group is killed and a new one started. Kernels that a fresh process cannot import
(``__main__``, notebooks, closures) are not compiled here: the caller compiles them in its own process and says so.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial

from kalign_core.declare import Lowered
from kalign_core.isolate import reason_of
from kalign_core.tuner.child import Child
from kalign_core.tuner.failures import Failures

Target = tuple[str, int | str, int]
MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a worker says of one candidate: ``failure`` in words, or digests and resources of its code.

    ``transient`` marks a failure that says nothing of the candidate, ``deadly`` one that cost the worker its life, and
    ``unimportable`` one because the kernel's module cannot be imported in a process of its own.
    """

    failure: str = ""
    transient: bool = False
    deadly: bool = False
    unimportable: bool = False
    hash: str = ""
    code: str = ""
    shared_bytes: int = 0
    num_warps: int = 0
    global_scratch_bytes: int = 0
    tmem_columns: int = 0
    registers: int = 0
    spills: int = 0
    compile_s: float = 0.0


_ANSWERED = frozenset(f.name for f in fields(Compiled)) - {"compile_s", "deadly"}


def compile_in(child: Child, lowered: Lowered, target: Target, deadline_s: float) -> Compiled:
    """Compile one candidate in ``child``; every way to fail becomes a ``Compiled`` with a failure."""
    started = time.monotonic()

    def failed(reason: str, *, transient: bool = False, deadly: bool = True) -> Compiled:
        return Compiled(reason, transient, deadly, compile_s=time.monotonic() - started)

    try:
        answer = child.ask({**asdict(lowered), "target": target}, deadline_s)
    except TimeoutError:
        return failed(f"timeout at {deadline_s:g} s", transient=True)
    except ChildProcessError as error:
        # The kernel kills for want of memory with SIGKILL; everything else is what the candidate did to its compiler.
        return failed(str(error.strerror), transient=error.errno == -signal.SIGKILL)
    except TypeError as error:
        return failed(f"cannot be sent to a compile process: {error}", deadly=False)
    if not answer.keys() <= _ANSWERED:
        child.close()
        return failed(f"the compiler answered {str(answer)[:80]}")
    return Compiled(**answer, compile_s=time.monotonic() - started)


@dataclass
class Compiling:
    """Candidates being compiled side by side. Leaving the block kills what is not done by then.

    ``children`` are this batch's alone; ``given_back`` takes those that may serve another.
    """

    jobs: Sequence[Lowered]
    target: Target
    deadline_s: float
    children: Sequence[Child]
    given_back: Callable[[Iterable[Child]], None]
    _waiting: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    _done: queue.SimpleQueue[tuple[int, Compiled]] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _hopeless: str = ""

    def __enter__(self) -> Compiling:
        for position in range(len(self.jobs)):
            self._waiting.put(position)
        self._threads = [threading.Thread(target=self._serve, args=(c,), daemon=True) for c in self.children]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Kill what is still compiling and wait for the threads, so that nothing outlives the block."""
        self._take_all()
        busy = [thread for thread in self._threads if thread.is_alive()]
        if busy:
            for child in self.children:
                child.interrupt()
        for thread in busy:
            thread.join()
        for child in self.children if busy else ():
            child.close()
        self.given_back(() if busy else self.children)

    def results(self, left_s: Callable[[], float] = lambda: math.inf) -> Iterator[tuple[int, Compiled]]:
        """Give (position, result) as each is done, for as long as ``left_s()`` seconds are left."""
        for _ in self.jobs:
            left = left_s()
            try:
                yield self._done.get(timeout=None if math.isinf(left) else max(0.0, left))
            except queue.Empty:
                return

    def _serve(self, child: Child) -> None:
        while True:
            try:
                position = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._done.put((position, self._compile(child, position)))

    def _compile(self, child: Child, position: int) -> Compiled:
        try:
            if not self._hopeless:
                child.start()
        except (TimeoutError, ChildProcessError) as error:
            self._hopeless = f"no compile process: {error.strerror or 'it was not ready in time'}"
        if self._hopeless:  # what does not start once is not waited for a hundred times
            return Compiled(failure=self._hopeless, transient=True)
        try:
            return compile_in(child, self.jobs[position], self.target, self.deadline_s)
        except Exception as error:  # noqa: BLE001  # a result that never comes would be waited for without end
            return Compiled(failure=reason_of(error), transient=True)

    def _take_all(self) -> None:
        while True:
            try:
                self._waiting.get_nowait()
            except queue.Empty:
                return


class CompilePool:
    """Up to ``jobs`` workers, started when first needed and kept; ``close`` ends them.

    They are started anew once this process's variables or module path are others: what they compile is to be what this
    process would.
    ``failures`` remembers the candidates that are known to fail, for as long as the pool lives. Threads may share it.
    """

    def __init__(self, jobs: int | None = None, command: list[str] | None = None) -> None:
        self._jobs = jobs or min(MOST_WORKERS, _cores())
        self._command = command or [sys.executable, "-P", "-m", "kalign_core.tuner.worker"]
        self._idle: list[Child] = []
        self._environment: dict[str, str] = {}
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self.failures = Failures()

    def start(self, jobs: Sequence[Lowered], target: Target, deadline_s: float) -> Compiling:
        """Compile ``jobs`` for ``target``, ``deadline_s`` seconds each at most; to be used in a ``with``."""
        count, environment = min(self._jobs, len(jobs)), _environment()
        with self._lock:
            outdated = [] if environment == self._environment else self._idle
            usable = [] if outdated else self._idle
            self._environment = environment
            children, self._idle = usable[:count], usable[count:]
        self._end(outdated)
        children += [Child(self._command, environment) for _ in range(count - len(children))]
        return Compiling(jobs, target, deadline_s, children, partial(self._give_back, environment))

    def compile(self, jobs: Iterable[Lowered], target: Target, deadline_s: float) -> Iterator[tuple[int, Compiled]]:
        """Compile ``jobs`` side by side; gives (position, result) as each is done. Leaving early kills the rest."""
        with self.start(list(jobs), target, deadline_s) as compiling:
            yield from compiling.results()

    def close(self) -> None:
        """End every worker; those a parent process started are not ours to end after a fork."""
        with self._lock:
            idle, self._idle = self._idle, []
        self._end(idle)

    def _end(self, idle: Iterable[Child]) -> None:
        if self._owner == os.getpid():
            for child in idle:
                child.close()

    def _give_back(self, environment: dict[str, str], children: Iterable[Child]) -> None:
        with self._lock:
            if environment == self._environment:
                self._idle += children
                return
        for child in children:
            child.close()


def _cores() -> int:
    """Cores this process may run on, where the system says so."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _environment() -> dict[str, str]:
    """Ours, so that children find what we import, but compiling where we may interpret."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return found
