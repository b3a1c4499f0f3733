"""Whether two devices or toolchains compute equal bits, as far as the digests of core cases can tell.

Only digests of one suite, one contract and the very same inputs are compared; everything else is ``not comparable``,
which is no answer. Equal digests mean equal bytes on those cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kalign_core.cache.document import read
from kalign_core.errors import BadArgument
from kalign_core.records import Entry, EntryKey

INPUTS = "inputs"
_FIX = "copy the file that kalign cache path prints on the other machine"


class Theirs(NamedTuple):
    """What another device's file holds: how it names the device, and its entries."""

    device: str
    entries: tuple[Entry, ...]


class Comparison(NamedTuple):
    """``equal``, ``differs`` or ``not comparable``, and what that rests on."""

    state: str
    detail: str


def load(path: Path) -> Theirs:
    """Read another device's file; raises ``BadArgument`` where it is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadArgument(f"--against {path}: {error.strerror}", fix=_FIX) from error
    document = read(content).document
    if document is None or not document.device:
        raise BadArgument(f"--against {path} is no file of decisions", fix=_FIX)
    name = str(document.device.get("name", document.device.get("vendor", "another device")))
    return Theirs(name, tuple(document.entries()))


def matching(theirs: Theirs, key: EntryKey) -> tuple[Entry, ...]:
    """Their entries for the problem of ``key``, whatever toolchain, source and phase."""
    wanted = (key.kernel, key.problem, key.args)
    return tuple(e for e in theirs.entries if (e.key.kernel, e.key.problem, e.key.args) == wanted)


def compare(key: EntryKey, digests: Sequence[str], entry: Entry) -> Comparison:
    """Our ``digests`` for ``key`` beside those of their ``entry``."""
    for field in ("suite", "contract"):
        ours, other = getattr(key, field), getattr(entry.key, field)
        if ours != other:
            return Comparison("not comparable", f"{field} {other} there, {ours} here")
    here, there = _by_name(digests), _by_name(entry.digests)
    if here.get(INPUTS) != there.get(INPUTS):
        return Comparison("not comparable", "taken on other sizes or numbers" if there else "no digests there")
    shared = [name for name in here if name in there and name != INPUTS]
    different = [name for name in shared if here[name] != there[name]]
    if not shared:
        return Comparison("not comparable", "no case in common")
    if different:
        return Comparison("differs", f"in {', '.join(different)}")
    return Comparison("equal", f"in {', '.join(shared)}")


def overall(states: Iterable[str]) -> str:
    """One state for several: ``differs`` if any differs, ``equal`` if any is equal, else ``not comparable``."""
    found = set(states)
    return next((state for state in ("differs", "equal") if state in found), "not comparable")


def _by_name(digests: Sequence[str]) -> Mapping[str, str]:
    return {name: value for name, _, value in (text.partition("=") for text in digests)}
