"""One typed table of every environment variable kalign reads, with where each value came from.

Read when asked, not at import, so that a variable set after import counts; a session keeps the settings it was made
with. Raises ``BadArgument`` for a value that cannot be used, naming the variable and what to type.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kalign_core.errors import BadArgument, UnknownName
from kalign_core.records import MODES


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, what it does, its default in words, and how its text is read."""

    name: str
    purpose: str
    default: str
    read: Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force. ``sources`` says for each field whether it is the default or which variable set it."""

    mode: str = "off"
    platform: str | None = None
    cache_dir: Path | None = None
    plugins: tuple[str, ...] | None = None
    disabled_plugins: tuple[str, ...] = ()
    strict: bool = False
    debug_ids: bool = False
    tune_budget_s: float = 600.0
    sources: Mapping[str, str] = field(default_factory=dict)


def _mode(text: str) -> str:
    if text not in MODES:
        raise UnknownName("mode", text, MODES, fix="export KALIGN_MODE=tune")
    return text


def _switch(variable: str) -> Callable[[str], bool]:
    def read_switch(text: str) -> bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise BadArgument(f"{variable}={text!r} is neither on nor off", fix=f"export {variable}=1")

    return read_switch


def _folder(text: str) -> Path:
    return Path(os.path.expanduser(text))  # what follows an equals sign is not always expanded by the shell


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        what = f"KALIGN_TUNE_BUDGET_S={text!r} is no number of seconds"
        raise BadArgument(what, fix="export KALIGN_TUNE_BUDGET_S=60")
    return value


VARIABLES: Mapping[str, Variable] = {
    "mode": Variable("KALIGN_MODE", "mode of every operator call: " + ", ".join(MODES), "off", _mode),
    "platform": Variable("KALIGN_PLATFORM", "the platform to use; it works or kalign says why not", "chosen", str),
    "cache_dir": Variable("KALIGN_CACHE_DIR", "folder of the devices' files", "the user's cache folder", _folder),
    "plugins": Variable("KALIGN_PLUGINS", "entry-point names to load, and no others", "all", _names),
    "disabled_plugins": Variable("KALIGN_DISABLE_PLUGINS", "entry-point names not to load", "none", _names),
    "strict": Variable("KALIGN_STRICT", "1 makes a broken plugin an error", "0", _switch("KALIGN_STRICT")),
    "debug_ids": Variable(
        "KALIGN_DEBUG_IDS", "1 has the device assert that ids are in range", "0", _switch("KALIGN_DEBUG_IDS")
    ),
    "tune_budget_s": Variable(
        "KALIGN_TUNE_BUDGET_S", "seconds a process may spend on tuning at first execution", "600", _seconds
    ),
}


def read(variables: Mapping[str, str] | None = None) -> Settings:
    """The settings that ``variables`` (the process's own by default) give; an empty variable counts as not set."""
    variables = os.environ if variables is None else variables
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, variable in VARIABLES.items():
        text = variables.get(variable.name, "")
        sources[name] = variable.name if text else "default"
        if text:
            values[name] = variable.read(text)
    return Settings(**values, sources=sources)
