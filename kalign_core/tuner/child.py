"""One process that answers a JSON line with JSON lines, and can be killed with all that it started.

It leads a process group of its own, so that neither Ctrl-C nor a compiler's own children get in the way: the group is
killed as a whole. Its standard error goes to a file that nobody reads unless it dies, for what it said last. The group
is always killed before its leader is reaped, because only until then is its number certain to be nobody else's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

START_SECONDS = 120.0
_LAST_WORDS_BYTES = 8192
_LAST_WORDS_LENGTH = 160
_ENDING_SECONDS = 10.0
_DYING_SECONDS = 60.0
_LOOK_SECONDS = 0.2


class Child:
    """One such process, started when first asked. One thread asks; any thread may ``interrupt``.

    ``noun`` is what it is called in reasons.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], noun: str = "the compiler") -> None:
        self._command, self._environment, self._noun = list(command), dict(environment), noun
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._said = 0
        self._buffer = b""
        self._interrupted = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """Its process id, which is also its group's, or None where it does not run."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it, if it does not run, and wait until it is ready; raises as ``ask`` does."""
        if self._process is not None:
            return
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._said, self._buffer = 0, b""
        try:
            process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise ChildProcessError(0, f"{self._noun}'s process did not start: {error}") from error
        with self._lock:
            self._process = process
        self._exchange(None, START_SECONDS)

    def ask(
        self, message: Mapping[str, Any], deadline_s: float, watch: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Send ``message`` and give the answer, or the first line of it.

        Raises ``TimeoutError`` where none comes within ``deadline_s`` seconds, and ``ChildProcessError`` (its exit
        status, a reason in words) where the process dies or answers anything but a JSON object. It is dead after both.
        ``watch`` is called a few times a second meanwhile; a ``TimeoutError`` that it raises kills the process.
        """
        self.start()
        return self._exchange(json.dumps(message).encode() + b"\n", deadline_s, watch)

    def listen(self, deadline_s: float, watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The next line of an answer that has several; raises as ``ask`` does."""
        return self._exchange(None, deadline_s, watch)

    def interrupt(self) -> None:
        """Kill it for good, from any thread; who is asking it gets ``ChildProcessError``."""
        with self._lock:
            self._interrupted = True
            if self._process is not None:
                _kill_group(self._process.pid)

    def close(self) -> None:
        """Kill it and everything it started, and free what it used; it may be asked again."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _kill_group(process.pid)
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a killed process back
            process.wait(_DYING_SECONDS)
        for stream in (process.stdin, process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what it was last sent need not arrive
                    stream.close()

    # --- talking --------------------------------------------------------------------------------------------------

    def _exchange(
        self, line: bytes | None, deadline_s: float, watch: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        if self._interrupted:
            self.close()
            raise ChildProcessError(0, f"{self._noun}'s process was interrupted")
        try:
            return self._answer(line, deadline_s, watch)
        except TimeoutError:
            self.close()
            raise
        except (OSError, EOFError, ValueError) as error:
            status = self._status(0.0 if isinstance(error, ValueError) else _ENDING_SECONDS)
            reason = _reason(self._noun, status, error, self._last_words())
            self.close()
            raise ChildProcessError(status or 0, reason) from error
        except BaseException:  # Ctrl-C while it works: nobody will read its answer
            self.close()
            raise

    def _answer(self, line: bytes | None, deadline_s: float, watch: Callable[[], None]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EOFError("it is not running")
        if line is not None:
            if self._errors is not None:
                self._said = os.fstat(self._errors.fileno()).st_size
            process.stdin.write(line)
            process.stdin.flush()
        answer = json.loads(self._line(process.stdout.fileno(), deadline_s, watch))
        if not isinstance(answer, dict):
            raise ValueError(f"{answer!r} is no object")
        return answer

    def _line(self, stream: int, deadline_s: float, watch: Callable[[], None]) -> bytes:
        end = time.monotonic() + deadline_s
        ready = select.poll()  # unlike select.select, it takes descriptors past 1024
        ready.register(stream, select.POLLIN)
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if not ready.poll(max(0.0, min(left, _LOOK_SECONDS)) * 1000):
                if left <= 0:
                    raise TimeoutError
                if self._status(0.0) is not None:  # something it started may hold its standard output open
                    raise EOFError("it ended without an answer")
                watch()
                continue
            data = os.read(stream, 65536)
            if not data:
                raise EOFError("it closed its standard output")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    # --- after its death ------------------------------------------------------------------------------------------

    def _status(self, patience_s: float) -> int | None:
        """Its exit status, negative for a signal, without reaping it; None where it lives on after ``patience_s``."""
        if self._process is None:
            return None
        end = time.monotonic() + patience_s
        while True:
            try:
                found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # this process ignores SIGCHLD: the system has reaped it
                return None
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            if time.monotonic() >= end:
                return None
            time.sleep(0.01)

    def _last_words(self) -> str:
        """The telling line of what it wrote to standard error since it was last asked."""
        if self._errors is None or self._errors.closed:
            return ""
        descriptor = self._errors.fileno()
        start = max(self._said, os.fstat(descriptor).st_size - _LAST_WORDS_BYTES)
        text = os.pread(descriptor, _LAST_WORDS_BYTES, start).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if any(word in line.lower() for word in ("error", "assert", "fatal"))]
        return (telling[:1] or lines[-1:] or [""])[0][:_LAST_WORDS_LENGTH]


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, or all that is left is a zombie
        os.killpg(leader, signal.SIGKILL)


def _reason(noun: str, status: int | None, error: Exception, last_words: str) -> str:
    if status is None:
        return f"{noun}'s answer could not be read ({error})"[:_LAST_WORDS_LENGTH]
    end = f"ended with status {status}"
    if status < 0:
        known = {int(number): number.name for number in signal.Signals}
        end = f"died of {known.get(-status, f'signal {-status}')}"
    return f"{noun} {end}" + (f": {last_words}" if last_words else "")
