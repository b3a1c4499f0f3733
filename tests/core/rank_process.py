"""One rank of several that share a device's file: a process that does what it is told, step by step.

Run as a script with the folder of the decisions and the configuration that is fastest on this rank; reads one word a
line, answers with one line of JSON. Whoever tells several of them decides in which order what happens, so that nothing
depends on how fast they run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Rank:
    """A rank of a test's own: ``tell("tune")`` has it call the operator in that mode and gives its answer."""

    def __init__(self, folder: Path, fastest: Any) -> None:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KALIGN_", "TRITON_"))}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.core.rank_process", str(folder), str(fastest)],
            env={**inherited, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, word: str) -> dict[str, Any]:
        """What the rank answers to ``word``; an empty answer where it died of it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def end(self) -> int:
        """Let the rank end; gives its exit code."""
        self.process.communicate(timeout=120)
        return self.process.returncode


def main(folder: str, fastest: str) -> None:
    """Serve one rank until its input ends."""
    import kalign_core as kalign
    from kalign_core.cache.toml_store import TomlStore
    from kalign_core.hal.replay import ReplayPlatform
    from kalign_core.records import Config
    from kalign_core.session import Session
    from kalign_core.settings import Settings
    from tests.core.scripted import X, bits, prefers, scale, scripted

    script = prefers(Config.parse(fastest))
    settings = Settings(cache_dir=Path(folder), sources={})
    here = Session(platform=ReplayPlatform(script), store=TomlStore(settings), configuration=scripted().settings)
    here.observer.effort = scripted().observer.effort
    for word in map(str.strip, sys.stdin):
        if word == "die in tuning":
            word, script.raises = "tune", lambda *launch: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        with here.active(), kalign.using(mode=word):
            out = scale(X)
        here.store.flush()
        answer = {"config": str(script.launched[-1][1]), "timed": len(script.timed), "bits": bits(out).hex()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
