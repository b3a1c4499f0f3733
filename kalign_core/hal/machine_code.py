"""What compiled device code is and takes, read from what the compiler wrote, without a device or a vendor's tool.

Triton itself learns registers and spills from the driver when it loads a kernel, which needs the device. The numbers
are in the code all the same: in the ``.nv.info`` section of a cubin, and in the directives of AMD assembly.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

# Attributes of .nv.info whose value is a symbol and a number; names as `cuobjdump -elf` prints them.
EIATTR_FRAME_SIZE, EIATTR_REGCOUNT = 0x11, 0x2F
EIFMT_SIZED = 0x04
REGISTER_BYTES = 4
SHT_NOBITS = 8  # of the ELF specification: a section with a size and nothing in the file
# What of a binary runs: instructions and constants. All else names the kernel and the lines of its source.
RUNNING = (".text", ".rodata", ".nv.constant", ".nv.global.init")
BINARIES = ("cubin", "hsaco")
# NVIDIA's intermediate code. An instruction may stand behind a label, a brace and a condition; what reaches memory that
# no space is named for is taken to reach global memory.
INSTRUCTION = re.compile(r"[\s{}]*(?:[$%\w]+:(?!:)\s*)*(@\S+\s+)?([a-z][\w.:]*)")
REACHES_MEMORY = re.compile(r"(?:ldu?|st|atom|red|cp|prefetchu?|multimem|tensormap|tex|tld4|suld|sust|sured)\.")
OWN_MEMORY = re.compile(r"(?!.*\.global).*\.(?:param|shared|local|const)\b")
LEAVES = re.compile(r"(?:bra|brx|call|ret|exit)\b")
WAITS = "griddepcontrol.wait"


def instructions(asm: Mapping[str, Any]) -> str:
    """16 hexadecimal digits over what runs of a kernel, equal where instructions and constants are; empty if unknown.

    Names of kernels and lines of source are no part of it: some compilers write them so that binaries of the same
    instructions differ.
    """
    binary = next((asm[stage] for stage in BINARIES if stage in asm), b"")
    found, sections = hashlib.sha256(), 0
    for name, content in sorted(_sections(binary)):
        kind = next((prefix for prefix in RUNNING if name.startswith(prefix)), None)
        if kind is not None:
            found.update(f"{kind} {len(content)} ".encode() + content)
            sections += kind == ".text"
    return found.hexdigest()[:16] if sections else ""


def registers_and_spills(asm: Mapping[str, Any]) -> tuple[int, int] | None:
    """Registers a thread, and how many more live in memory; None for code of a form that is not known here.

    ``asm`` holds the compiler's stages by name. NVIDIA's count of spilled registers is the stack frame in words, as
    Triton counts them; AMD's is the compiler's count of spilled vector registers. AMD's registers are those the launch
    takes, vector and accumulator registers together: under ``waves_per_eu`` more than the code uses, because the
    compiler then takes so many that no further wave fits.
    """
    if "cubin" in asm:
        return _of_cubin(asm["cubin"])
    if "amdgcn" in asm:
        return _of_assembly(asm["amdgcn"])
    return None


def waits_first(asm: Mapping[str, Any]) -> bool:
    """Whether the code begins by waiting for the kernel before it in the stream, in every thread and unconditionally.

    Ahead of the wait nothing reaches global memory, branches, calls or ends: a kernel whose programs all ended without
    waiting would itself be complete before its predecessor is, and release what comes behind both too soon.
    """
    text = re.sub(r"//.*", "", str(asm.get("ptx", "")))
    body = text.partition(".entry")[2].partition("{")[2]
    for condition, name in (found.groups() for found in map(INSTRUCTION.match, re.split(r"[;\n]", body)) if found):
        if name == WAITS:
            return condition is None
        if LEAVES.match(name) or (REACHES_MEMORY.match(name) and not OWN_MEMORY.match(name)):
            return False
    return False


def _of_assembly(text: str) -> tuple[int, int] | None:
    registers = re.search(r"^\s+\.amdhsa_next_free_vgpr\s+(\d+)$", text, re.MULTILINE)
    spills = re.search(r"^\s+\.vgpr_spill_count:\s+(\d+)$", text, re.MULTILINE)
    return (int(registers.group(1)), int(spills.group(1))) if registers and spills else None


def _of_cubin(code: bytes) -> tuple[int, int] | None:
    registers, frames = [0], [0]
    for attribute, value in _attributes(code):
        if attribute == EIATTR_REGCOUNT:
            registers.append(value)
        elif attribute == EIATTR_FRAME_SIZE:
            frames.append(value)
    return (max(registers), max(frames) // REGISTER_BYTES) if len(registers) > 1 else None


def _attributes(code: bytes) -> Iterator[tuple[int, int]]:
    """Attribute and value of every entry of ``.nv.info`` that gives a symbol a number."""
    data = _section(code, ".nv.info")
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != EIFMT_SIZED:  # the value stands in place of the size
            continue
        if size >= 8 and at + size <= len(data):
            yield attribute, struct.unpack_from("<II", data, at)[1]
        at += size


def _section(code: bytes, wanted: str) -> bytes:
    """Contents of a section of an ELF file, or nothing."""
    return next((content for name, content in _sections(code) if name == wanted), b"")


def _sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and contents of every section of a 64-bit little-endian ELF file that has any; none of another file."""
    if len(code) < 64 or code[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQ", code, table + number * size) for number in range(count)]
    if names >= len(headers):
        return
    strings = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        if kind != SHT_NOBITS:
            end = code.find(b"\0", strings + name)
            yield code[strings + name : end].decode(errors="replace"), code[offset : offset + length]
