"""The file that remembers, from process to process, which candidates fail on one device.

It lies beside the device's decisions and is a cache of bad news: without it every start would meet the same crash
again. Losing it costs time and never a result, so a file that is damaged or not trusted counts as empty and whatever
goes wrong is one warning. It can be deleted at any time. Imports neither torch nor triton.
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
            self._warn(error)
            return {}

    def add(self, failures: Mapping[str, Failure]) -> None:
        """Add ``failures`` to what the file holds by now; the oldest give way past ``MOST``."""
        try:
            make_folder(self._file.parent)
            with locked(self._file, LOCK_WAIT_S):
                known = {**self._known(), **failures}
                publish(self._file, _text(dict(list(known.items())[-MOST:])))
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            self._warn(error)

    def _known(self) -> dict[str, Failure]:
        """What the file holds; a damaged one is written anew."""
        try:
            return self._content()
        except ValueError:
            return {}

    def _content(self) -> dict[str, Failure]:
        text = read_trusted(self._file)
        found = parse(text) if text else {}
        return {digest: _failure(table) for digest, table in found.items() if isinstance(table, dict)}

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("failed candidates are not remembered in %s: %s", self._file, error)


def _failure(table: Mapping[str, Any]) -> Failure:
    return Failure(*(str(table.get(name, "")) for name in _FIELDS))


def _text(failures: Mapping[str, Failure]) -> bytes:
    tables = [
        f"\n[{digest}]\n" + lines({name: " ".join(getattr(known, name).split())[:STRING_LENGTH] for name in _FIELDS})
        for digest, known in failures.items()
    ]
    return (_HEAD + "".join(tables)).encode()
