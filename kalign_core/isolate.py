"""Call somebody else's function so that nothing it does gets past us but its value.

Plugins may raise anything, SystemExit included, and may print, which would spoil the data that commands write to
stdout. This is the one place that catches everything; KeyboardInterrupt alone passes. Only what the calling thread
writes is held back, and leaving out of order is harmless, because other threads go on printing while a plugin loads.
Imports nothing but the standard library.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

REASON_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: its value, or the error it raised; what it printed to stdout; the seconds it took."""

    value: Any
    error: BaseException | None = None
    printed: str = ""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The error in one short line, empty where there was none."""
        return "" if self.error is None else reason_of(self.error)

    @property
    def traceback(self) -> str:
        """The error with its traceback, and what was printed before it."""
        if self.error is None:
            return ""
        text = "".join(traceback.format_exception(self.error))
        return f"{text}\nprinted to stdout:\n{self.printed}" if self.printed else text


def attempt(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Outcome:
    """Call ``function`` and give what came of it; raises nothing but KeyboardInterrupt."""
    started = time.monotonic()
    with _Held() as held:
        try:
            value = function(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # a foreign SystemExit is its author's fault, not our end
            return Outcome(None, error, held.text, time.monotonic() - started)
    return Outcome(value, None, held.text, time.monotonic() - started)


def reason_of(error: BaseException) -> str:
    """Type and first line of ``error``, cut to ``REASON_LENGTH`` characters; the message alone for our own errors."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # an error whose message cannot be printed must still be reported
        text = "(its message cannot be printed)"
    line = text.strip().splitlines()[0] if text.strip() else ""
    if not type(error).__module__.startswith("kalign_core."):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 3] + "..."


class _Held:
    """stdout while a plugin runs: keeps what its own thread writes, passes on everything else.

    After it has been left it passes on everything, so that one which another thread's has been stacked upon may stay
    in ``sys.stdout`` without losing a line.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._thread: int | None = threading.get_ident()
        self._below: Any = None

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def __enter__(self) -> _Held:
        self._below, sys.stdout = sys.stdout, self
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread = None
        if sys.stdout is self:
            sys.stdout = self._below

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return int(self._below.write(text))
        self._parts.append(text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)
