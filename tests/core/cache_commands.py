"""What the tests of the cache's commands share: decisions for an operator's kernels, processes, the commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from kalign_core import context
from kalign_core.api import recorded
from kalign_core.cache.toml_store import TomlStore
from kalign_core.cli.main import main
from kalign_core.hal.replay import IDENTITY, ReplayPlatform, Script
from kalign_core.records import Entry, Toolchain
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import ops

import torch  # isort: skip  # after ops, which asks for the interpreter

SHAPE = ("swiglu", "--shape", "T=4,F=64", "--dtype", "fp32")
ELSEWHERE = Toolchain.of(driver="0.9", triton="scripted")
Start = Callable[..., Session]


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Start]:
    """Gives ``start(script)``, which makes a session as a new process would have it, for the commands to use."""
    with contextlib.ExitStack() as active:

        def start(script: Script | None = None) -> Session:
            here = Session(platform=ReplayPlatform(script), store=TomlStore(Settings(cache_dir=folder)))
            return active.enter_context(here.active())

        yield start


def decisions(here: Session, **changes: Any) -> list[Entry]:
    """A decision for each kernel of ``SHAPE`` that keeps the reference; ``changes`` replace fields of its key."""
    found = []
    with context.using(phase="train"):
        for call in recorded(ops.swiglu, *ops.swiglu.inputs({"T": 4, "F": 64}, "fp32", 0, torch.device("cpu"))):
            key = dataclasses.replace(here.key(call.kernel, call.problem, call.device), **changes)
            config = call.kernel.reference_config(call.problem)
            found.append(Entry(key, config, "T=4", 20.0, 18.0, 20.0, 18.0, 0.1, decided="2026-11-30T10:00:00Z"))
    return found


def keep(here: Session, *entries: Entry) -> None:
    """Have ``entries`` on disk."""
    for entry in entries:
        assert here.store.put(IDENTITY, entry)
    assert here.store.flush()


def stored(folder: Path) -> list[Entry]:
    """What a new process finds in ``folder``."""
    return list(TomlStore(Settings(cache_dir=folder)).entries(IDENTITY))


def kalign(*arguments: str, **options: Any) -> Result:
    """``kalign cache`` with ``arguments``."""
    return CliRunner().invoke(main, ("cache", *arguments), **options)


def data(result: Result, code: int = 0) -> Any:
    """What a command printed with --json, after a look at its exit code."""
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def file_of(folder: Path) -> Path:
    """The one file in ``folder``."""
    (path,) = folder.glob("*.toml")
    return path
