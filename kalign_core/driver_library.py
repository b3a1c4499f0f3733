"""Ask a vendor's management library so that nothing it does gets past us, whether it raises, hangs, prints or lies.

Such a library only enriches what torch says of a device, and drivers, containers and package versions each lack some of
it. So every call is guarded by itself, what cannot be read is nothing, and nothing raises. A library is initialised and
shut down per query, under a lock and with a deadline, and no handle is kept: handles survive neither a fork nor a lost
board. Vendors' identity modules share this; it knows none of them, and imports neither torch nor triton nor
``kalign_core.hal``, which would select a platform.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kalign_core.isolate import attempt

T = TypeVar("T")
Fields = tuple[tuple[str, str | int], ...]
log = logging.getLogger("kalign")

LIMIT_S = 2.0
UNKNOWN = "unknown"
LONGEST_NAME = 80


class Library:
    """One management library of a vendor.

    ``name`` is what readers know it by, ``load()`` gives its module, or None with the reason in words; ``start`` and
    ``stop`` are the names of its functions that initialise it and shut it down.
    """

    def __init__(self, name: str, load: Callable[[], tuple[Any, str]], start: str, stop: str) -> None:
        self.name, self._load, self._start, self._stop = name, load, start, stop
        self.limit_s = LIMIT_S
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def query(self, read: Callable[[Any], T], nothing: T, module: Any = None) -> T:
        """``read(module)`` between one initialise and one shut down; ``nothing`` where it fails or takes too long.

        ``module`` is the loaded library by default. One that hangs is left to its thread, said once, and not asked
        again while it hangs.
        """
        answer: list[T] = []
        if any(worker.is_alive() for worker in self._stuck):
            return nothing
        name = f"kalign-{self.name}"
        worker = threading.Thread(target=attempt, args=(self._ask, read, answer, module), name=name, daemon=True)
        if attempt(worker.start).error is not None:  # no thread to be had, as while the interpreter ends
            return nothing
        worker.join(self.limit_s)
        if worker.is_alive():
            self._stuck[:] = [worker]
            announce(f"{self.name} has not answered within {self.limit_s:g} s; going on without it")
            return nothing
        return answer[0] if answer else nothing

    def _ask(self, read: Callable[[Any], T], answer: list[T], module: Any) -> None:
        reason = ""
        if module is None:
            module, reason = self._load()
        if module is None:
            announce(reason)
            return
        if not self._lock.acquire(timeout=self.limit_s):
            return
        try:
            if attempt(lambda: getattr(module, self._start)()).error is None:
                outcome = attempt(read, module)
                answer.extend([outcome.value] if outcome.error is None else [])
                ask(module, self._stop)
        finally:
            self._lock.release()

    def _renew(self) -> None:
        """A child of fork has neither its parent's threads nor anybody who would release its lock."""
        self._lock = threading.Lock()
        self._stuck: list[threading.Thread] = []


@functools.cache
def announce(reason: str) -> None:
    """Warn of ``reason`` once per process."""
    log.warning("%s", reason)


def ask(module: Any, function: str, *args: Any) -> Any:
    """What ``function`` of the library answers, or None where it is missing or raises anything."""
    outcome = attempt(lambda: getattr(module, function)(*args))
    if outcome.error is not None:
        log.debug("%s: %s", function, outcome.reason)
    return outcome.value


def attribute(value: Any, name: str) -> Any:
    """The attribute ``name`` of something that may lack it or raise; None then."""
    return attempt(getattr, value, name, None).value


def number(value: Any) -> int | None:
    """``value`` where it is a sensible count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def text(value: object) -> str:
    """A name as one clean line of at most 80 characters; empty where it is absent, no text, or garbage.

    Drivers and packages disagree on bytes and text, pad with NUL, and have returned bytes that are no text at all.
    """
    if isinstance(value, (bytes, bytearray)):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return ""
    line = " ".join(value.split("\0", 1)[0].split())
    readable = line.isprintable() and "\ufffd" not in line
    return line[:LONGEST_NAME] if readable and line.lower() not in ("n/a", "none", UNKNOWN) else ""


def present(fields: Fields) -> Fields:
    """The fields that have a value."""
    return tuple((name, value) for name, value in fields if value)


def file_text(root: Path, path: str) -> str:
    """Text of a small file below ``root``, or an empty string."""
    outcome = attempt(lambda: (root / path.lstrip("/")).read_bytes())
    return outcome.value.decode("utf-8", "replace").strip() if outcome.error is None else ""


def pci_location(properties: Any) -> tuple[int, int, int] | None:
    """PCI domain, bus and device of torch's ``properties``, or None where torch does not say."""
    domain, bus, device = (
        number(attribute(properties, name)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    return None if domain is None or bus is None or device is None else (domain, bus, device)


def pci_device_id(root: Path, address: str) -> str:
    """Vendor and device of the PCI function at ``address`` (``0000:06:00.0``) as ``10de:2335``, or an empty string."""
    if not address:
        return ""
    folder = f"/sys/bus/pci/devices/{address}"
    parts = [file_text(root, f"{folder}/{name}").removeprefix("0x") for name in ("vendor", "device")]
    return ":".join(parts) if all(re.fullmatch(r"[0-9a-f]{4}", part) for part in parts) else ""


def foreign_processes(numbers: set[int] | None) -> int | None:
    """How many of the processes that a device lists are not ours, or None where that cannot be said.

    Inside a container the driver lists no process, or all of them under numbers of the host. Where our own number is
    missing one of the listed may be us, so that only the others are certainly foreign.
    """
    if numbers is None:
        return None
    if os.getpid() in numbers:
        return len(numbers) - 1
    return len(numbers) - 1 if len(numbers) > 1 else None
