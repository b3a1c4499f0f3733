"""Kernels that may start while their predecessor ends wait for it before they touch memory."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from kalign_core import hal, ops
from kalign_core.declare import Kernel, Lowered, kernel, lower, written
from kalign_core.errors import CandidateFailed, DeclarationError
from kalign_core.records import Config, Problem
from kalign_core.tuner.space import illegal
from kalign_core.tuner.targets import calls_of, session_for, target_named
from tests.core.test_kernels_compile import CALLS, COMPILE, MODELS, SHIPPED, TARGETS

ARCH = "sm_90"
PLAIN = Config(num_warps=4, num_stages=1, enable_fp_fusion=False)


@kernel(name="overlap_none", family="pointwise", contract="overlap_none/1", dims=("T",), args={"out": written("T")},
        reference=PLAIN, knobs={"num_warps": (4, 8)}, grid=lambda p, c: (1,))  # fmt: skip
@triton.jit
def waits_for_nobody(out, T):
    tl.store(out + tl.arange(0, 1), 0.0)


@pytest.fixture(scope="module")
def codes(child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    """Code before the assembler of every kernel that may overlap, by its name and whether it is launched so."""
    target = target_named(hal.plugins, MODELS[ARCH].target)
    session = session_for(target, hal.plugins)
    called = {call.kernel: call.problem for op, *rest in SHIPPED.values() for call in calls_of(session, op, *rest)}
    chosen = [(k, p, early) for k, p in called.items() if k.overlaps for early in (False, True)]
    lowered = [lower(k, p, k.reference_config(p).replace(launch_pdl=early)) for k, p, early in chosen]
    texts = [answer["ttir"] for answer in compiled(child, tmp_path_factory.mktemp("codes"), lowered)]
    return {(k.name, early): text for (k, _, early), text in zip(chosen, texts, strict=True)}


def compiled(
    child: Callable[..., Any], folder: Path, jobs: Sequence[Lowered], **variables: str
) -> list[dict[str, Any]]:
    """What a process that compiles ``jobs`` says of each, in their order; ``ttir`` is the code before the assembler."""
    (folder / "jobs.json").write_text(json.dumps([(dataclasses.asdict(job), TARGETS[ARCH]) for job in jobs]))
    code = COMPILE.format(path=str(folder / "jobs.json")).replace('compiled.asm["ttir"]', 'compiled.asm["ptx"]')
    done = child(code, TRITON_CACHE_DIR=str(folder / "cache"), **variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_form_waits_first(child: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever arguments a kernel is given or left without, and of whatever sizes, it may be launched early."""
    session = session_for(target_named(hal.plugins, MODELS[ARCH].target), hal.plugins)
    calls = [call for op, *rest in CALLS.values() for call in calls_of(session, op, *rest) if call.kernel.overlaps]
    jobs = {lower(c.kernel, c.problem, c.kernel.reference_config(c.problem).replace(launch_pdl=True)) for c in calls}
    assert len(jobs) > 30
    assert [answer["failure"] for answer in compiled(child, tmp_path, [*jobs])] == [""] * len(jobs)


def test_memory_is_touched_after_the_wait(codes: dict[tuple[str, bool], str]) -> None:
    """Launched early, a kernel has its one wait ahead of the first load and store; the trigger comes behind it."""
    assert len(codes) > 20
    for (name, early), text in codes.items():
        if early:
            wait, trigger = (text.index(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents"))
            first = min(text.index(word) for word in ("ld.global", "st.global"))
            assert wait < trigger < first, name
            assert text.count("griddepcontrol.wait") == 1, name


def test_launched_in_turn_it_does_not_wait(codes: dict[tuple[str, bool], str]) -> None:
    """The reference, which is not launched early, has neither the wait nor the trigger."""
    assert [name for (name, early), text in codes.items() if not early and "griddepcontrol" in text] == []


def test_the_code_is_otherwise_the_same(codes: dict[tuple[str, bool], str]) -> None:
    """Launched early or in turn, a kernel has the same floating-point operations in the same order."""
    arithmetic = re.compile(r"\b(?:mul|add|sub|fma|div|sqrt|ex2|lg2|max|min)\.\S*f32\b")
    for (name, early), text in codes.items():
        if early:
            assert arithmetic.findall(text) == arithmetic.findall(codes[name, False]), name


def test_the_constant_follows_the_option() -> None:
    """OVERLAP is true where the launch is early and false where it is not said, whatever a file's number looks like."""
    call = calls_of(session_for(target_named(hal.plugins, MODELS[ARCH].target), hal.plugins), ops.swiglu,
                    {"T": 4, "F": 64}, "fp32")[0]  # fmt: skip
    reference = call.kernel.reference_config(call.problem)
    place = call.kernel.parameters + call.kernel.constants
    for given, early in (({}, False), ({"launch_pdl": 0}, False), ({"launch_pdl": 1}, True)):
        lowered = lower(call.kernel, call.problem, reference.replace(**given))
        assert dict(lowered.constants)[place.index("OVERLAP")] is early
        assert dict(lowered.options).get("launch_pdl", False) is early


FAULTY = """
import triton, triton.language as tl
from kalign_core.declare import Config, data, kernel, lower, written
from kalign_core.errors import CandidateFailed
from kalign_core.hal import triton_compat
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.records import Argument, Problem

def declared(fn):
    return kernel(name=fn.fn.__name__, family="pointwise", contract="faulty/1", dims=("T",),
                  args={{"x": data("T"), "out": written("T")}}, knobs={{}}, grid=lambda p, c: (1,),
                  reference=Config(num_warps=1, num_stages=1, enable_fp_fusion=False))(fn)

@declared
@triton.jit
def never(x, out, T, OVERLAP: tl.constexpr):
    tl.store(out + tl.arange(0, 32), tl.load(x + tl.arange(0, 32)))

@declared
@triton.jit
def late(x, out, T, OVERLAP: tl.constexpr):
    values = tl.load(x + tl.arange(0, 32))
    after_predecessor(OVERLAP)
    tl.store(out + tl.arange(0, 32), values)

@declared
@triton.jit
def sometimes(x, out, T, OVERLAP: tl.constexpr):
    if tl.program_id(0) == 0:
        after_predecessor(OVERLAP)
    tl.store(out + tl.arange(0, 32), tl.load(x + tl.arange(0, 32)))

@declared
@triton.jit
def leaves(x, out, T, OVERLAP: tl.constexpr):
    if tl.program_id(0) > T:
        return
    after_predecessor(OVERLAP)
    tl.store(out + tl.arange(0, 32), tl.load(x + tl.arange(0, 32)))

@declared
@triton.jit
def unnamed(x, out, T, OVERLAP: tl.constexpr):
    values = tl.inline_asm_elementwise("ld.acquire.gpu.b32 $0, [$1];", "=f,l", [x + tl.arange(0, 32)],
                                       dtype=tl.float32, is_pure=False, pack=1)
    after_predecessor(OVERLAP)
    tl.store(out + tl.arange(0, 32), values)

@declared
@triton.jit
def first(x, out, T, OVERLAP: tl.constexpr):
    after_predecessor(OVERLAP)
    if tl.program_id(0) <= T:
        tl.store(out + tl.arange(0, 32), tl.load(x + tl.arange(0, 32)))

for made in (never, late, sometimes, leaves, unnamed, first):
    problem = Problem(made.name, (("T", 32),), (Argument("x", "fp32", (1,)), Argument("out", "fp32", (1,))))
    for early in (False, True):
        try:
            triton_compat.compile_lowered(
                made.fn, lower(made, problem, made.reference.replace(launch_pdl=early)), {target})
            print(made.name, early, "compiled")
        except CandidateFailed as error:
            print(made.name, early, str(error).splitlines()[0])
"""


def test_code_that_does_not_wait_first_is_refused(child: Callable[..., Any], tmp_path: Path) -> None:
    """A kernel that waits never, in some programs only, or behind a load of whatever form, is launched in turn only."""
    script = tmp_path / "faulty.py"  # a file: the compiler reads a kernel's source
    script.write_text(FAULTY.format(target=tuple(TARGETS[ARCH])))
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='faulty')"
    done = child(code, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    faulty = ("never", "late", "sometimes", "leaves", "unnamed")
    refused = "is launched early and does not wait before all else"
    said = [line for name in faulty for line in (f"{name} False compiled", f"{name} True {name} {refused}")]
    assert done.stdout.splitlines() == [*said, "first False compiled", "first True compiled"]


def test_code_that_cannot_be_looked_at_is_refused(child: Callable[..., Any], tmp_path: Path) -> None:
    """Where the compiler keeps the binary alone, an early launch is refused for that, in later processes as well."""
    call = calls_of(session_for(target_named(hal.plugins, MODELS[ARCH].target), hal.plugins), ops.swiglu,
                    {"T": 4, "F": 64}, "fp32")[0]  # fmt: skip
    job = lower(call.kernel, call.problem, call.kernel.reference_config(call.problem).replace(launch_pdl=True))
    for variables in ({"TRITON_STORE_BINARY_ONLY": "1"}, {}):
        [answer] = compiled(child, tmp_path, [job], **variables)
        assert "nothing shows whether it waits" in answer["failure"]


@pytest.mark.parametrize("value", ["False", "no", 2, -1])
@pytest.mark.parametrize("option", ["launch_pdl", "enable_fp_fusion"])
def test_an_option_that_is_on_or_off_is_neither_with_another_value(option: str, value: str | int) -> None:
    """What is written as a word does not pass for true: a switch is 0 or 1, in a candidate and when it is compiled."""
    call = calls_of(session_for(target_named(hal.plugins, MODELS[ARCH].target), hal.plugins), ops.swiglu,
                    {"T": 4, "F": 64}, "fp32")[0]  # fmt: skip
    reference = call.kernel.reference_config(call.problem)
    config = Config.parse(str(reference.replace(**{option: value})))
    assert "neither 0 nor 1" in str(illegal(call.kernel, frozenset({option}), reference, config))
    with pytest.raises(CandidateFailed, match="neither 0 nor 1"):
        lower(call.kernel, call.problem, config)


@pytest.mark.parametrize(
    "changes",
    [
        {"knobs": {"OVERLAP": (0, 1)}},
        {"derived": {"OVERLAP": lambda p: 1}},
        {"reference": PLAIN.replace(OVERLAP=1)},
        {"reference": lambda p: PLAIN.replace(OVERLAP=1)},
    ],
)
def test_the_constant_is_nobody_else_s(changes: dict[str, Any]) -> None:
    """A kernel that gives OVERLAP a value of its own, which would be overruled, is refused."""
    said = {"name": "k", "family": "pointwise", "contract": "k/1", "dims": ("T",), "args": {"out": written("T")},
            "reference": PLAIN, "knobs": {}, "grid": lambda p, c: (1,)}  # fmt: skip
    with pytest.raises(DeclarationError, match="'k': OVERLAP is given a value"):
        kernel(**{**said, **changes})(triton.jit(overlapping)).reference_config(Problem("k", (("T", 1),), ()))


def overlapping(out, T, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel's signature; nothing launches it."""


def test_a_kernel_that_does_not_wait_is_never_launched_early() -> None:
    """Without OVERLAP the option is refused, as a candidate and, from a file that asks for it, when it is compiled."""
    early = PLAIN.replace(launch_pdl=True)
    made: Kernel = waits_for_nobody
    assert not made.overlaps
    assert "does not wait" in str(illegal(made, frozenset({"launch_pdl"}), PLAIN, early))
    with pytest.raises(CandidateFailed, match="does not wait for the kernel before it"):
        made.options_for(early)
    assert "launch_pdl" not in made.options_for(PLAIN)
