"""A device's file as a value: read from bytes, merged, written to bytes. Touches no file.

Entries stay text until one is asked for. An entry whose check holds over its bytes was written by ``render`` and is
kept as it is, which makes loading a matter of hashing; only text that somebody edited or damaged is parsed, and counts
if its values, written again, have the check. Reading never fails: what cannot be used is returned beside what can, each
piece with its reason, so that damage costs what it hit. A check covers the entry with its unknown fields, its toolchain
table and the device table: an entry cannot move to another device or toolchain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kalign_core.cache.entry_text import (
    BLOCK_BYTES,
    MARKER,
    check_of,
    decided,
    decode,
    entry_lines,
    entry_of,
    kernel_line,
    key_lines,
    key_part,
    split_check,
    toolchain_name,
)
from kalign_core.cache.toml_text import lines, parse
from kalign_core.records import Entry, EntryKey, Toolchain

SCHEMA = 1
HEADER = (
    "# Decisions of kalign for one device. Safe to read, diff and delete; "
    "`kalign cache explain` says why an entry is not used.\n"
)
_RESERVED = ("schema", "entries", "device", "toolchain", "entry")
_ENTRY_LINE = re.compile(rb"^[ \t]*\[\[[ \t]*entry[ \t]*\]\][ \t]*(?:#[^\n]*)?\r?$\n?", re.MULTILINE)
_TABLE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TABLE_LINE = re.compile(rb"^(?=[ \t]*\[)", re.MULTILINE)


class Damage(NamedTuple):
    """A piece of a file that cannot be used: why, and its bytes."""

    reason: str
    content: bytes


@dataclass(slots=True)
class Document:
    """What one device's file holds.

    ``device`` is the device table, ``toolchains`` the facts by table name, ``blocks`` the lines of every entry up to
    its check by the lines of its key, ``extra`` values and flat tables that this version does not know and keeps.
    """

    device: dict[str, Any]
    toolchains: dict[str, Toolchain] = field(default_factory=dict)
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def find(self, key: EntryKey) -> Entry | None:
        """The entry for exactly ``key``, or None; raises ``ValueError`` where it holds what no entry may."""
        for name in self._names_of(key.toolchain):
            text = self.blocks.get(key_lines(key, name))
            if text is not None:
                entry = decode(text, self.toolchains)
                if entry.key == key:
                    return entry
        return None

    def entries(self, kernel: str | None = None) -> Iterator[Entry]:
        """Every entry that can be decoded, of ``kernel`` alone where one is named, in the order of the file."""
        begin = b"" if kernel is None else kernel_line(kernel) + b"\n"
        for _, text in sorted(item for item in self.blocks.items() if item[0].startswith(begin)):
            try:
                yield decode(text, self.toolchains)
            except ValueError:
                continue  # its check holds, so another version of kalign wrote it: kept, and of no use here

    def add(self, entry: Entry) -> None:
        """Keep ``entry``, unless its key has a newer decision; raises ``ValueError`` if it cannot be written."""
        name = next(iter(self._names_of(entry.key.toolchain)), None) or self._new_name(entry.key.toolchain)
        text = entry_lines(entry, name)
        self.toolchains[name] = entry.key.toolchain
        _keep_newer(self.blocks, text)

    def remove(self, keys: Iterable[EntryKey]) -> frozenset[EntryKey]:
        """Forget the entries for ``keys``; gives those that were there. Toolchains with unknown facts count too."""
        gone = set()
        for key in keys:
            for name in [name for name, known in self.toolchains.items() if known == key.toolchain]:
                if self.blocks.pop(key_lines(key, name), None) is not None:
                    gone.add(key)
        return frozenset(gone)

    def kernels(self) -> Counter[bytes]:
        """How many entries each kernel has, by the line that names it (``kernel_line``)."""
        return Counter(key.partition(b"\n")[0] for key in self.blocks)

    def drop_unused(self) -> None:
        """Forget toolchains that no entry refers to."""
        used = {toolchain_name(text) for text in self.blocks.values()}
        self.toolchains = {name: toolchain for name, toolchain in self.toolchains.items() if name in used}

    def _names_of(self, toolchain: Toolchain) -> list[str]:
        """Tables that hold exactly these facts; none for facts of which one is unknown."""
        return [name for name, known in self.toolchains.items() if known == toolchain and toolchain.known]

    def _new_name(self, toolchain: Toolchain) -> str:
        name = toolchain.id
        while name in self.toolchains:
            name += "x"
        return name


class Reading(NamedTuple):
    """What came of reading: the document, or None where ``schema`` is newer than ours, and what could not be used."""

    document: Document | None
    schema: int
    damage: tuple[Damage, ...]


def render(document: Document) -> bytes:
    """``document`` as the bytes of a file; the same document gives the same bytes. Raises ``ValueError``."""
    around = _surroundings(document)
    blocks = []
    for _, text in sorted(document.blocks.items()):
        check = check_of(around[toolchain_name(text)], text)
        blocks.append(b'%s%scheck = "%s"\n' % (MARKER, text, check.encode()))
    values = {name: value for name, value in document.extra.items() if not isinstance(value, Mapping)}
    head = [HEADER + lines({"schema": SCHEMA, "entries": len(blocks), **values}), "[device]\n" + lines(document.device)]
    head += [_toolchain_text(name, toolchain) for name, toolchain in sorted(document.toolchains.items())]
    head += [f"[{_quoted(n)}]\n" + lines(v) for n, v in document.extra.items() if isinstance(v, Mapping)]
    return b"\n".join((*(part.encode() for part in head), *blocks))


def _quoted(name: str) -> str:
    """``name`` as it stands in a table's header."""
    return lines({name: 0})[: -len(" = 0\n")]


def read(content: bytes) -> Reading:
    """The document in ``content`` and what of it is damaged. Never raises."""
    head, *blocks = _split(content.removeprefix(b"\xef\xbb\xbf"))
    tables, damage = _head_tables(head)
    schema = tables.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        return Reading(None, schema, ())
    if schema != SCHEMA or isinstance(schema, bool):
        damage.append(Damage(f"the line schema = {SCHEMA} is missing", b""))
    announced = tables.get("entries")
    if announced != len(blocks):
        damage.append(Damage(f"{announced} entries are announced, {len(blocks)} are there", b""))
    document = Document(device=_device(tables, damage), toolchains=_toolchains(tables, damage))
    _take_extra(document, {name: value for name, value in tables.items() if name not in _RESERVED}, damage)
    if document.device:
        _take_blocks(document, blocks, damage)
    elif content.strip():
        damage.append(Damage("it names no device", content))
    return Reading(document, SCHEMA, tuple(damage))


def _split(content: bytes) -> list[bytes]:
    """``content`` cut at the lines that begin an entry, which are left out.

    Our own spelling first, which takes a tenth of the time that a pattern over the whole file does: that is one step of
    the interpreter, in which no other thread gets on.
    """
    pieces = content.split(b"\n" + MARKER)
    pieces[:-1] = [piece + b"\n" for piece in pieces[:-1]]
    return [part for piece in pieces for part in (_ENTRY_LINE.split(piece) if b"[[" in piece else (piece,))]


def _head_tables(head: bytes) -> tuple[dict[str, Any], list[Damage]]:
    """The tables before the first entry; where they do not parse together, those that parse by themselves."""
    try:
        return parse(head), []
    except ValueError:
        pass  # told piece by piece below
    tables: dict[str, Any] = {}
    damage = []
    for section in _TABLE_LINE.split(head):
        try:
            for name, value in parse(section).items():
                known = tables.setdefault(name, value)
                if known is not value:
                    tables[name] = {**known, **value}
        except (ValueError, TypeError) as error:
            damage.append(Damage(str(error), section))
    return tables, damage


def _device(tables: Mapping[str, Any], damage: list[Damage]) -> dict[str, Any]:
    device = tables.get("device")
    if isinstance(device, dict):
        try:
            lines(device)
            return device
        except ValueError as error:
            damage.append(Damage(f"device: {error}", b""))
    return {}


def _toolchains(tables: Mapping[str, Any], damage: list[Damage]) -> dict[str, Toolchain]:
    found = tables.get("toolchain", {})
    toolchains = {}
    for name, facts in found.items() if isinstance(found, dict) else ():
        toolchain = Toolchain(tuple(sorted(facts.items()))) if isinstance(facts, dict) else Toolchain(())
        try:
            if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
                raise ValueError("it holds something else than strings")
            if not _TABLE_NAME.fullmatch(name):
                raise ValueError("its name is none of ours")
            _toolchain_text(name, toolchain)
            toolchains[name] = toolchain
        except ValueError as error:
            damage.append(Damage(f"toolchain {name!r}: {error}", f"{name} = {facts!r}\n".encode("utf-8", "replace")))
    return toolchains


def _toolchain_text(name: str, toolchain: Toolchain) -> str:
    return f"[toolchain.{name}]\n" + lines(dict(toolchain.facts))


def _take_extra(document: Document, extra: Mapping[str, Any], damage: list[Damage]) -> None:
    for name, value in extra.items():
        try:
            if name in document.extra or name in _RESERVED:
                raise ValueError(f"{name} is there already")
            lines(value) if isinstance(value, dict) else lines({name: value})
            _quoted(name)
            document.extra[name] = value
        except ValueError as error:
            damage.append(Damage(str(error), f"{name} = {value!r}\n".encode("utf-8", "backslashreplace")))


def _take_blocks(document: Document, blocks: list[bytes], damage: list[Damage]) -> None:
    around = _surroundings(document)
    for block in blocks:
        text, check, rest = split_check(block)
        surroundings = around.get(toolchain_name(text))
        try:
            if surroundings is None or check_of(surroundings, text) != check:
                text, rest = _rewritten(document, around, block), b""
            _keep_newer(document.blocks, text)
        except ValueError as error:
            damage.append(Damage(str(error), MARKER + block))
        else:
            _take_rest(document, rest, damage)


def _take_rest(document: Document, rest: bytes, damage: list[Damage]) -> None:
    """Keep the tables that somebody put behind an entry."""
    if not rest.strip():
        return
    try:
        _take_extra(document, parse(rest), damage)
    except ValueError as error:
        damage.append(Damage(str(error), rest))


def _surroundings(document: Document) -> dict[str, bytes]:
    """What the check of an entry covers beside the entry, by the name of its toolchain."""
    device = "[device]\n" + lines(document.device)
    return {name: (device + _toolchain_text(name, t)).encode() for name, t in document.toolchains.items()}


def _rewritten(document: Document, around: Mapping[str, bytes], block: bytes) -> bytes:
    """An entry that somebody laid out anew, as ``render`` writes it; raises ``ValueError`` if it is damaged."""
    if len(block) > BLOCK_BYTES:
        raise ValueError(f"the entry takes {len(block)} bytes, {BLOCK_BYTES} at most")
    table = parse(MARKER + block)["entry"][0]
    entry = entry_of(table, document.toolchains)
    text = entry_lines(entry, table["toolchain"])
    if check_of(around[table["toolchain"]], text) != table.get("check"):
        raise ValueError("its check does not hold")
    return text


def _keep_newer(blocks: dict[bytes, bytes], text: bytes) -> None:
    """Put ``text`` in; of two decisions for one key the one decided later stays, at a tie the one that comes later."""
    key = key_part(text)
    known = blocks.get(key)
    if known is None or decided(known) <= decided(text):
        blocks[key] = text
