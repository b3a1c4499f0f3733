"""A stand-in for the compile worker that misbehaves as it is told; run as a script, it needs nothing of kalign.

What to do is the job's kernel name, or what ``FAKE_WORKER_PLAN`` (JSON) gives for one of the job's types
(``out=*fp32``), options (``num_warps=2``) or constants by place (``4=128``). Process ids go to the file
``FAKE_WORKER_PIDS``, one a line, so that a test can see who is left. Who hangs says so in ``FAKE_WORKER_HANGS``, for a
clock to see (``standstill.py``); who is late answers when the file ``FAKE_WORKER_GO`` is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from standstill import say_that_it_hangs

FOREVER = 3600


def note(pid: int) -> None:
    path = os.environ.get("FAKE_WORKER_PIDS")
    if path:
        with open(path, "a", encoding="ascii") as file:
            file.write(f"{pid}\n")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def plan(job: dict) -> str:
    plans = json.loads(os.environ.get("FAKE_WORKER_PLAN", "{}"))
    for name, value in [*job["signature"], *job["options"], *job["constants"]]:
        if f"{name}={value}" in plans:
            return plans[f"{name}={value}"]
    return job["kernel"]


def grandchild() -> None:
    """Start an assembler's stand-in that would outlive us, with signals off and a session's worth of time."""
    code = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({FOREVER})"
    note(subprocess.Popen([sys.executable, "-S", "-c", code]).pid)


def hang() -> None:
    """Never answer."""
    path = os.environ.get("FAKE_WORKER_HANGS")
    said = say_that_it_hangs(Path(path)) if path else None
    time.sleep(FOREVER)
    del said


def answer(job: dict) -> None:
    what = plan(job)
    if what == "abort":
        sys.stderr.write("LLVM ERROR: no layout for this tile\n")
        sys.stderr.flush()
        os.abort()
    elif what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        raise SystemExit(3)
    elif what == "sleep":
        hang()
    elif what == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        hang()
    elif what == "grandchild":
        grandchild()
        hang()
    elif what == "grandchild, then abort":
        grandchild()
        os.abort()
    elif what == "garbage":
        say("this is no answer")
    elif what == "list":
        say("[1, 2]")
    elif what == "unknown field":
        say('{"hash": "x", "speed": 1}')
    elif what == "half":
        sys.stdout.write('{"hash": ')
        sys.stdout.flush()
        os._exit(0)
    elif what == "late":
        said = say_that_it_hangs(Path(os.environ["FAKE_WORKER_HANGS"]))
        while not os.path.exists(os.environ["FAKE_WORKER_GO"]):
            time.sleep(0.01)
        say(json.dumps({"hash": "late"}))
        said.close()
    elif what == "fails":
        say(json.dumps({"failure": "PTXASError: register allocation failed"}))
    elif what == "unimportable":
        say(json.dumps({"failure": "notebook:kernel cannot be imported", "unimportable": True}))
    elif what == "spills":
        code = json.dumps([job["constants"], job["options"]])
        say(json.dumps({"hash": code, "code": code, "registers": 255, "spills": 4096}))
    elif what == "large":
        say(json.dumps({"hash": "large", "code": "large", "shared_bytes": 1 << 20}))
    else:
        code = what if what.startswith("code ") else json.dumps([job["constants"], job["options"]])
        say(json.dumps({"hash": f"hash of {code}", "code": code, "num_warps": os.getpid()}))


def main() -> None:
    note(os.getpid())
    if os.environ.get("FAKE_WORKER_START") == "dies":
        sys.stderr.write("ModuleNotFoundError: No module named 'triton'\n")
        raise SystemExit(1)
    say("{}")
    for line in sys.stdin:
        answer(json.loads(line))


if __name__ == "__main__":
    main()
