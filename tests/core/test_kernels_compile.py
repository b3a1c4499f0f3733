"""Every shared kernel's reference, compiled for every family of devices without one at hand.

The compiler runs in processes of its own, as it does when tuning: this one interprets. What it is given is lowered here
from calls that the operators really make.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kalign_core import hal, ops
from kalign_core.api import recorded, recorded_forms
from kalign_core.declare import lower
from tests.core.scripted import scripted

TARGETS = {
    "sm_90": ["cuda", 90, 32],
    "sm_100": ["cuda", 100, 32],
    "gfx942": ["hip", "gfx942", 64],
    "gfx950": ["hip", "gfx950", 64],
}
SMALLEST = "gfx942"  # the supported device with the least shared memory, 64 KiB, and the fewest warps a block, 16
SMALLEST_SHARED_BYTES = 65536
MOST_WARPS = 16
PAIRS = {
    "rms_norm", "rms_norm_residual", "rms_norm_backward", "rms_norm_dweight_fold", "row_parts", "selected_logprob",
    "group_advantage", "grpo_loss_blocks", "grpo_loss_fold",
    *(f"{name}{form}" for name in ("softmax", "log_softmax")
      for form in ("", "_backward", "_long", "_long_backward", "_pieces")),
}  # fmt: skip
ROWS = {"rms_norm": 4096, "rms_norm of heads": 128, "rms_norm of the longest rows": 65536}


class InterleavedRope(type(ops.rope)):  # type: ignore[misc]  # the operator's own class
    """The operator with its other choice of pairs."""

    def inputs(self, *args: Any) -> tuple[Any, ...]:
        return (*super().inputs(*args), True)


CALLS: dict[str, tuple[Any, dict[str, int], str]] = {
    "swiglu": (ops.swiglu, {"T": 4, "F": 12288}, "bf16"),
    "swiglu of single elements": (ops.swiglu, {"T": 1, "F": 1}, "fp32"),
    "rms_norm": (ops.rms_norm, {"T": 4, "H": 4096}, "bf16"),
    "rms_norm of heads": (ops.rms_norm, {"T": 4, "H": 128}, "fp16"),
    "rms_norm of single elements": (ops.rms_norm, {"T": 4, "H": 1}, "fp32"),
    "rms_norm of the longest rows": (ops.rms_norm, {"T": 1, "H": 65536}, "fp32"),
    "rope": (ops.rope, {"T": 4, "HEADS": 40, "D": 128}, "bf16"),
    "rope of one pair": (ops.rope, {"T": 1, "HEADS": 1, "D": 2}, "fp32"),
    "rope of pairs side by side": (InterleavedRope(), {"T": 4, "HEADS": 3, "D": 96}, "bf16"),
    "ratio_kl": (ops.ratio_kl, {"B": 2, "S": 2048}, "fp32"),
    "ratio_kl of single tokens": (ops.ratio_kl, {"B": 1, "S": 1}, "bf16"),
    "grpo_loss": (ops.grpo_loss, {"B": 4, "S": 2048}, "fp32"),
    "grpo_loss of single tokens": (ops.grpo_loss, {"B": 1, "S": 1}, "bf16"),
    "group_advantage": (ops.group_advantage, {"B": 4, "G": 16}, "fp32"),
    "group_advantage of one": (ops.group_advantage, {"B": 1, "G": 1}, "fp32"),
    "group_advantage of the largest groups": (ops.group_advantage, {"B": 1, "G": 4096}, "fp32"),
    "embedding": (ops.embedding, {"T": 4, "V": 8, "H": 4096}, "bf16"),
    "embedding of single elements": (ops.embedding, {"T": 1, "V": 1, "H": 1}, "fp32"),
    "pack": (ops.pack, {"B": 2, "S": 4, "F": 4096}, "bf16"),
    "pack of single elements": (ops.pack, {"B": 1, "S": 1, "F": 1}, "fp32"),
    "softmax": (ops.softmax, {"T": 4, "V": 8192}, "bf16"),
    "softmax of single elements": (ops.softmax, {"T": 1, "V": 1}, "fp32"),
    "softmax of the longest rows that are held": (ops.softmax, {"T": 1, "V": 32768}, "fp32"),
    "softmax of few long rows": (ops.softmax, {"T": 1, "V": 50257}, "bf16"),
    "softmax of many long rows": (ops.softmax, {"T": 129, "V": 40000}, "fp32"),
    "log_softmax": (ops.log_softmax, {"T": 4, "V": 8192}, "bf16"),
    "log_softmax of few long rows": (ops.log_softmax, {"T": 1, "V": 151936}, "bf16"),
    "log_softmax of many long rows": (ops.log_softmax, {"T": 129, "V": 40000}, "bf16"),
    "selected_logprob": (ops.selected_logprob, {"T": 1, "V": 262143}, "fp32"),
    "selected_logprob of single elements": (ops.selected_logprob, {"T": 1, "V": 1}, "fp16"),
    "matmul": (ops.matmul, {"M": 4, "N": 256, "K": 128}, "bf16"),
    "matmul of single elements": (ops.matmul, {"M": 1, "N": 1, "K": 1}, "fp16"),
}
COMPILE = """
import hashlib, importlib, json, sys
import triton
from kalign_core.declare import Lowered
from kalign_core.errors import CandidateFailed
from kalign_core.hal import triton_compat

def tuples(value):
    return tuple(map(tuples, value)) if isinstance(value, list) else value

for job, target in json.load(open({path!r})):
    lowered = Lowered(**{{name: tuples(value) for name, value in job.items()}})
    module, _, name = lowered.import_path.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    try:
        compiled = triton_compat.compile_lowered(kernel.fn, lowered, tuple(target))
    except CandidateFailed as error:
        print(json.dumps({{"failure": str(error)}}))
        continue
    print(json.dumps({{"failure": "", "hash": compiled.hash, "code": triton_compat.code_digest(compiled),
                      "ttir": compiled.asm["ttir"], **triton_compat.resources(compiled)}}))
"""
Job = tuple[dict[str, Any], list[Any]]
Compile = Callable[..., list[dict[str, Any]]]


def jobs_of(label: str) -> list[dict[str, Any]]:
    """What the compiler is given for every kernel of one call and its backward, under the reference."""
    op, sizes, dtype = CALLS[label]
    with scripted().active():
        calls = recorded_forms(op, sizes, dtype, torch.device("cpu"))
    return [dataclasses.asdict(lower(c.kernel, c.problem, c.kernel.reference_config(c.problem))) for c in calls]


def named(jobs: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each job with its kernel's name, the second of a kernel with ``#2`` behind it."""
    made: dict[str, dict[str, Any]] = {}
    for job in jobs:
        name = job["kernel"]
        made[f"{name}#2" if name in made else name] = job
    assert len(made) == len(jobs)
    return [*made.items()]


def kernel_of(name: str) -> str:
    """The kernel that a result of ``compiled`` is of."""
    return name.partition("#")[0]


def reduced_lengths(ttir: str) -> list[int]:
    """Length of the axis that each ``tt.reduce`` of a kernel's first intermediate form reduces."""
    lengths = []
    for reduce in ttir.split('"tt.reduce"')[1:]:
        axis = re.search(r"axis = (\d+)", reduce)
        # The operand's type stands behind the combining region: `}) : (tensor<4x2048x2xf32>) -> ...`.
        operand = re.search(r"\}\) : \(tensor<([0-9x]+)x[a-z]", reduce)
        assert axis
        assert operand, reduce[:200]
        lengths.append(int(operand.group(1).split("x")[int(axis.group(1))]))
    return lengths


@pytest.fixture(scope="module")
def compile_them(child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """``compile_them(jobs, cache)`` compiles in a fresh process; gives what came of each in order."""

    def run(jobs: list[Job], cache: Path, code: str = COMPILE) -> list[dict[str, Any]]:
        path = tmp_path_factory.mktemp("jobs") / "jobs.json"
        path.write_text(json.dumps(jobs))
        done = child(code.format(path=str(path)), TRITON_CACHE_DIR=str(cache))
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiler's cache that the processes of this module share."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled(compile_them: Compile, cache: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Every kernel of every call for every target, by target, call and kernel (``named``)."""
    jobs = [(label, name, job) for label in CALLS for name, job in named(jobs_of(label))]
    made = {}
    for target, arch in TARGETS.items():
        results = compile_them([(job, arch) for *_, job in jobs], cache)
        made |= {(target, label, name): r for (label, name, _), r in zip(jobs, results, strict=True)}
    return made


MODELS = {model.arch: model for record in hal.plugins.platforms() for model in record.models}


@pytest.mark.parametrize("label", CALLS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_reference_is_legal_everywhere(compiled: Any, target: str, label: str) -> None:
    """The reference compiles for every target, fits its shared memory and needs no more warps than the smallest has."""
    results = {key: result for key, result in compiled.items() if key[:2] == (target, label)}
    assert results
    assert {key: result["failure"] for key, result in results.items() if result["failure"]} == {}
    assert max(result["shared_bytes"] for result in results.values()) <= MODELS[target].shared_bytes
    assert max(result["num_warps"] for result in results.values()) <= MOST_WARPS
    assert max(result["global_scratch_bytes"] for result in results.values()) == 0


def test_the_reference_fits_the_smallest_device(compiled: Any) -> None:
    """On the smallest supported device every kernel's reference stays within 64 KiB."""
    needed = [result["shared_bytes"] for key, result in compiled.items() if key[0] == SMALLEST]
    assert (max(needed) <= SMALLEST_SHARED_BYTES, MODELS[SMALLEST].shared_bytes) == (True, SMALLEST_SHARED_BYTES)
    assert min(model.shared_bytes for model in MODELS.values() if model.shared_bytes) == SMALLEST_SHARED_BYTES
    assert min(model.max_warps for model in MODELS.values()) == MOST_WARPS


@pytest.mark.parametrize("target", TARGETS)
def test_canonical_reductions_add_two_elements(compiled: Any, target: str) -> None:
    """Every reduction of an order-canonical kernel is over an axis of length two."""
    canonical = {key: result for key, result in compiled.items() if key[0] == target and kernel_of(key[2]) in PAIRS}
    lengths = {key: reduced_lengths(result["ttir"]) for key, result in canonical.items()}
    assert {key: found for key, found in lengths.items() if set(found) - {2}} == {}
    assert {kernel_of(key[2]) for key, found in lengths.items() if found} == PAIRS
    # As many as a whole row takes: nothing of it was left to another way of adding.
    assert {label: len(lengths[target, label, "rms_norm"]) for label in ROWS} == {
        label: width.bit_length() - 1 for label, width in ROWS.items()
    }
    assert len(lengths[target, "softmax", "softmax"]) == 2 * 13  # a maximum and a sum of 8,192 elements


def test_kernels_without_an_order_to_keep_reduce_nothing(compiled: Any) -> None:
    """Pointwise kernels and the product leave no reduction to the compiler."""
    others = {key: result for key, result in compiled.items() if kernel_of(key[2]) not in PAIRS}
    assert {key[2] for key in others} >= {"swiglu", "swiglu_backward", "selected_logprob_backward", "matmul"}
    assert {key: lengths for key, result in others.items() if (lengths := reduced_lengths(result["ttir"]))} == {}


def test_a_naive_sum_is_noticed(compile_them: Compile, cache: Path, tmp_path: Path) -> None:
    """The same look at a kernel that sums with ``tl.sum`` finds a reduction over the whole row."""
    (tmp_path / "naive_kernels.py").write_text(NAIVE)
    job = {
        "kernel": "naive", "import_path": "naive_kernels:naive", "constants": [[2, 1024]], "divisible": [0, 1],
        "signature": [["x", "*fp32"], ["out", "*fp32"], ["N", "constexpr"]], "options": [["num_warps", 4]],
    }  # fmt: skip
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n" + COMPILE
    (result,) = compile_them([(job, TARGETS["sm_90"])], cache, code)
    assert result["failure"] == ""
    assert reduced_lengths(result["ttir"]) == [1024]


NAIVE = """
import types
import triton
import triton.language as tl

@triton.jit
def row_sum(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), axis=0))

naive = types.SimpleNamespace(fn=row_sum)
"""


def test_the_number_of_rows_is_no_part_of_the_code() -> None:
    """Calls that differ in their number of rows alone are one compile."""
    fixed = dict.fromkeys(("F", "H", "D", "HEADS", "G", "V", "S"), 64)
    row_wise = (ops.rms_norm, ops.softmax, ops.log_softmax, ops.selected_logprob)
    for op in (ops.swiglu, *row_wise, ops.rope, ops.group_advantage, ops.embedding):
        lowered = []
        for rows in (1, 3, 16):
            sizes = {dim: fixed.get(dim, rows) for dim in op.dims}
            with scripted().active():
                calls = recorded(op, *op.inputs(sizes, "bf16", 0, torch.device("cpu")))
            lowered.append([lower(c.kernel, c.problem, c.kernel.reference_config(c.problem)) for c in calls])
        assert lowered[0] == lowered[1] == lowered[2]


def test_numbers_of_sequences_and_tokens_are_no_part_of_the_code() -> None:
    """Batches that differ in their sequences and tokens alone are one compile, whether dense or cut out of longer rows.

    Strides tell the compiler whether they are multiples of 16, as all of them do, so that these stay of one kind.
    """
    for op in (ops.ratio_kl, ops.grpo_loss):
        lowered = []
        for sequences, tokens in ((3, 2064), (8, 4112), (65, 2064)):
            with scripted().active():
                args = op.inputs({"B": sequences, "S": tokens}, "fp32", 0, torch.device("cpu"))
                calls = recorded(op, *args)
            made = [lower(c.kernel, c.problem, c.kernel.reference_config(c.problem)) for c in calls]
            lowered.append([job for job in made if job.kernel != "grpo_loss_fold"])
        assert lowered[0] == lowered[1] == lowered[2]


def test_two_processes_compile_the_same(compiled: Any, compile_them: Compile, cache: Path) -> None:
    """What a compile worker made is what the launching process finds: the same hash and code, nothing compiled anew."""
    labels = ("swiglu", "rms_norm", "matmul")
    jobs = [(job, TARGETS[target]) for label in labels for job in jobs_of(label) for target in TARGETS]
    keys = [(target, label, name) for label in labels for name, _ in named(jobs_of(label)) for target in TARGETS]
    before = sorted(path.name for path in cache.iterdir())
    again = compile_them(jobs, cache, "import triton, torch\n" + COMPILE)
    assert [(r["hash"], r["code"]) for r in again] == [(compiled[k]["hash"], compiled[k]["code"]) for k in keys]
    assert sorted(path.name for path in cache.iterdir()) == before


def test_an_empty_cache_gives_the_same_code(compiled: Any, compile_them: Compile, tmp_path: Path) -> None:
    """Compiling without what others left behind gives the same hash and the same instructions."""
    (job,) = (job for job in jobs_of("swiglu") if job["kernel"] == "swiglu")
    for target in ("sm_90", "gfx942"):
        (alone,) = compile_them([(job, TARGETS[target])], tmp_path / target)
        known = compiled[target, "swiglu", "swiglu"]
        assert (alone["hash"], alone["code"]) == (known["hash"], known["code"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": [["num_warps", 3]]}, "num_warps must be a power of 2"),
        ({"constants": [[0, None]]}, ""),
        ({"signature": [["gate", "*fp3"]]}, ""),
    ],
)
def test_what_does_not_compile_is_one_failure(
    compile_them: Compile, cache: Path, change: dict[str, Any], says: str
) -> None:
    """Whatever the compiler makes of nonsense is a failed candidate with one line of reason, and the next compiles."""
    (job,) = (job for job in jobs_of("swiglu") if job["kernel"] == "swiglu")
    broken, sound = compile_them([({**job, **change}, TARGETS["sm_90"]), (job, TARGETS["sm_90"])], cache)
    assert broken["failure"]
    assert says in broken["failure"]
    assert len(broken["failure"]) <= 220
    assert sound["failure"] == ""
