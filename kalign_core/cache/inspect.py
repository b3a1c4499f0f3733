"""What tells why a decision is not used: the nearest entry and how it differs, and entries that can never match here.

Pure functions over entries, for commands to print. They look nothing up, so that asking why is no miss of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from kalign_core.cache.device_table import Difference
from kalign_core.records import Config, Entry, EntryKey, Toolchain

if TYPE_CHECKING:
    from kalign_core.tuner.space import Space

ABSENT = "(none)"
_WORD = re.compile(r"(\w+)[=:]?(.*)", re.DOTALL)
_CALL_FIELDS = ("problem", "args", "phase")


class Near(NamedTuple):
    """The entry nearest to a key, and every field in which it differs; none where it is the key's own."""

    entry: Entry
    differences: tuple[Difference, ...]


class Stale(NamedTuple):
    """An entry that can never match here, and why."""

    entry: Entry
    reasons: tuple[Difference, ...]


def nearest(entries: Iterable[Entry], key: EntryKey) -> Near | None:
    """The entry for ``key``'s kernel that differs least from ``key``; None for a kernel without any.

    An entry for the same call under another toolchain or source is nearer than one for another call.
    """
    found = [Near(entry, differences(key, entry.key)) for entry in entries if entry.key.kernel == key.kernel]
    return min(found, key=_distance, default=None)


def differences(wanted: EntryKey, found: EntryKey) -> tuple[Difference, ...]:
    """Every field in which two keys differ.

    Parts of a field have names of their own: ``problem.H``, ``args.x``, ``toolchain.driver``. What is unknown differs
    from itself.
    """
    whole = ("kernel", "contract", "phase", "source", "suite")
    pairs = [(field, getattr(wanted, field), getattr(found, field)) for field in whole]
    for field in ("problem", "args"):
        texts = getattr(wanted, field), getattr(found, field)
        parts = [part for part in _compare(field, *map(_words, texts)) if part[1] != part[2]]
        pairs += parts or [(field, *texts)]
    pairs += _compare("toolchain", dict(wanted.toolchain.facts), dict(found.toolchain.facts))
    return tuple(Difference(field, w, f) for field, w, f in pairs if w != f or (w == "unknown" and f == "unknown"))


def stale(
    entries: Iterable[Entry],
    toolchain: Toolchain,
    sources: Mapping[str, tuple[str, str]],
    suite: str,
    outside: Callable[[Entry], str] = lambda entry: "",
) -> tuple[Stale, ...]:
    """Those of a device's ``entries`` that no call can match under ``toolchain`` and ``suite``.

    ``sources`` gives contract and source digest of every kernel there is, by name. ``outside`` is asked of entries
    that would match: why today's space does not hold their configuration, empty where it does.
    """
    found = []
    for entry in entries:
        reasons = _mismatches(entry.key, toolchain, sources, suite)
        if not reasons and (reason := outside(entry)):
            reasons = (Difference("config", reason, str(entry.config)),)
        if reasons:
            found.append(Stale(entry, reasons))
    return tuple(found)


def outside(config: Config, reference: Config, space: Space) -> str:
    """Why a stored ``config`` is not used although its key matches; empty where it is."""
    if config == reference or config in space:
        return ""
    for refused, reason in space.refused:
        if refused == config:
            return f"refused today: {reason}"
    return "no candidate today"


def _mismatches(
    key: EntryKey, toolchain: Toolchain, sources: Mapping[str, tuple[str, str]], suite: str
) -> tuple[Difference, ...]:
    if key.kernel not in sources:
        return (Difference("kernel", ABSENT, key.kernel),)
    contract, source = sources[key.kernel]
    today = EntryKey(key.kernel, contract, key.problem, key.args, key.phase, toolchain, source, suite)
    return differences(today, key)


def _distance(near: Near) -> tuple[int, int, int]:
    """Fewest kinds of field first, those that say which call it is before all others, then fewest fields."""
    kinds = {difference.field.partition(".")[0] for difference in near.differences}
    return len(kinds & set(_CALL_FIELDS)), len(kinds), len(near.differences)


def _words(text: str) -> dict[str, str]:
    """``H=4096 T<=16`` or ``x:bf16:a16 eps:float`` by name: ``4096`` and ``<=16``, ``bf16:a16`` and ``float``."""
    words = {}
    for word in text.split():
        match = _WORD.fullmatch(word)
        name, rest = match.groups() if match else (word, "")
        words[name] = rest
    return words


def _compare(field: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*wanted, *found}):
        yield f"{field}.{name}", wanted.get(name, ABSENT), found.get(name, ABSENT)
