"""Winners of the past as the first candidates of the next search.

What won for another size, phase or toolchain is the best guess there is, and a search that is cut short by its budget
has then at least tried it. A seed is a hint: it is tried only if it is among today's candidates, and it has to pass and
win like any other. Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Iterable

from kalign_core.records import Config, Entry, EntryKey

# What makes a problem like another, the telling first.
_LIKENESS = ("phase", "args", "problem", "toolchain")


def seeds(entries: Iterable[Entry], key: EntryKey) -> tuple[Config, ...]:
    """The configurations of ``entries`` for the kernel and contract of ``key``, the likeliest first, each once.

    Those that share more with ``key`` come first, of those the most recent.
    """
    related = [e for e in entries if (e.key.kernel, e.key.contract) == (key.kernel, key.contract) and e.key != key]
    related.sort(key=lambda entry: entry.decided, reverse=True)
    related.sort(key=lambda entry: _likeness(entry.key, key), reverse=True)
    return tuple(dict.fromkeys(entry.config for entry in related))


def _likeness(theirs: EntryKey, ours: EntryKey) -> tuple[bool, ...]:
    return tuple(getattr(theirs, field) == getattr(ours, field) for field in _LIKENESS)
