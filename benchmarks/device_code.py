"""What of a compiled kernel runs on the device: two launches with the same instructions are one candidate, not two.

The compiler's whole output names the kernel and the lines of its source, and differs where the instructions do not.
Here only the sections of the binary that hold instructions and constants are looked at.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator, Mapping
from typing import Any

BINARIES = ("cubin", "hsaco")
RUNNING = (".text", ".rodata", ".nv.constant", ".nv.global.init")
NO_BYTES = 8  # SHT_NOBITS of the ELF specification: a section with a size and nothing in the file
HEADER = struct.Struct("<II4QIIQQ")


def sections(binary: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every section of a 64-bit little-endian ELF file that has bytes."""
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [HEADER.unpack_from(binary, start + size * number) for number in range(count)]
    texts = headers[names][4]
    for name, kind, _, _, offset, length, *_ in headers:
        if kind != NO_BYTES:
            end = binary.index(b"\0", texts + name)
            yield binary[texts + name : end].decode(), binary[offset : offset + length]


def instructions(binary: bytes) -> str:
    """16 hexadecimal digits over what runs of ``binary``: equal where the instructions and their constants are."""
    found = hashlib.sha256()
    for name, content in sorted(sections(binary)):
        kind = next((prefix for prefix in RUNNING if name.startswith(prefix)), None)
        if kind is not None:
            found.update(f"{kind} {len(content)} ".encode() + content)
    return found.hexdigest()[:16]


def code_of(launch: Any) -> str:
    """The instructions that ``launch`` runs, empty where nothing was compiled."""
    compiled = getattr(launch, "compiled", None)
    stage = next((stage for stage in BINARIES if compiled is not None and stage in compiled.asm), None)
    return instructions(compiled.asm[stage]) if stage is not None else ""


def knob_changes(codes: Mapping[Any, str]) -> dict[str, tuple[int, int]]:
    """By knob, how many pairs of configurations differ in that knob alone, and in how many of them the code differs."""
    found: dict[str, tuple[int, int]] = {}
    for one, other in itertools.combinations(codes, 2):
        changed = [name for name in one if one[name] != other.get(name)]
        if len(changed) == 1:
            pairs, differing = found.get(changed[0], (0, 0))
            found[changed[0]] = (pairs + 1, differing + (codes[one] != codes[other]))
    return found
