"""A thread that does a piece of work soon after it was asked for, and ends when nothing is left to do.

A decision has to be on disk within seconds of being made, and whoever made it is about to launch a kernel: it must
not wait long for a lock that another process holds, or for a network. The work begins at once; what is asked for
while it runs, and for a moment afterwards, is done together. Whoever asked may wait a moment for it with ``settle``.
Work that fails is tried again a few times, a second apart, then not until somebody asks again. No thread is there
while there is nothing to do, so that a fork rarely meets one, and none keeps the process from ending.

Knows nothing of stores and files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GATHER_S = 0.01
RETRY_S = 1.0
RETRIES = 10


class Writer:
    """Calls ``work`` in a daemon thread, one call at a time, after each ``wake``; ``work`` says whether it succeeded.

    ``gather_s`` is the least time between two calls, ``retry_s`` that before failed work is tried again, ``retries``
    times at most. A child of fork makes its own: the parent's thread is not there.
    """

    def __init__(self, gather_s: float = GATHER_S, retry_s: float = RETRY_S, retries: int = RETRIES) -> None:
        self._gather_s, self._retry_s, self._retries = gather_s, retry_s, retries
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)
        self._is_running = self._is_asked = False
        self._asked = self._done = 0

    def wake(self, work: Callable[[], bool]) -> bool:
        """Have ``work`` called from now on; False where no thread can be had, as at the end of the interpreter."""
        with self._lock:
            self._is_asked = True
            self._asked += 1
            if self._is_running:
                return True
            try:
                threading.Thread(target=self._run, args=(work,), name="kalign-cache-writer", daemon=True).start()
            except RuntimeError:
                return False
            self._is_running = True
            return True

    def settle(self, longest_s: float) -> bool:
        """Wait until what was asked for so far was tried, ``longest_s`` seconds at most; whether it was."""
        with self._ended:
            mine = self._asked
            return self._ended.wait_for(lambda: self._done >= mine or not self._is_running, longest_s)

    def _run(self, work: Callable[[], bool]) -> None:
        failures = 0
        try:
            while self._is_wanted(again=0 < failures <= self._retries):
                with self._lock:
                    asked = self._asked
                failures = 0 if work() else failures + 1
                with self._ended:
                    self._done = asked
                    self._ended.notify_all()
                time.sleep(self._retry_s if failures else self._gather_s)
        except BaseException:
            with self._lock:
                self._is_running = False
            raise

    def _is_wanted(self, *, again: bool) -> bool:
        """Whether there is work to do; if not, this thread is done, and the next ``wake`` makes another."""
        with self._lock:
            self._is_running = self._is_asked or again
            self._is_asked = False
            return self._is_running
