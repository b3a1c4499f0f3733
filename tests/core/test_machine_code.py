"""Registers and spills read from compiled code, against what the vendors' own tools say of the same code."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kalign_core import hal
from kalign_core.hal.machine_code import instructions, registers_and_spills, waits_first
from kalign_core.hal.triton_compat import code_digest
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


def elf(**sections: bytes) -> bytes:
    """A 64-bit ELF file with ``sections``, underscores in their names standing for dots."""
    names, contents, headers = b"\0", b"", []
    for name, content in {**sections, "_shstrtab": b""}.items():
        headers.append((len(names), 1, len(contents), len(content)))
        names += name.replace("_", ".").encode() + b"\0"
        contents += content
    place, *_ = headers[-1]
    headers[-1] = (place, 3, len(contents), len(names))
    start = 64 + len(contents) + len(names)
    table = b"".join(
        struct.pack("<II4QIIQQ", n, kind, 0, 0, 64 + at, size, 0, 0, 1, 0) for n, kind, at, size in headers
    )
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, start)
    struct.pack_into("<HHH", head, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(head) + contents + names + table


# --- the same code ------------------------------------------------------------------------------------------------


def test_lines_of_source_are_no_part_of_the_code() -> None:
    """Binaries that differ in debug information and the kernel's name alone are the same code."""
    one = elf(_debug_line=b"12", _text_first=b"add", _nv_constant0=b"\1")
    assert instructions({"cubin": one}) == instructions(
        {"hsaco": elf(_debug_line=b"345", _text_second=b"add", _nv_constant0=b"\1")}
    )


@pytest.mark.parametrize(
    "other", [{"_text_a": b"mul", "_nv_constant0": b"\1"}, {"_text_a": b"add", "_nv_constant0": b"\2"}]
)
def test_instructions_and_constants_are_the_code(other: dict[str, bytes]) -> None:
    """Another instruction or another constant is other code."""
    assert instructions({"cubin": elf(_text_a=b"add", _nv_constant0=b"\1")}) != instructions({"cubin": elf(**other)})


def test_what_is_no_binary_has_no_instructions() -> None:
    """A stage of another form, or none, is not taken for code that is the same everywhere."""
    assert (
        instructions({"cubin": b"text"})
        == instructions({"ptx": "ret;"})
        == instructions({"cubin": elf(_debug=b"1")})
        == ""
    )


@pytest.mark.parametrize("name", ["num_warps", "shared", "num_ctas"])
def test_threads_and_memory_are_part_of_a_launch_s_code(name: str) -> None:
    """Equal instructions under other threads or memory are not the same candidate."""
    asm, same = {"cubin": elf(_text_a=b"add")}, {"num_warps": 4, "shared": 0, "num_ctas": 1}
    one, again, other = (
        SimpleNamespace(asm=asm, metadata=SimpleNamespace(**facts)) for facts in (same, same, {**same, name: 8})
    )
    assert code_digest(one) == code_digest(again) != code_digest(other)


# --- waiting for the kernel before --------------------------------------------------------------------------------

PTX = """
.func (.param .b32 func_retval0) read(.param .b64 at)
{{
	ld.global.b32 	%r1, [%rd1];
	ret;
}}
.visible .entry made(
	.param .u64 .ptr .global .align 1 made_param_0
)
.reqntid 32
{{
	.reg .pred 	%p<2>;
	.loc	1 101 0                         // st.global of a comment
$L__func_begin0:
	{ahead}
	griddepcontrol.wait; // dummy %r1
	ld.global.b32 	%r1, [%rd1];
	ret;
}}
"""


@pytest.mark.parametrize(
    "ahead",
    [
        "",
        "ld.param.b64 %rd1, [made_param_0];",
        "st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};",
        "ld.local.b32 %r1, [%SP];",
        "{ mov.u32 %r1, %ctaid.x; setp.eq.b32 %p1, %r1, 0; }",
        "createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;",
    ],
)
def test_what_needs_nobody_may_come_ahead_of_the_wait(ahead: str) -> None:
    """Parameters, shared and local memory, and arithmetic depend on no other kernel; nor do functions beside it."""
    assert waits_first({"ptx": PTX.format(ahead=ahead)})


@pytest.mark.parametrize(
    "ahead",
    [
        "ld.global.b32 %r1, [%rd1];",
        "ld.volatile.global.b32 %r1, [%rd1];",
        "@%p1 ld.global.L1::evict_first.L2::cache_hint.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1], %rd2;",
        "{ mov.u32 %r1, 0; @!%p1 st.global.b32 [%rd1], %r1; }",
        "$L__BB0_1: red.global.add.u32 [%rd1], 1;",
        "atom.global.acq_rel.gpu.cas.b32 %r1, [%rd1], 0, 1;",
        "cp.async.cg.shared.global [%r1], [%rd1], 16;",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {0, 0}], [%r2];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 16;",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {0, 0}], [%r1];",
        "prefetch.global.L2 [%rd1];",
        "multimem.ld_reduce.global.add.f32 %f1, [%rd1];",
        "ld.acquire.gpu.b32 %r1, [%rd1];",
        "st.b32 [%rd1], %r1;",
        "call.uni (retval0), read, (param0);",
        "@%p1 bra $L__BB0_2;",
        "@%p1 ret;",
        "@%p1 griddepcontrol.wait;",
    ],
)
def test_what_may_need_somebody_may_not(ahead: str) -> None:
    """Global memory, memory of no named space, calls, branches and ends, and a wait under a condition are too early."""
    assert not waits_first({"ptx": PTX.format(ahead=ahead)})


@pytest.mark.parametrize("asm", [{}, {"ptx": ""}, {"amdgcn": "s_endpgm"}, {"ptx": ".visible .entry k()\n{\n\tret;\n}"}])
def test_code_that_says_nothing_of_waiting_does_not_wait(asm: dict[str, str]) -> None:
    """Another vendor's code, an empty kernel and none at all are not taken for one that waits."""
    assert not waits_first(asm)
