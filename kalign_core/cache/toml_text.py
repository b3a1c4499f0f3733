"""How single values and lines of a device's file are written, and which values may be in one at all.

Data only: whole numbers, numbers, booleans, short strings and lists of short strings, so that nothing in a file can be
imported or evaluated. One value has one spelling, so that a check over text is a check over values. tomli-w writes the
scalars; only a list is laid out here, on one line, which keeps an entry's fields one a line for a reader and for diff.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

STRING_LENGTH = 4096
LIST_LENGTH = 256
TABLE_LENGTH = 128
NAME_LENGTH = 64
INT64_END = 2**63


def parse(text: bytes) -> dict[str, Any]:
    """The tables of ``text``; raises ``ValueError``, and nothing else, for bytes that are no TOML."""
    try:
        return tomllib.loads(text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def line(name: str, value: Any) -> str:
    """``name = value`` and a line feed; raises ``ValueError`` for what may not stand in a file."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH:
        raise ValueError(f"{name!r} is no name of 1 to {NAME_LENGTH} characters")
    if isinstance(value, (list, tuple)):
        items = ", ".join(_scalar(name, item) for item in checked_list(name, value))
        return f"{_scalar(name, name, key=True)} = [{items}]\n"
    return f"{_scalar(name, name, key=True)} = {_scalar(name, checked_scalar(name, value))}\n"


def lines(table: Mapping[str, Any]) -> str:
    """The lines of a flat table, in its order; raises ``ValueError`` for what may not stand in a file."""
    if len(table) > TABLE_LENGTH:
        raise ValueError(f"{len(table)} fields in one table, {TABLE_LENGTH} at most")
    return "".join(line(name, value) for name, value in table.items())


def checked_scalar(name: str, value: Any) -> Any:
    """``value`` if it is a whole number of 64 bits, a finite number, a boolean or a short string."""
    if isinstance(value, str):
        if len(value) <= STRING_LENGTH:
            return value
        raise ValueError(f"{name} is a string of {len(value)} characters, {STRING_LENGTH} at most")
    if isinstance(value, int) and -INT64_END <= value < INT64_END:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(f"{name} is {_shown(value)}: a file holds finite numbers, booleans and short strings")


def checked_list(name: str, value: Any) -> list[str]:
    """``value`` as a list if it is one of short strings."""
    if len(value) > LIST_LENGTH or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} is {_shown(value)}: a list holds at most {LIST_LENGTH} short strings")
    return [checked_scalar(name, item) for item in value]


def _scalar(name: str, value: Any, *, key: bool = False) -> str:
    text: str = tomli_w.dumps({value: 0})[: -len(" = 0\n")] if key else tomli_w.dumps({"v": value})[len("v = ") : -1]
    if "\n" in text:
        raise ValueError(f"{name} is {_shown(value)}, which does not fit one line")
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 60 else text
