"""Questions about a plugin that only a fresh process can answer: what loading it does, and who a device is there.

A process that ran a test has torch, triton and a driver loaded already, and every identity in memory. Here each
question is a function of this module, asked by name in a process that has imported nothing; what it does on the way is
written down by an audit hook. Imports the standard library and light parts of kalign, and nothing of ``hal`` at its
top: importing that selects a platform.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kalign_core.environment import Environment
from kalign_core.errors import UnknownName
from kalign_core.records import PlatformRecord, StoreRecord

# Nothing is expected to take long, and a machine may be slow and busy.
DEADLINE_S = 600.0
# What importing a plugin and probing must not bring in: a device library, or a choice of platform.
HEAVY = frozenset({"torch", "triton", "numpy", "kalign_core.hal"})
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty")
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "socket.connect"})


@functools.lru_cache(maxsize=64)
def ask(question: str, *arguments: str) -> Any:
    """What ``question``, a function of this module, gives for ``arguments`` in a fresh process; asked once.

    Raises ``RuntimeError`` with what the process wrote where it failed, and ``subprocess.TimeoutExpired`` where it
    did not end within ``DEADLINE_S``.
    """
    done = start(f"{__name__}", question, *arguments)
    ((out, err),) = ends([done])
    if done.returncode:
        raise RuntimeError(f"{question}({', '.join(arguments)}) failed in a fresh process:\n{err}")
    return json.loads(out.splitlines()[-1])


def start(module: str, question: str, *arguments: str) -> subprocess.Popen[str]:
    """A fresh process that calls ``module``'s function ``question`` with ``arguments`` and prints the answer."""
    code = f"import json; from {module} import {question}; print(json.dumps({question}{arguments!r}))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(  # noqa: S603  # this interpreter, and words of the suite's own
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """What each of ``processes``, which run side by side, wrote to its output and to its errors.

    Where one fails, or does not end within ``DEADLINE_S``, all are killed: the others may wait for it. The latter
    raises ``subprocess.TimeoutExpired``.
    """

    def end_of(process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=DEADLINE_S)
        finally:
            if process.returncode != 0:
                for one in processes:
                    one.kill()
                process.communicate()

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(end_of, processes))


def meet(folder: Path, processes: int) -> None:
    """Wait until as many ``processes`` as that wait in ``folder``; raises ``TimeoutError`` after ``DEADLINE_S``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + DEADLINE_S
    while len(os.listdir(folder)) < processes:
        if time.monotonic() > end:
            raise TimeoutError(f"{processes} processes were to meet in {folder}, and {os.listdir(folder)} came")
        time.sleep(0.005)


# --- questions ----------------------------------------------------------------------------------------------------


def loading(plugin: str) -> list[str]:
    """What importing the module ``plugin`` did that loading a plugin must not do."""
    done = _watch()
    importlib.import_module(plugin)
    return [*done, *_imported()]


def probing(plugin: str, name: str) -> dict[str, Any]:
    """What the probe of the platform ``name`` says of this machine, and what it ``did`` that it must not do."""
    record = platform_record(plugin, name)
    environment = Environment.current()
    done = _watch()
    evidence = record.probe(environment)
    return {"usable": evidence.usable, "reason": evidence.reason, "did": [*done, *_imported()]}


def identities(plugin: str, name: str) -> list[list[str]]:
    """Identity and toolchain of every device of the platform ``name``, as text."""
    from kalign_core.hal.select import ask_for_interpreter, load_platform

    record = platform_record(plugin, name)
    ask_for_interpreter(record)
    platform = load_platform(record)
    return [[repr(platform.identity(device)), repr(platform.toolchain(device))] for device in platform.devices()]


def _watch() -> list[str]:
    """Start writing down, in the list returned, whatever touches a device, a library, a process or a network."""
    done: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments else None
        if event == "ctypes.dlopen" and first:
            done.append(f"loads the library {first}")
        elif event == "open" and str(first).startswith("/dev/") and first not in _HARMLESS_DEVICES:
            done.append(f"opens {first}")
        elif event in _STARTS:
            done.append(f"calls {event}{arguments[:2]!r}")

    sys.addaudithook(note)
    return done


def _imported() -> list[str]:
    return [f"imports {name}" for name in sorted(HEAVY & set(sys.modules))]


# --- records ------------------------------------------------------------------------------------------------------


def platform_record(plugin: str, name: str) -> PlatformRecord:
    """The platform ``name`` that the module ``plugin`` gives; raises ``UnknownName``."""
    found: PlatformRecord = _named("platform", importlib.import_module(plugin).kalign_platforms(), name)
    return found


def store_record(plugin: str, name: str) -> StoreRecord:
    """The store ``name`` that the module ``plugin`` gives; raises ``UnknownName``."""
    found: StoreRecord = _named("store", importlib.import_module(plugin).kalign_stores(), name)
    return found


def _named(noun: str, records: Iterable[Any], name: str) -> Any:
    known = {record.name: record for record in records}
    if name not in known:
        raise UnknownName(noun, name, known)
    return known[name]
