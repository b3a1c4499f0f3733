"""The work of ``kalign tune``, done in a process that may die.

A candidate that aborts, hangs or faults the device takes the worker along and nothing else: what it was at stands in
the black box, a new worker goes on with the same kernel without that candidate, and what was decided before is on disk.
Where several candidates had been launched since the device was last well, the kernel is tuned again by a worker that
waits for every launch, so that the next death has one suspect. Nothing here touches a device or imports torch.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kalign_core.cli.tuning import NOT_TUNABLE, UNTRIED, Plan, Request, Row
from kalign_core.cli.view import View
from kalign_core.errors import KalignError
from kalign_core.tuner.child import Child
from kalign_core.tuner.failures import short_of_memory
from kalign_core.tuner.watch import BlackBox, Overdue, Suspect

COMMAND = (sys.executable, "-P", "-m", "kalign_core.cli.tune_worker")
PLAN_DEADLINE_S = 300.0
MOST_FALLEN = 16
MOST_UNEXPLAINED = 2
BUDGET_GRACE_S = 5.0
BUDGET_GRACE_SHARE = 0.05
# What a device says of itself and not of what it ran.
_HARDWARE = ("ecc", "nvlink", "fallen off the bus")


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended. ``transient`` where the moment may be to blame, ``suspects`` what it had launched, ``asked``
    the plugin and the hook that it was waiting for, if for any."""

    reason: str
    transient: bool
    suspects: tuple[Suspect, ...]
    asked: Suspect | None = None

    @property
    def fault(self) -> str:
        """Whose fault it was, where that was a plugin's, and what to type; else an empty string."""
        if self.asked is None:
            return ""
        plugin, hook = self.asked
        return f"plugin {plugin!r} in {hook}: {self.reason}; without it: export KALIGN_DISABLE_PLUGINS={plugin}"


class BudgetSpent(TimeoutError):
    """The budget, and what it may be overrun by, is spent."""


@dataclass
class Going:
    """How far one piece of work is: its kernels that are ``done``, and what befell the one under way."""

    done: int = 0
    kernel: Row = field(default_factory=dict)
    reference: str = ""
    careful: bool = False
    unexplained: int = 0
    fallen: dict[Suspect, Row] = field(default_factory=dict)

    def next_kernel(self) -> None:
        """The kernel under way is done."""
        self.done += 1
        self.kernel, self.careful, self.unexplained = {}, False, 0

    def judge(self, death: Death) -> str:
        """Take the consequences of ``death``; gives why the kernel under way is given up, or nothing."""
        if death.fault:
            return death.fault
        guilty = [s for s in death.suspects if s != (self.kernel.get("kernel"), self.reference)]
        if death.suspects and not guilty:
            return f"its reference launch: {death.reason}"
        if not guilty:
            self.unexplained += 1
            self.careful = True
            return f"its worker died twice: {death.reason}" if self.unexplained >= MOST_UNEXPLAINED else ""
        if len(guilty) > 1 and not self.careful:
            self.careful = True
            return ""
        for kernel, config in guilty:
            self.fallen[kernel, config] = {"kernel": kernel, "config": config, "reason": death.reason,
                                           "transient": death.transient or len(guilty) > 1}  # fmt: skip
        return f"{len(self.fallen)} of its candidates ended their process" if len(self.fallen) >= MOST_FALLEN else ""


class Isolated:
    """Tunes in a worker process, started when first needed and again after each death."""

    def __init__(self, request: Request, view: View) -> None:
        self._request, self._view = request, view
        self._folder = tempfile.TemporaryDirectory(prefix="kalign-")
        self._path = Path(self._folder.name) / "box"
        self._box = BlackBox.made(self._path)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._child = Child(COMMAND, environment, noun="the worker")
        self._labels: list[str] = []

    def plan(self) -> Plan:
        """What to do; raises ``KalignError`` for a request that cannot be met, or where no worker can be had."""
        try:
            answer = self._started()
        except (TimeoutError, ChildProcessError) as error:
            raise self._hopeless(error) from error
        self._labels = answer["labels"]
        return Plan(self._labels, answer["platform"], answer["file"])

    def tune(self, number: int, budget_s: float = math.inf) -> Iterator[Row]:
        """Tune the kernels of one piece of work, whatever becomes of workers; a row for each."""
        going, end = Going(), time.monotonic() + budget_s
        while True:
            try:
                yield from self._attempt(number, going, end)
                return
            except BudgetSpent:
                if going.kernel:
                    yield {
                        **going.kernel,
                        "how": UNTRIED,
                        "reason": "the budget is spent, in the middle of this kernel",
                    }
                return
            except (TimeoutError, ChildProcessError) as error:
                given_up = going.judge(self._death(error))
            if given_up and not going.kernel:  # before it came to a kernel: nothing of this work can be done
                yield {"kernel": self._labels[number], "how": NOT_TUNABLE, "reason": given_up}
                return
            if given_up:
                yield {**going.kernel, "how": NOT_TUNABLE, "reason": given_up}
                going.next_kernel()

    def close(self) -> bool:
        """End the worker. What it decided is on disk since it said so."""
        self._child.close()
        self._box.close()
        self._folder.cleanup()
        return True

    # --- one worker -----------------------------------------------------------------------------------------------

    def _started(self) -> dict[str, Any]:
        """Start a worker and give its plan; raises as ``Child.ask``, ``KalignError`` where it says what is wrong."""
        self._box.write((), 0.0)
        asked = {"request": asdict(self._request), "box": str(self._path)}
        message = self._child.ask(asked, PLAN_DEADLINE_S)
        while message.get("at") != "done":
            self._hear(message, Going())
            message = self._child.listen(PLAN_DEADLINE_S)
        if "error" in message:
            raise _told(message)
        return message

    def _attempt(self, number: int, going: Going, end: float) -> Iterator[Row]:
        """Have a worker go on with one piece of work; raises ``TimeoutError`` or ``ChildProcessError`` at its death."""
        if self._child.pid is None:
            self._started()
        left_s = end - time.monotonic()
        asked = {"number": number, "skip": going.done, "careful": going.careful, "fallen": list(going.fallen.values()),
                 "budget_s": None if math.isinf(left_s) else max(left_s, 0.0)}  # fmt: skip
        overdue = Overdue(self._box)

        def watch() -> None:
            overdue()
            if time.monotonic() > end + max(BUDGET_GRACE_S, BUDGET_GRACE_SHARE * left_s):
                raise BudgetSpent

        message = self._child.ask(asked, math.inf, watch)
        while message.get("at") != "done":
            if message["at"] == "row":
                going.next_kernel()
                yield message["row"]
            else:
                self._hear(message, going)
            overdue.alive()
            message = self._child.listen(math.inf, watch)
        if "error" in message:
            raise _told(message)

    def _hear(self, message: dict[str, Any], going: Going) -> None:
        """Take in one line of an answer."""
        at = message.get("at")
        if at == "kernel":
            going.kernel, going.reference = message["begun"], message["reference"]
            self._view.kernel(message["begun"], message["reference"])
        elif at == "progress":
            self._view.progress(message["what"], message["done"], message["total"])
        elif at == "note":
            self._view.note(message["text"])
        elif at == "lost":
            self._child.close()
            raise ChildProcessError(0, message["reason"])
        else:
            self._child.close()
            raise ChildProcessError(0, f"the worker said {str(message)[:80]}")

    def _death(self, error: TimeoutError | ChildProcessError) -> Death:
        reason = str(error.strerror or error) or "no answer in time"
        flight = self._box.read()
        # The system kills for want of memory with SIGKILL.
        was_killed = isinstance(error, ChildProcessError) and error.errno == -signal.SIGKILL
        is_hardware = any(word in reason.lower() for word in _HARDWARE)
        self._view.note(f"the worker is started anew: {reason}")
        is_passing = was_killed or is_hardware or short_of_memory(reason)
        return Death(reason, is_passing, flight.suspects, flight.asked)

    def _hopeless(self, error: TimeoutError | ChildProcessError) -> KalignError:
        reason = str(error.strerror or error or "no answer in time")
        fault = Death(reason, False, (), self._box.read().asked).fault
        return KalignError(
            f"the process that tunes did not come to its work: {fault or reason}",
            why="candidates are tried in a process of their own, which may be lost",
            fix="kalign tune --in-process shows where it ends",
        )


def _told(message: dict[str, Any]) -> KalignError:
    """The error that a worker told of."""
    error = KalignError(message["error"])
    error.exit_code = message["exit_code"]
    return error
