"""The file that remembers, from process to process, which candidates fail on one device.

It lies beside the device's decisions and is a cache of bad news: without it every start would meet the same crash
again. Losing it costs time and never a result, so a file that is damaged or not trusted counts as empty, with one
warning. A folder or disk that takes nothing keeps the decisions out as well, and their store is who warns of it. The
file can be deleted at any time. Imports neither torch nor triton.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalign_core.cache.files import locked, make_folder, publish, read_trusted
from kalign_core.cache.toml_text import STRING_LENGTH, lines, parse

log = logging.getLogger("kalign")

SUFFIX = ".failures.toml"
MOST = 4096
LOCK_WAIT_S = 2.0
_FIELDS = ("kernel", "code", "reason")
_HEAD = "# Candidates that fail on this device, so that no process meets the same crash again. Safe to delete.\n"


@dataclass(frozen=True, slots=True)
class Failure:
    """One candidate: its kernel, the code it is compiled to in words, and why it failed."""

    kernel: str
    code: str
    reason: str


class FailureFile:
    """Failures by the digest of the code that failed, beside the decisions in ``decisions``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.with_name(path.name.removesuffix(".toml") + SUFFIX)
        self._warned = False

    def read(self) -> dict[str, Failure]:
        """What is known; nothing where the file cannot be used."""
        try:
            return self._content()
        except (OSError, ValueError) as error:
            self._tell(error)
            return {}

    def add(self, failures: Mapping[str, Failure]) -> None:
        """Add ``failures`` to what the file holds by now; the oldest give way past ``MOST``."""
        try:
            make_folder(self._file.parent)
            with locked(self._file, LOCK_WAIT_S):
                known = {**self._known(), **failures}
                publish(self._file, _text(dict(list(known.items())[-MOST:])))
        except Exception as error:  # noqa: BLE001  # a tuning ends here, whose decision no disk may take away
            self._tell(error)

    def _known(self) -> dict[str, Failure]:
        """What the file holds; a damaged one is written anew."""
        try:
            return self._content()
        except ValueError:
            return {}

    def _content(self) -> dict[str, Failure]:
        text = read_trusted(self._file)
        found = parse(text) if text else {}
        return {digest: _failure(table) for digest, table in found.items() if _is_whole(table)}

    def _tell(self, error: Exception) -> None:
        is_ours = isinstance(error, ValueError) or getattr(error, "filename", None) == str(self._file)
        level = logging.WARNING if is_ours and not self._warned else logging.INFO
        log.log(level, "failed candidates are not remembered in %s: %s", self._file, error)
        self._warned |= is_ours


def _is_whole(table: Any) -> bool:
    """Whether every field is there: the last table of a file that was cut short may lack its reason."""
    return isinstance(table, dict) and all(isinstance(table.get(name), str) for name in _FIELDS)


def _failure(table: Mapping[str, str]) -> Failure:
    return Failure(*(table[name] for name in _FIELDS))


def _text(failures: Mapping[str, Failure]) -> bytes:
    tables = [
        f"\n[{digest}]\n" + lines({name: " ".join(getattr(known, name).split())[:STRING_LENGTH] for name in _FIELDS})
        for digest, known in failures.items()
    ]
    return (_HEAD + "".join(tables)).encode()
