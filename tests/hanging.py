"""A call into a driver that does not return, and threads that lose patience with it: once it hangs, and not before."""

from __future__ import annotations

import threading
from typing import Any


class Hanging:
    """A function that does not return until ``release``; ``started`` are the threads that were started meanwhile."""

    def __init__(self) -> None:
        self._hangs, self._gate = threading.Event(), threading.Event()
        self.started: list[threading.Thread] = []

    def __call__(self, *args: Any) -> None:
        self._hangs.set()
        self._gate.wait()

    def release(self) -> None:
        """Have it return, and wait for whoever had called it."""
        self._gate.set()
        for thread in self.started:
            threading.Thread.join(thread)

    def threads(self) -> type[threading.Thread]:
        """Stands for ``threading.Thread``: waiting with a deadline is over when the function hangs."""
        here = self

        class Impatient(threading.Thread):
            def start(self) -> None:
                here.started.append(self)
                super().start()

            def join(self, timeout: float | None = None) -> None:
                here._hangs.wait()

        return Impatient
