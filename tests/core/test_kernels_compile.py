"""Every shared kernel's reference, compiled without a device at hand: as far as the first form for every known device,
to the end for one of each family.

The compiler runs in processes of its own, as it does when tuning: this one interprets. What it is given is lowered here
from calls that the operators really make.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kalign_core import hal, ops
from kalign_core.api import recorded
from kalign_core.declare import lower
from kalign_core.tuner.targets import calls_of, session_for, target_named, targets
from tests.core.scripted import scripted

MODELS = {target.model.arch: target.model for target in targets(hal.plugins).values()}
TARGETS = {arch: list(model.compile_target) for arch, model in MODELS.items()}
# One of each family of code generators.
FAMILIES = ("sm_90", "sm_100", "gfx942", "gfx950")
SMALLEST = "gfx942"  # the supported device with the least shared memory, 64 KiB, and the fewest warps a block, 16
SMALLEST_SHARED_BYTES = 65536
MOST_WARPS = 16
Call = tuple[Any, dict[str, int], str]


class InterleavedRope(type(ops.rope)):  # type: ignore[misc]  # the operator's own class
    """The operator with its other choice of pairs."""

    def inputs(self, *args: Any) -> tuple[Any, ...]:
        return (*super().inputs(*args), True)


EDGES: dict[str, Call] = {
    "swiglu of single elements": (ops.swiglu, {"T": 1, "F": 1}, "fp32"),
    "rms_norm of heads": (ops.rms_norm, {"T": 4, "H": 128}, "fp16"),
    "rms_norm of single elements": (ops.rms_norm, {"T": 4, "H": 1}, "fp32"),
    "rms_norm of the longest rows that are held": (ops.rms_norm, {"T": 1, "H": 65536}, "fp32"),
    "rms_norm of rows that are read twice": (ops.rms_norm, {"T": 1, "H": 65537}, "fp32"),
    "rms_norm of the longest rows": (ops.rms_norm, {"T": 1, "H": 262144}, "bf16"),
    "rope of one pair": (ops.rope, {"T": 1, "HEADS": 1, "D": 2}, "fp32"),
    "rope of pairs side by side": (InterleavedRope(), {"T": 4, "HEADS": 3, "D": 96}, "bf16"),
    "ratio_kl of single tokens": (ops.ratio_kl, {"B": 1, "S": 1}, "bf16"),
    "grpo_loss of single tokens": (ops.grpo_loss, {"B": 1, "S": 1}, "bf16"),
    "group_advantage of one": (ops.group_advantage, {"B": 1, "G": 1}, "fp32"),
    "group_advantage of the largest groups": (ops.group_advantage, {"B": 1, "G": 4096}, "fp32"),
    "embedding of single elements": (ops.embedding, {"T": 1, "V": 1, "H": 1}, "fp32"),
    "pack of single elements": (ops.pack, {"B": 1, "S": 1, "F": 1}, "fp32"),
    "softmax of single elements": (ops.softmax, {"T": 1, "V": 1}, "fp32"),
    "softmax of the longest rows that are held": (ops.softmax, {"T": 1, "V": 32768}, "fp32"),
    "softmax of few long rows": (ops.softmax, {"T": 1, "V": 50257}, "bf16"),
    "softmax of many long rows": (ops.softmax, {"T": 129, "V": 40000}, "fp32"),
    "log_softmax of few long rows": (ops.log_softmax, {"T": 1, "V": 151936}, "bf16"),
    "log_softmax of many long rows": (ops.log_softmax, {"T": 129, "V": 40000}, "bf16"),
    "selected_logprob": (ops.selected_logprob, {"T": 1, "V": 262143}, "fp32"),
    "selected_logprob of single elements": (ops.selected_logprob, {"T": 1, "V": 1}, "fp16"),
    "matmul of single elements": (ops.matmul, {"M": 1, "N": 1, "K": 1}, "fp16"),
}
SHIPPED: dict[str, Call] = {op.name: (op, dict(op.shapes[0]), op.dtypes[0]) for op in ops.operators()}
CALLS = SHIPPED | EDGES
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
FIRST_FORM = """
import importlib, json
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

for job, target in json.load(open({path!r})):
    module, _, name = job["import_path"].partition(":")
    constants = {{(position,): value for position, value in job["constants"]}}
    attributes = {{(position,): [["tt.divisibility", 16]] for position in job["divisible"]}}
    kernel = getattr(importlib.import_module(module), name)
    source = ASTSource(kernel.fn, dict(job["signature"]), constants, attributes)
    target = GPUTarget(*target)
    backend, context, stages = make_backend(target), ir.context(), {{}}
    options = backend.parse_options(dict(job["options"]))
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = backend.get_codegen_implementation(options)
    made = source.make_ir(target, options, code, backend.get_module_map(), context)
    backend.add_stages(stages, options, source.language)
    print(json.dumps({{"failure": "", "ttir": str(stages["ttir"](made, {{}}))}}))
"""
Job = tuple[dict[str, Any], list[Any]]
Compile = Callable[..., list[dict[str, Any]]]


@functools.cache
def jobs_of(label: str) -> dict[str, dict[str, Any]]:
    """What the compiler is given for every kernel of one call and its backward, under the reference, by kernel.

    A kernel that runs again in another form is called ``name, again``.
    """
    op, sizes, dtype = CALLS[label]
    target = target_named(hal.plugins, MODELS[SMALLEST].target)
    jobs: dict[str, dict[str, Any]] = {}
    for call in calls_of(session_for(target, hal.plugins), op, sizes, dtype):
        name = call.kernel.name
        while name in jobs:
            name += ", again"
        lowered = lower(call.kernel, call.problem, call.kernel.reference_config(call.problem))
        jobs[name] = dataclasses.asdict(lowered)
    return jobs


# Combining with these gives the same bits in any order.
ORDER_FREE = re.compile(r"arith\.(max|min|addi|andi|ori|xori|cmp|select|ext|trunc)\w*|tt\.reduce\.return")


def reductions(ttir: str) -> list[tuple[int, bool]]:
    """Of each ``tt.reduce`` of a kernel's first intermediate form: how long its axis is, and whether order matters."""
    found = []
    for reduce in ttir.split('"tt.reduce"')[1:]:
        axis = re.search(r"axis = (\d+)", reduce)
        # The operand's type stands behind the combining region: `}) : (tensor<4x2048x2xf32>) -> ...`.
        operand = re.search(r"\}\) : \(tensor<([0-9x]+)x[a-z]", reduce)
        assert axis
        assert operand, reduce[:200]
        operations = re.findall(r"(?:arith|math|tt|scf)\.[a-z_.]+", reduce[: operand.start()])
        length = int(operand.group(1).split("x")[int(axis.group(1))])
        found.append((length, not all(ORDER_FREE.fullmatch(operation) for operation in operations)))
    return found


def ordered_lengths(ttir: str) -> list[int]:
    """Lengths of the axes that are reduced where the order of combining changes bits."""
    return [length for length, is_ordered in reductions(ttir) if is_ordered]


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


Results = dict[tuple[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(compile_them: Compile, cache: Path) -> Results:
    """Every kernel of every call for a target of each family, by target, call and kernel."""
    found: Results = {}
    for arch in FAMILIES:
        keys = [(arch, label, name) for label in CALLS for name in jobs_of(label)]
        results = compile_them([(jobs_of(label)[name], TARGETS[arch]) for _, label, name in keys], cache)
        found |= dict(zip(keys, results, strict=True))
    return found


@pytest.fixture(scope="module")
def first_forms(compile_them: Compile, cache: Path) -> Results:
    """The same for every target that plugins know, as far as the compiler's first form."""
    keys = [(arch, label, name) for arch in TARGETS for label in CALLS for name in jobs_of(label)]
    results = compile_them([(jobs_of(label)[name], TARGETS[arch]) for arch, label, name in keys], cache, FIRST_FORM)
    return dict(zip(keys, results, strict=True))


@pytest.mark.parametrize("label", CALLS)
@pytest.mark.parametrize("target", FAMILIES)
def test_the_reference_is_legal_everywhere(compiled: Results, target: str, label: str) -> None:
    """The reference compiles for every target, fits its shared memory and needs no more warps than the smallest has."""
    results = {key: result for key, result in compiled.items() if key[:2] == (target, label)}
    assert results
    assert {key: result["failure"] for key, result in results.items() if result["failure"]} == {}
    assert max(result["shared_bytes"] for result in results.values()) <= MODELS[target].shared_bytes
    assert max(result["num_warps"] for result in results.values()) <= MOST_WARPS
    assert max(result["tmem_columns"] for result in results.values()) <= MODELS[target].tmem_columns
    assert max(result["global_scratch_bytes"] for result in results.values()) == 0


def test_the_reference_fits_the_smallest_device(compiled: Results) -> None:
    """On the smallest supported device every kernel's reference stays within 64 KiB."""
    needed = [result["shared_bytes"] for key, result in compiled.items() if key[0] == SMALLEST]
    assert (max(needed) <= SMALLEST_SHARED_BYTES, MODELS[SMALLEST].shared_bytes) == (True, SMALLEST_SHARED_BYTES)
    assert min(model.shared_bytes for model in MODELS.values() if model.shared_bytes) == SMALLEST_SHARED_BYTES
    assert min(model.max_warps for model in MODELS.values()) == MOST_WARPS


@pytest.mark.parametrize("label", CALLS)
@pytest.mark.parametrize("target", TARGETS)
def test_reductions_combine_two_elements(first_forms: Results, target: str, label: str) -> None:
    """No kernel leaves an order to the compiler: what is added up is added in pairs, and nothing scans or is atomic."""
    texts = {key[2]: result["ttir"] for key, result in first_forms.items() if key[:2] == (target, label)}
    assert texts
    assert {kernel: lengths for kernel, text in texts.items() if set(lengths := ordered_lengths(text)) - {2}} == {}
    assert [kernel for kernel, text in texts.items() if "tt.scan" in text or "tt.atomic" in text] == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_is_folded_in_pairs(first_forms: Results, target: str) -> None:
    """RMSNorm adds a row of 2**n elements in n steps of two, on every target."""
    held = "rms_norm of the longest rows that are held"
    for label, width in (("rms_norm", 4096), ("rms_norm of heads", 128), (held, 65536)):
        lengths = ordered_lengths(first_forms[target, label, "rms_norm"]["ttir"])
        assert lengths == [2] * (width.bit_length() - 1)


@pytest.mark.parametrize("target", TARGETS)
def test_a_long_row_is_folded_in_pairs(first_forms: Results, target: str) -> None:
    """So is one of 2**18 elements that is cut into chunks, in 18 steps: first each chunk, then the chunks' sums."""
    for name in ("rms_norm_long", "rms_norm_long_residual", "rms_norm_long_dot"):
        lengths = ordered_lengths(first_forms[target, "rms_norm of the longest rows", name]["ttir"])
        assert lengths == [2] * 18, name


def test_the_first_form_is_the_compiled_one_s(compiled: Results, first_forms: Results) -> None:
    """What is looked at for every target is what the compiler goes on from where it compiles to the end."""
    for key, result in compiled.items():
        assert ordered_lengths(result["ttir"]) == ordered_lengths(first_forms[key]["ttir"]), key


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
    assert ordered_lengths(result["ttir"]) == [1024]


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


def test_lengths_of_packed_sequences_are_no_part_of_the_code() -> None:
    """Batches that differ in sequences, their lengths and their sum alone are packed by one compile."""
    for op in (ops.pack, ops.unpack):
        lowered = []
        for sequences, length in ((3, 5), (9, 17), (70, 33)):
            with scripted().active():
                args = op.inputs({"B": sequences, "S": length, "F": 64}, "bf16", 0, torch.device("cpu"))
                calls = recorded(op, *args)
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


def test_two_processes_compile_the_same(compiled: Results, compile_them: Compile, cache: Path) -> None:
    """What a compile worker made is what the launching process finds: the same hash and code, nothing compiled anew."""
    labels = ("swiglu", "rms_norm", "matmul")
    keys = [(target, label, name) for label in labels for name in jobs_of(label) for target in FAMILIES]
    jobs = [(jobs_of(label)[name], TARGETS[target]) for target, label, name in keys]
    before = sorted(path.name for path in cache.iterdir())
    again = compile_them(jobs, cache, "import triton, torch\n" + COMPILE)
    assert [(r["hash"], r["code"]) for r in again] == [(compiled[k]["hash"], compiled[k]["code"]) for k in keys]
    assert sorted(path.name for path in cache.iterdir()) == before


def test_an_empty_cache_gives_the_same_code(compiled: Results, compile_them: Compile, tmp_path: Path) -> None:
    """Compiling without what others left behind gives the same hash and the same instructions."""
    job = jobs_of("swiglu")["swiglu"]
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
    job = jobs_of("swiglu")["swiglu"]
    broken, sound = compile_them([({**job, **change}, TARGETS["sm_90"]), (job, TARGETS["sm_90"])], cache)
    assert broken["failure"]
    assert says in broken["failure"]
    assert len(broken["failure"]) <= 220
    assert sound["failure"] == ""
