"""A compile worker: reads lowered kernels from standard input, compiles them, says how it went; dies when told.

It runs in a process of its own because a compiler may abort, hang or exhaust memory. It has neither a device nor
torch; what it compiles lands in the compiler's own cache, where the launching process finds it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any, TextIO

LOOK_SECONDS = 2.0


def main() -> None:
    """Answer one JSON line per JSON line until standard input closes or the parent is gone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a compiler prints must not get between the answers
    threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    import triton  # noqa: F401  # before hal: a worker compiles, it never interprets

    from kalign_core.hal import triton_compat

    say(answers, {})
    for line in sys.stdin:
        say(answers, answer(triton_compat, json.loads(line)))


def die_with(parent: int) -> None:
    """Kill this process and what it started once ``parent`` is gone, which a hanging compiler would not notice."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)


def answer(compat: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Compile one job; gives the compiler's resources or the reason of the failure."""
    from kalign_core.declare import Lowered
    from kalign_core.errors import CandidateFailed
    from kalign_core.isolate import attempt

    lowered = Lowered(
        kernel=job["kernel"],
        import_path=job["import_path"],
        signature=tuple((name, kind) for name, kind in job["signature"]),
        constants=tuple((position, value) for position, value in job["constants"]),
        divisible=tuple(job["divisible"]),
        options=tuple((name, value) for name, value in job["options"]),
    )
    found = attempt(find, job["import_path"])
    if found.error is not None:
        return {"failure": f"{job['import_path']} cannot be imported: {found.reason}", "unimportable": True}
    try:
        compiled = compat.compile_lowered(found.value.fn, lowered, tuple(job["target"]))
    except CandidateFailed as error:
        return {"failure": error.what}
    return {"hash": compiled.hash, "code": compat.code_digest(compiled), **compat.resources(compiled)}


def find(import_path: str) -> Any:
    """The kernel at ``module:name``."""
    module, _, name = import_path.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    if not hasattr(kernel, "fn"):
        raise TypeError(f"it is {kernel!r}, no kernel")
    return kernel


def say(stream: TextIO, answer: dict[str, Any]) -> None:
    """One line, at once."""
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
