"""Mode and phase of the calls being made: process defaults, and a context that overrides them.

The launch path reads one context variable and nothing else. A forward pass keeps the context it ran in for its
backward pass, which autograd runs on another thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NamedTuple

from kalign_core import settings
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.records import MODES, PHASES


class Call(NamedTuple):
    """Mode and phase in force for one call; of equal ones there is one (``the``), which identity tells from others."""

    mode: str
    phase: str


# Calls that must not be answered from the memo, but noted: verify and explain ask an operator for its kernel calls.
RECORD = "record"

_override: ContextVar[Call | None] = ContextVar("kalign_call", default=None)
overriding: Callable[[], Call | None] = _override.get
"""Mode and phase that hold in the block one is in, if it said any; with ``_default`` what ``current`` gives, sooner."""
_default: Call | None = None
_phases: list[str] = list(PHASES)
_calls: dict[tuple[str, str], Call] = {}


def current() -> Call:
    """Mode and phase in force here."""
    return _override.get() or _default or _load_default()


def the(mode: str, phase: str) -> Call:
    """The one ``Call`` of this mode and phase."""
    return _calls.setdefault((mode, phase), Call(mode, phase))


def set_mode(mode: str) -> None:
    """Set the process's mode: ``off``, ``read``, ``tune`` or ``frozen``; ``using`` still overrides it.

    Raises ``UnknownName`` for any other.
    """
    global _default
    _default = the(_known_mode(mode), current_default().phase)


def current_default() -> Call:
    """The process's defaults: the mode of ``set_mode`` or ``KALIGN_MODE``, phase ``train``."""
    return _default or _load_default()


def _load_default() -> Call:
    global _default
    _default = the(settings.read().mode, "train")
    return _default


@contextlib.contextmanager
def using(mode: str | None = None, phase: str | None = None) -> Iterator[None]:
    """Use ``mode`` and ``phase`` for the calls inside the block; what is None stays as it was.

    The phase is part of an entry's key and never changes bits. Raises ``UnknownName`` for modes that do not exist and
    phases that were not declared.
    """
    outer = current()
    mode = outer.mode if mode is None else _known_mode(mode)
    phase = outer.phase if phase is None else known_phase(phase)
    with restored(the(mode, phase)):
        yield


@contextlib.contextmanager
def restored(call: Call) -> Iterator[None]:
    """Run the block under ``call``, as it was taken from ``current()`` before, perhaps on another thread."""
    token = _override.set(call)
    try:
        yield
    finally:
        _override.reset(token)


def declare_phase(name: str) -> None:
    """Add a phase beside ``train``, ``prefill`` and ``decode``; declaring one twice changes nothing.

    Raises ``BadArgument`` for a name that is no lower-case word of at most 32 letters, digits and underscores.
    """
    if not (name.isidentifier() and name == name.lower() and len(name) <= 32):
        raise BadArgument(f"phase name {name!r} is no lower-case word", fix="kalign.declare_phase('draft')")
    if name not in _phases:
        _phases.append(name)


def known_phase(phase: str) -> str:
    """``phase``, if it is declared; raises ``UnknownName`` otherwise."""
    if phase not in _phases:
        raise UnknownName("phase", phase, _phases, fix=f"kalign.declare_phase({phase!r}) first, or use a known one")
    return phase


def _known_mode(mode: str) -> str:
    if mode not in MODES:
        raise UnknownName("mode", mode, MODES, fix="kalign.set_mode('tune')")
    return mode
