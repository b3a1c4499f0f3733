"""The process that ``kalign tune`` can lose: it owns the device, tunes what it is told to, and says how it goes.

Reads requests as JSON lines from standard input and answers each with JSON lines, of which the last has ``at: done``.
It writes down every launch in a black box (``tuner/watch.py``), so that the command knows what it was at when it hangs
or dies, and ends itself when the device is lost. Everything else that goes wrong is an answer.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from kalign_core.cli.tuning import InProcess, Request, Row
from kalign_core.errors import DeviceLost, KalignError
from kalign_core.records import Config
from kalign_core.tuner.worker import die_with, say


def main() -> None:
    """Answer requests until standard input closes or the parent is gone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a plugin or a driver prints must not get between the answers
    die_with_parent()
    voice = Voice(answers)
    logging.getLogger("kalign").addHandler(voice.handler())
    say(answers, {})
    worker: Worker | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if worker is None:
                worker = Worker(asked, voice)
                voice.tell("done", **worker.plan())
            else:
                worker.tune(asked)
                voice.tell("done")
        except DeviceLost as error:
            voice.tell("lost", reason=error.what)
            os._exit(1)  # a device that is lost takes orderly ends along too
        except KalignError as error:
            voice.tell("done", error=str(error), exit_code=error.exit_code)


def die_with_parent() -> None:
    """End with the parent, at once where the system does that, else when somebody looks."""
    parent = os.getppid()
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; a device that hangs keeps threads from looking
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


class Voice:
    """Tells the parent, a line at a time; from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def tell(self, at: str, **said: Any) -> None:
        """One line."""
        with self._lock:
            say(self._stream, {"at": at, **said})

    def kernel(self, begun: Row, reference: str) -> None:
        """As ``Watcher.kernel``."""
        self.tell("kernel", begun=begun, reference=reference)

    def progress(self, what: str, done: int, total: int) -> None:
        """As ``Watcher.progress``."""
        self.tell("progress", what=what, done=done, total=total)

    def handler(self) -> logging.Handler:
        """What passes warnings on."""
        voice = self

        class Passing(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                voice.tell("note", text=record.getMessage())

        return Passing(logging.WARNING)


class Worker:
    """One session on a platform that is watched."""

    def __init__(self, asked: dict[str, Any], voice: Voice) -> None:
        from kalign_core import hal
        from kalign_core.session import Session
        from kalign_core.tuner.report import effort_named
        from kalign_core.tuner.watch import BlackBox, WatchedPlatform

        request = Request(**asked["request"])
        compile_s = effort_named(request.effort).compile_deadline_s
        self._platform = WatchedPlatform(hal.platform, BlackBox(Path(asked["box"])), bind_s=compile_s)
        self._here = Session(platform=self._platform)
        self._here.plugins.asking = self._platform.asking
        self._voice = voice
        self._runner = InProcess(self._here, request, voice)

    def plan(self) -> dict[str, Any]:
        """What there is to do."""
        with self._here.active():
            return asdict(self._runner.plan())

    def tune(self, asked: dict[str, Any]) -> None:
        """Tune one piece of work as far as it is not done."""
        from kalign_core.tuner.failures import Fallen, Watched

        observer = self._here.observer
        fallen = {
            (f["kernel"], Config.parse(f["config"])): Fallen(f["reason"], f["transient"]) for f in asked["fallen"]
        }
        deadline_s = observer.effort.launch_deadline_s if observer.effort else 0.0
        observer.watched = Watched(deadline_s, fallen)
        self._platform.watch(deadline_s, careful=asked["careful"])
        budget_s = float("inf") if asked["budget_s"] is None else asked["budget_s"]
        with self._here.active():
            for row in self._runner.tune(asked["number"], budget_s, asked["skip"]):
                self._voice.tell("row", row=row)


if __name__ == "__main__":
    main()
