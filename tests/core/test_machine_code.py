"""Registers and spills read from compiled code, against what the vendors' own tools say of the same code."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from kalign_core import hal
from kalign_core.hal.machine_code import registers_and_spills
from kalign_core.occupancy import occupancy
from kalign_core.tuner.targets import targets

MODELS = {target.model.arch: target.model for target in targets(hal.plugins).values()}
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def rows(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(x + N + at)
    tl.debug_barrier()
    tl.store(out + at, tl.cumsum(a) * tl.flip(b) + a)
"""
# What a tool prints is put beside our own answer: for NVIDIA cuobjdump's, for AMD the assembler's own remarks.
COMPILE = """
import json, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kalign_core.hal.machine_code import registers_and_spills
from sample_rows import rows

def said(asm):
    if "amdgcn" in asm:
        remarks = {word: int(re.search(rf"; {word}: (\\d+)", asm["amdgcn"]).group(1))
                   for word in ("NumVGPRsForWavesPerEU", "Occupancy", "ScratchSize")}
        return remarks["NumVGPRsForWavesPerEU"], remarks["ScratchSize"], remarks["Occupancy"]
    open("code.cubin", "wb").write(asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    printed = subprocess.run([tool, "-res-usage", "code.cubin"], capture_output=True, text=True, check=True).stdout
    return (*(int(re.search(rf"{word}:(\\d+)", printed).group(1)) for word in ("REG", "STACK")), 0)

for target, length, options in json.load(open("jobs.json")):
    source = ASTSource(rows, {"x": "*fp32", "out": "*fp32", "N": "constexpr"}, {(2,): length}, {})
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    print(json.dumps([registers_and_spills(compiled.asm), *said(compiled.asm)]))
"""
JOBS = {
    "sm_80": (["cuda", 80, 32], 512, {"num_warps": 1}),
    "sm_90": (["cuda", 90, 32], 1024, {"num_warps": 4}),
    "sm_90, spilling": (["cuda", 90, 32], 4096, {"num_warps": 4, "maxnreg": 24}),
    "sm_100": (["cuda", 100, 32], 512, {"num_warps": 4}),
    "sm_120": (["cuda", 120, 32], 512, {"num_warps": 2}),
    "gfx942": (["hip", "gfx942", 64], 1024, {"num_warps": 4}),
    "gfx942, two waves": (["hip", "gfx942", 64], 1024, {"num_warps": 4, "waves_per_eu": 2}),
    "gfx942, spilling": (["hip", "gfx942", 64], 4096, {"num_warps": 1, "waves_per_eu": 8}),
    "gfx950": (["hip", "gfx950", 64], 512, {"num_warps": 4}),
}


@pytest.fixture(scope="module")
def told(child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Ours (registers, spills), then the tool's registers, stack bytes and waves a SIMD, for every job."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "sample_rows.py").write_text(KERNEL)
    (folder / "jobs.json").write_text(json.dumps(list(JOBS.values())))
    code = f"import os\nos.chdir({str(folder)!r})\n" + COMPILE
    done = child(code, folder, TRITON_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return dict(zip(JOBS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("job", JOBS)
def test_registers_are_the_tool_s(told: dict[str, list[Any]], job: str) -> None:
    """Registers a thread are those that the vendor's own tool reports."""
    (registers, _), theirs, _, _ = told[job]
    assert registers == theirs > 0


@pytest.mark.parametrize("job", JOBS)
def test_spills_are_seen_where_there_are_some(told: dict[str, list[Any]], job: str) -> None:
    """Code without memory of its own spills nothing; NVIDIA's spills are that memory in words."""
    (_, spills), _, stack_bytes, _ = told[job]
    assert (spills > 0) == ("spilling" in job)
    assert (stack_bytes > 0) == (spills > 0)
    if job.startswith("sm_"):
        assert spills * 4 == stack_bytes


@pytest.mark.parametrize("job", [job for job in JOBS if job.startswith("gfx")])
def test_the_assembler_agrees_on_occupancy(told: dict[str, list[Any]], job: str) -> None:
    """Waves that a SIMD has registers for are as many as the assembler itself says."""
    (registers, _), _, _, waves = told[job]
    found = occupancy(MODELS[job.partition(",")[0]], warps=4, registers=registers, shared_bytes=0)
    assert found is not None
    assert found.blocks == waves


ELF = b"\x7fELF\x02\x01" + bytes(58)
STRANGE: dict[str, dict[str, Any]] = {
    "another backend's": {"spirv": b""},
    "no file": {"cubin": b""},
    "no ELF": {"cubin": b"x" * 200},
    "no sections": {"cubin": ELF},
    "no names": {"cubin": ELF[:58] + struct.pack("<HHH", 64, 0, 7)},
    "no directives": {"amdgcn": "s_endpgm\n"},
}


@pytest.mark.parametrize("asm", STRANGE.values(), ids=STRANGE)
def test_code_of_an_unknown_form(asm: dict[str, Any]) -> None:
    """Code that is not as expected has no figures rather than wrong ones."""
    assert registers_and_spills(asm) is None
