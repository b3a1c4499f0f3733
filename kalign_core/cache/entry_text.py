"""One decision as lines of text, and back.

The lines of the key come first and in a fixed order, so that they serve as the index of a file: a look-up compares
them as text and decodes the one entry it wants. Every fault in an entry is a ``ValueError`` here; what reads files
makes of it that the entry is set aside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from kalign_core.cache.toml_text import checked_list, checked_scalar, lines, parse
from kalign_core.records import Config, Entry, EntryKey, Toolchain

MARKER = b"[[entry]]\n"
KEY_FIELDS = ("kernel", "contract", "problem", "args", "phase", "toolchain", "source", "suite")
TIME_FIELDS = (
    "cold_us", "warm_us", "reference_cold_us", "reference_warm_us", "mad_us", "host_us", "reference_host_us",
)  # fmt: skip
FIELDS = (*KEY_FIELDS, "config", "tuned_at", *TIME_FIELDS, "tried", "digests", "decided")
CHECK_DIGITS = 16
TIME_DECIMALS = 3  # a nanosecond
BLOCK_BYTES = 64 * 1024

_KEY_END = b"\nconfig = "
_TOOLCHAIN_LINE = re.compile(rb'^toolchain = "([^"\\\n]*)"$', re.MULTILINE)
_DECIDED_LINE = re.compile(rb'^decided = "(.*)"$', re.MULTILINE)
_CHECK_LINE = re.compile(rb'^check = "([0-9a-f]{16})"[ \t\r]*(?:\n|\Z)', re.MULTILINE)


def plain(entry: Entry) -> Entry:
    """``entry`` as a file gives it back: times to the nanosecond, those that are no numbers left out, flat extras."""
    return dataclasses.replace(
        entry,
        **{field: _rounded(getattr(entry, field)) for field in TIME_FIELDS},  # type: ignore[arg-type]  # times
        digests=tuple(entry.digests),
        extra=tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in entry.extra if v is not None),
    )


def key_lines(key: EntryKey, toolchain: str) -> bytes:
    """The lines of ``key``, without the last line feed; ``toolchain`` is the name of its table in the file."""
    table = {field: getattr(key, field) for field in KEY_FIELDS}
    return lines({**table, "toolchain": toolchain}).encode()[:-1]


def kernel_line(kernel: str) -> bytes:
    """The first line of every entry for ``kernel``, without the line feed."""
    return lines({KEY_FIELDS[0]: kernel}).encode()[:-1]


def entry_lines(entry: Entry, toolchain: str) -> bytes:
    """The lines of ``entry`` up to its check. Raises ``ValueError`` where reading them would give another entry."""
    table: dict[str, Any] = {"config": str(entry.config)}
    for field in FIELDS[len(table) + len(KEY_FIELDS) :]:
        value = getattr(entry, field)
        if value not in (None, "", ()):
            table[field] = value
    extra = dict(entry.extra)
    if len(extra) != len(entry.extra) or not extra.keys().isdisjoint((*FIELDS, "check")):
        raise ValueError(f"extra fields {sorted(n for n, _ in entry.extra)} repeat each other or fields of an entry")
    written = key_lines(entry.key, toolchain) + b"\n" + lines({**table, **extra}).encode()
    if len(written) > BLOCK_BYTES:
        raise ValueError(f"the entry takes {len(written)} bytes, {BLOCK_BYTES} at most")
    if decode(written, {toolchain: entry.key.toolchain}) != entry:
        raise ValueError(f"the entry of {entry.key.kernel} with {entry.config!r} would not be read as it was written")
    return written


def decode(text: bytes, toolchains: Mapping[str, Toolchain]) -> Entry:
    """The entry that ``text`` (lines of one entry without marker and check) holds."""
    return entry_of(parse(text), toolchains)


def entry_of(table: Mapping[str, Any], toolchains: Mapping[str, Toolchain]) -> Entry:
    """The entry that a parsed table holds; raises ``ValueError`` for anything that an entry does not have."""
    texts = {field: _text(table, field) for field in (*KEY_FIELDS, "config")}
    toolchain = toolchains.get(texts["toolchain"])
    if toolchain is None:
        raise ValueError(f"its toolchain {texts['toolchain']!r} is not in the file")
    key = EntryKey(**{**{field: texts[field] for field in KEY_FIELDS}, "toolchain": toolchain})  # type: ignore[arg-type]
    return Entry(
        key=key,
        config=config_of(texts["config"]),
        digests=tuple(checked_list("digests", _list(table.get("digests", [])))),
        extra=tuple((name, _extra(name, value)) for name, value in table.items() if name not in (*FIELDS, "check")),
        tuned_at=_text(table, "tuned_at", ""),
        **{field: _time(table, field) for field in TIME_FIELDS},
        tried=_text(table, "tried", ""),
        decided=_text(table, "decided", ""),
    )


def config_of(text: str) -> Config:
    """The configuration that ``text`` spells; raises ``ValueError`` unless that is exactly how it is written."""
    try:
        config = Config.parse(text)
    except TypeError as error:
        raise ValueError(f"configuration {text!r}: {error}") from None
    if str(config) != text:
        raise ValueError(f"configuration {text!r} reads as {str(config)!r}")
    return config


def key_part(text: bytes) -> bytes:
    """The key's lines at the beginning of an entry's ``text``."""
    return text[: text.index(_KEY_END)]


def toolchain_name(text: bytes) -> str:
    """Name of the toolchain table that an entry's ``text`` refers to, or ``""``."""
    found = _TOOLCHAIN_LINE.search(text)
    return found.group(1).decode("utf-8", "replace") if found else ""


def decided(text: bytes) -> bytes:
    """When the entry in ``text`` was decided, comparable with others; empty where it does not say."""
    found = _DECIDED_LINE.search(text)
    return found.group(1) if found else b""


def split_check(block: bytes) -> tuple[bytes, str, bytes]:
    """The lines of a block before its check, the check, empty where there is none, and what follows it."""
    found = _CHECK_LINE.search(block)
    return (block[: found.start()], found.group(1).decode(), block[found.end() :]) if found else (block, "", b"")


def check_of(surroundings: bytes, text: bytes) -> str:
    """The check of an entry: over ``surroundings`` (device and toolchain tables) and the entry's own lines."""
    return hashlib.sha256(surroundings + text).hexdigest()[:CHECK_DIGITS]


def _rounded(value: float | None) -> float | None:
    return round(float(value), TIME_DECIMALS) if value is not None and math.isfinite(value) else None


def _text(table: Mapping[str, Any], field: str, absent: str | None = None) -> str:
    value = table.get(field, absent)
    if not isinstance(value, str):
        raise ValueError(f"{field} is {'missing' if value is None else f'{value!r}, no string'}")
    return str(checked_scalar(field, value))


def _time(table: Mapping[str, Any], field: str) -> float | None:
    value = table.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{field} is {value!r}, no number")
    return float(checked_scalar(field, value))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"digests is {value!r}, no list")
    return value


def _extra(name: str, value: Any) -> Any:
    return tuple(checked_list(name, value)) if isinstance(value, list) else checked_scalar(name, value)
