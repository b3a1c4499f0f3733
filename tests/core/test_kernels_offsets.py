"""Offsets are computed in 64 bits: every shared kernel posed a problem past 2**31 elements, and read, not run."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kalign_core import hal, ops
from kalign_core.declare import lower
from kalign_core.tuner.targets import calls_of, session_for, target_named
from tests.core.offsets import too_wide
from tests.core.test_kernels_compile import FIRST_FORM, MODELS, TARGETS

ARCH = "sm_90"
# Rows and strides fit 32 bits, rows times strides do not: in the inputs, and in what is kept for going back.
CALLS: dict[str, tuple[Any, dict[str, int]]] = {
    "swiglu": (ops.swiglu, {"T": 2**20 + 3, "F": 12288}),
    "rms_norm": (ops.rms_norm, {"T": 2**20 + 3, "H": 65536}),
    "rms_norm of long rows": (ops.rms_norm, {"T": 2**17 + 3, "H": 262144}),
    "rope": (ops.rope, {"T": 2**26 + 3, "HEADS": 40, "D": 128}),
    "softmax": (ops.softmax, {"T": 2**20 + 3, "V": 32768}),
    "softmax of few long rows": (ops.softmax, {"T": 128, "V": 2**25 + 1}),
    "softmax of many long rows": (ops.softmax, {"T": 2**17, "V": 40000}),
    "log_softmax": (ops.log_softmax, {"T": 2**20 + 3, "V": 32768}),
    "log_softmax of few long rows": (ops.log_softmax, {"T": 128, "V": 2**25 + 1}),
    "log_softmax of many long rows": (ops.log_softmax, {"T": 2**17, "V": 40000}),
    "selected_logprob": (ops.selected_logprob, {"T": 2**15 + 1, "V": 151936}),
    "matmul": (ops.matmul, {"M": 2**20, "N": 4096, "K": 4096}),
    "ratio_kl": (ops.ratio_kl, {"B": 2**20, "S": 8192}),
    "grpo_loss": (ops.grpo_loss, {"B": 2**20, "S": 8192}),
    "group_advantage": (ops.group_advantage, {"B": 2**26, "G": 64}),
    "embedding": (ops.embedding, {"T": 2**20, "V": 2**20, "H": 4096}),
    "pack": (ops.pack, {"B": 2**12, "S": 2**10, "F": 4096}),
    "unpack": (ops.unpack, {"B": 2**12, "S": 2**10, "F": 4096}),
}
SMALL = {"grpo_loss_fold"}  # it reads one number for every 1,024 tokens


class Posed(NamedTuple):
    """A kernel's problem: the integers it is given by name, its grid, and what the compiler is told."""

    kernel: str
    numbers: dict[str, int]
    grid: tuple[int, ...]
    job: dict[str, Any]
    index_bits: int


@functools.cache
def posed(label: str) -> tuple[Posed, ...]:
    """What one call and its backward run, under the reference; no memory is taken."""
    op, sizes = CALLS[label]
    target = target_named(hal.plugins, MODELS[ARCH].target)
    made = []
    for call in calls_of(session_for(target, hal.plugins), op, sizes, op.dtypes[0]):
        kernel, problem = call.kernel, call.problem
        config = kernel.reference_config(problem)
        numbers = {arg.name: arg.value for arg in problem.args if isinstance(arg.value, int)} | dict(problem.dims)
        job = dataclasses.asdict(lower(kernel, problem, config))
        made.append(Posed(kernel.name, numbers, tuple(kernel.grid(problem, config)), job, problem.index_bits))
    return tuple(made)


@pytest.fixture(scope="module")
def first_forms(child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """``first_forms(jobs, before)`` compiles as far as the first form, after ``before``, in a fresh process."""

    def run(jobs: list[dict[str, Any]], before: str = "") -> list[str]:
        folder = tmp_path_factory.mktemp("forms")
        (folder / "jobs.json").write_text(json.dumps([(job, TARGETS[ARCH]) for job in jobs]))
        done = child(before + FIRST_FORM.format(path=str(folder / "jobs.json")), TRITON_CACHE_DIR=str(folder / "cache"))
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["ttir"] for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def forms(first_forms: Callable[..., list[str]]) -> dict[str, list[str]]:
    """The first forms of every call's kernels, in order."""
    texts = iter(first_forms([each.job for label in CALLS for each in posed(label)]))
    return {label: [next(texts) for _ in posed(label)] for label in CALLS}


def test_every_kernel_is_posed_such_a_problem() -> None:
    """No shared kernel is left out, and each is told that offsets need 64 bits."""
    bits = {each.kernel: each.index_bits for label in CALLS for each in posed(label)}
    assert set(bits) == {kernel.name for op in ops.operators() for kernel in op.kernels}
    assert {name for name, needed in bits.items() if needed != 64} == SMALL


@pytest.mark.parametrize("label", CALLS)
def test_no_offset_leaves_its_bits(forms: dict[str, list[str]], label: str) -> None:
    """Nothing that an address is computed from is a 32-bit number that these sizes could make too large."""
    found = [too_wide(text, each.numbers, each.grid) for each, text in zip(posed(label), forms[label], strict=True)]
    assert found == [[] for _ in posed(label)]


@pytest.mark.parametrize("label", CALLS)
def test_offsets_in_32_bits_would_be_noticed(forms: dict[str, list[str]], label: str) -> None:
    """The same kernels with every number in 32 bits are at fault: the sizes are large enough, and the look sees it."""
    for each, text in zip(posed(label), forms[label], strict=True):
        narrow = text.replace("i64", "i32").replace("arith.extsi", "tt.reshape")
        assert bool(too_wide(narrow, each.numbers, each.grid)) == (each.kernel not in SMALL), each.kernel


NARROW = """
import triton
import triton.language as tl

@triton.jit
def {name}(x, stride, SIZE: tl.constexpr):
    row = tl.program_id(0)
    for i in range(0, stride, SIZE):
        place = x + row{cast} * stride + i + tl.arange(0, SIZE)
        tl.store(place, tl.load(place, mask=i + tl.arange(0, SIZE) < stride), mask=i + tl.arange(0, SIZE) < stride)

made = __import__("types").SimpleNamespace(fn={name})
"""


@pytest.mark.parametrize(
    ("cast", "programs", "wrong"), [("", 2**10, False), ("", 2**20, True), (".to(tl.int64)", 2**20, False)]
)
def test_a_row_times_its_stride_is_looked_at(
    first_forms: Callable[..., list[str]], tmp_path: Path, cast: str, programs: int, wrong: bool
) -> None:
    """A kernel that multiplies in 32 bits is at fault from the size on at which that is too large, and not before."""
    name = f"narrow_{len(cast)}_{programs}"
    (tmp_path / f"{name}.py").write_text(NARROW.format(name=name, cast=cast))
    job = {
        "kernel": name, "import_path": f"{name}:made", "constants": [[2, 1024]], "divisible": [0, 1],
        "signature": [["x", "*fp32"], ["stride", "i32"], ["SIZE", "constexpr"]], "options": [["num_warps", 4]],
    }  # fmt: skip
    (text,) = first_forms([job], f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n")
    found = too_wide(text, {"stride": 4096}, (programs,))
    assert [line.partition(" = ")[2].split()[0] for line in found] == (["arith.muli"] if wrong else [])
