"""What tells why a decision is not used: the nearest entry and how it differs, and entries that can never match here.

Pure functions over a store, for commands to print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kalign_core.cache.base import Store
from kalign_core.cache.device_table import Difference
from kalign_core.records import Entry, EntryKey, Identity, Toolchain

ABSENT = "(none)"
_WORD = re.compile(r"(\w+)(?:<=|=|:)?(.*)", re.DOTALL)


class Stale(NamedTuple):
    """An entry that can never match here, and why."""

    entry: Entry
    reasons: tuple[Difference, ...]


def explain(store: Store, identity: Identity, key: EntryKey) -> tuple[Difference, ...]:
    """How the nearest entry for ``key``'s kernel differs from ``key``, field by field; empty where it is a hit.

    Parts of a field have names of their own: ``problem.H``, ``args.x``, ``toolchain.driver``. A kernel without any
    entry gives one difference in the field ``kernel``.
    """
    entries = [entry for entry in store.entries(identity) if entry.key.kernel == key.kernel]
    if not entries:
        return (Difference("kernel", key.kernel, ABSENT),)
    return min((differences(key, entry.key) for entry in entries), key=_distance)


def differences(wanted: EntryKey, found: EntryKey) -> tuple[Difference, ...]:
    """Every field in which two keys differ."""
    whole = ("kernel", "contract", "phase", "source", "suite")
    pairs = [(field, getattr(wanted, field), getattr(found, field)) for field in whole]
    for field in ("problem", "args"):
        pairs += _compare(field, _words(getattr(wanted, field)), _words(getattr(found, field)))
    pairs += _compare("toolchain", dict(wanted.toolchain.facts), dict(found.toolchain.facts))
    return tuple(Difference(field, w, f) for field, w, f in pairs if w != f or (w == "unknown" and f == "unknown"))


def stale(
    store: Store, identity: Identity, toolchain: Toolchain, sources: Mapping[str, tuple[str, str]], suite: str
) -> tuple[Stale, ...]:
    """The device's entries that no call can match under ``toolchain`` and ``suite``.

    ``sources`` gives contract and source digest of every kernel there is, by name. Entries of another toolchain are
    among them: they serve another environment on this machine, so they are not for throwing away.
    """
    found = []
    for entry in store.entries(identity):
        contract, source = sources.get(entry.key.kernel, (ABSENT, ABSENT))
        today = EntryKey(
            entry.key.kernel if entry.key.kernel in sources else ABSENT, contract, entry.key.problem, entry.key.args,
            entry.key.phase, toolchain, source, suite,
        )  # fmt: skip
        reasons = differences(today, entry.key)
        if reasons:
            found.append(Stale(entry, reasons))
    return tuple(found)


def _distance(found: tuple[Difference, ...]) -> tuple[int, int]:
    """Fewest kinds of field first, then fewest fields: one other shape is nearer than another toolchain and shape."""
    return len({difference.field.partition(".")[0] for difference in found}), len(found)


def _words(text: str) -> dict[str, str]:
    """``H=4096 T<=16`` or ``x:bf16:a16 eps:float`` by name, with what follows the name."""
    words = {}
    for word in text.split():
        match = _WORD.fullmatch(word)
        name, rest = match.groups() if match else (word, "")
        words[name] = rest
    return words


def _compare(field: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted({*wanted, *found}):
        yield f"{field}.{name}", wanted.get(name, ABSENT), found.get(name, ABSENT)
