"""Usual inputs: launches are timed on what calls usually pass, the gate's numbers stay, a wrong declaration is told."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kalign_core.cache.source import source_digest
from kalign_core.declare import Config, Kernel, data, index, kernel, mask, written
from kalign_core.errors import NotTunable
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.embedding import OFFSET, embedding_backward_kernel, embedding_kernel
from kalign_core.kernels.pack import pack_kernel, unpack_kernel
from kalign_core.ops.embedding import _runs
from kalign_core.records import Case, Problem
from kalign_core.tuner.measure import Meter
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.usual import usual_inputs
from kalign_core.verifier.variants import dense_problem
from tests.core.tuner_samples import Bed, double_kernel, problem, winner_of
from tests.core.verifier_samples import FAMILIES, Routine

Sizes = dict[str, int]
Usual = Callable[[Problem], Any]
DTYPES = {"index": "i64", "mask": "i1"}
# A vocabulary's size as models have it; rows of one number, which say as much about ids as long ones.
TEXT = {"T": 8192, "V": 151936, "H": 1}


def posed(made: Kernel, sizes: Sizes, **dtypes: str) -> Problem:
    """A problem of ``made`` with floats of 32 bits, indices of 64 and masks of truth values, but for ``dtypes``."""
    given = {name: DTYPES.get(role.kind, "fp32") for name, role in made.args.items()}
    return dense_problem(made, sizes, {**given, **dtypes})


def bench_of(made: Kernel, at: Problem) -> Bench:
    bench = Bench(CpuPlatform(), made, at, -1)
    bench.families.update(FAMILIES)
    return bench


def timed_sets(made: Kernel, at: Problem, count: int = 1) -> list[dict[str, Any]]:
    """The sets of arguments that a meter times launches on, by name."""
    bench = bench_of(made, at)
    sets = Meter(bench.platform, bench).sets(count)
    return [dict(zip(made.parameters, each, strict=True)) for each in sets]


def timed_on(made: Kernel, sizes: Sizes, **dtypes: str) -> dict[str, Any]:
    return timed_sets(made, posed(made, sizes, **dtypes))[0]


# --- what is timed ------------------------------------------------------------------------------------------------


def expected_distinct(tokens: int, vocabulary: int) -> float:
    """How many numbers ``tokens`` draws name, where the n-th of ``vocabulary`` has a share of 1 / (n + OFFSET)."""
    weights = [1 / (n + OFFSET) for n in range(1, vocabulary + 1)]
    whole = sum(weights)
    return sum(-math.expm1(tokens * math.log1p(-weight / whole)) for weight in weights)


def test_ids_are_as_frequent_as_in_text() -> None:
    """The most frequent id takes the share that Mandelbrot's law gives it, and as many ids are met as it says."""
    ids = timed_on(embedding_kernel, TEXT)["ids"]
    whole = sum(1 / (n + OFFSET) for n in range(1, TEXT["V"] + 1))
    assert Counter(ids.tolist())[0] / TEXT["T"] == pytest.approx(1 / (1 + OFFSET) / whole, rel=0.15)
    assert len(ids.unique()) == pytest.approx(expected_distinct(TEXT["T"], TEXT["V"]), rel=0.05)


def test_the_gradient_of_a_table_is_timed_on_the_runs_of_such_ids() -> None:
    """They are what the operator passes for the ids that its forward is timed on."""
    ids = timed_on(embedding_kernel, TEXT)["ids"]
    passed = timed_on(embedding_backward_kernel, TEXT)
    for name, expected in zip(("order", "joined", "place", "named"), _runs(ids, TEXT["V"]), strict=True):
        assert torch.equal(passed[name].to(torch.int64), expected.to(torch.int64)), name


def test_few_rows_of_a_table_are_named() -> None:
    """A row of the gradient is zeros unless one of far fewer tokens named it; made-up masks name half of the rows."""
    passed = timed_on(embedding_backward_kernel, TEXT)
    named = int(passed["named"].sum())
    assert named == pytest.approx(expected_distinct(TEXT["T"], TEXT["V"]), rel=0.05)
    assert int(passed["joined"].sum()) == TEXT["T"] - named


@pytest.mark.parametrize("made", [pack_kernel, unpack_kernel], ids=str)
@pytest.mark.parametrize("rows", [1, 60, 192, 255, 256])
def test_sequences_lie_side_by_side(made: Kernel, rows: int) -> None:
    """Each begins where the one before it ends, none is longer than its padded rows, and together they fill T rows."""
    sizes = {"T": rows, "B": 4, "S": 64, "F": 2}
    passed = timed_on(made, sizes)
    starts, ends = passed["starts"].tolist(), passed["ends"].tolist()
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    assert starts == [0, *ends[:-1]]
    assert 0 <= min(lengths) <= max(lengths) <= sizes["S"]
    assert rows - 2 <= ends[-1] < rows


def test_more_rows_than_sequences_fill_are_left() -> None:
    """Where T is more than B * S every sequence is as long as its padded rows."""
    passed = timed_on(pack_kernel, {"T": 100, "B": 4, "S": 16, "F": 2})
    assert (passed["ends"] - passed["starts"]).tolist() == [16] * 4


def test_sets_are_equal_and_the_same_every_time() -> None:
    """Every set of a meter, and of the next one, holds the same bytes in memory of its own."""
    at = posed(embedding_backward_kernel, {"T": 64, "V": 128, "H": 4})
    one, other, again = *timed_sets(embedding_backward_kernel, at, 2), *timed_sets(embedding_backward_kernel, at)
    for name in ("order", "joined", "place", "named", "d_out"):
        assert torch.equal(one[name], other[name])
        assert torch.equal(one[name], again[name])
        assert one[name].data_ptr() != other[name].data_ptr()


# --- kernels of anyone ----------------------------------------------------------------------------------------------


def _signature(x: Any, ids: Any, keep: Any, out: Any, T: int, H: int, x_stride: int, keep_stride: int) -> None:
    pass


chosen = kernel(
    name="chosen", family="rowwise", contract="chosen/1", dims=("T", "H"), rows="T",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "ids": index("T", bound="H"),
        "keep": mask("T", "H", strides=("keep_stride", 1)),
        "out": written("T", "H", strides=("H", 1)),
    },
    reference=Config(enable_fp_fusion=False), knobs={}, grid=lambda p, c: (p.T,),
)(Routine(_signature))  # fmt: skip
SIZES = {"T": 3, "H": 4}
KEPT = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


def saying(usual: Usual) -> Kernel:
    """``chosen`` with a declaration of what is usual."""
    return dataclasses.replace(chosen, usual=usual)


def at_most(dtype: torch.dtype) -> Usual:
    return lambda p: {"keep": torch.full((p.T, p.H), torch.iinfo(dtype).max, dtype=dtype)}


def test_a_kernel_that_says_nothing_is_timed_on_the_gates_numbers() -> None:
    """Without a declaration the arguments are those of the gate's case of that name."""
    at = posed(chosen, SIZES)
    passed, bench = timed_sets(chosen, at)[0], bench_of(chosen, at)
    for name, made in bench.inputs(Case("timing")).items():
        assert torch.equal(passed[name], made.view), name


def test_what_is_not_said_stays_as_it_was() -> None:
    """A declaration may speak of some arguments; the others have the gate's numbers."""
    at = posed(chosen, SIZES)
    passed, plain = timed_sets(saying(lambda p: {"ids": [1, 1, 2]}), at)[0], timed_sets(chosen, at)[0]
    assert passed["ids"].tolist() == [1, 1, 2]
    assert torch.equal(passed["x"], plain["x"])
    assert torch.equal(passed["keep"], plain["keep"])


def test_what_a_call_leaves_out_is_left_out() -> None:
    """A call without a mask is timed without one, whatever is said of masks."""
    passed = timed_sets(saying(lambda p: {"ids": [1, 1, 2], "keep": KEPT}), posed(chosen, SIZES, keep="none"))[0]
    assert passed["keep"] is None
    assert passed["ids"].tolist() == [1, 1, 2]


@pytest.mark.parametrize("family", ["normals", "spread", "infinities"])
def test_the_gates_inputs_are_what_they_were(family: str) -> None:
    """A declaration changes no case, and timing leaves nothing behind for one."""
    at, case = posed(chosen, SIZES), Case("", family=family, seed=1)
    declared, plain = bench_of(saying(lambda p: {"ids": [0, 0, 0], "keep": KEPT, "x": KEPT}), at), bench_of(chosen, at)
    for each in (case, Case("timing")):
        declared.argument_sets(2)
        for name, made in plain.inputs(each).items():
            assert torch.equal(declared.inputs(each)[name].flat, made.flat), name


@pytest.mark.parametrize("given", [torch.tensor(KEPT), torch.tensor(KEPT) == 1, KEPT, torch.tensor(KEPT).float().T.T])
def test_numbers_are_whatever_torch_takes(given: Any) -> None:
    """Lists, tensors and truth values; whole numbers may stand for floats."""
    said = {"x": given} if torch.is_tensor(given) and given.is_floating_point() else {"x": given, "keep": given}
    passed = timed_sets(saying(lambda p: said), posed(chosen, SIZES, keep="u8"))[0]
    for name in said:
        assert passed[name].tolist() == KEPT


def test_rows_that_are_one_row_in_memory_hold_the_first() -> None:
    """A mask that is one row for every token takes the first row given."""
    at = posed(chosen, SIZES)
    args = tuple(dataclasses.replace(a, strides=(0, 1)) if a.name == "keep" else a for a in at.args)
    args = tuple(dataclasses.replace(a, value=0) if a.name == "keep_stride" else a for a in args)
    passed = timed_sets(saying(lambda p: {"keep": KEPT}), dataclasses.replace(at, args=args))[0]
    assert passed["keep"].stride() == (0, 1)
    assert passed["keep"].tolist() == [[True, False, False, False]] * 3


# --- what is wrong ------------------------------------------------------------------------------------------------

WRONG = {
    "a shape": (lambda p: {"ids": [0, 1]}, r"gave \(2,\) numbers for 'ids', which has \(3,\)"),
    "an axis": (lambda p: {"keep": [1, 0, 0]}, r"gave \(3,\) numbers for 'keep', which has \(3, 4\)"),
    "fractions": (lambda p: {"ids": [0.0, 1.0, 2.0]}, "gave fractions for 'ids', which is i64"),
    "complex": (lambda p: {"x": torch.zeros(3, 4, dtype=torch.complex64)}, "gave complex numbers for 'x'"),
    "beyond the dtype": (at_most(torch.int16), "gave numbers for 'keep' that u8 does not hold"),
    "beyond the bound": (lambda p: {"ids": [0, 1, p.H]}, "gave numbers from 0 to 4 for 'ids'\n.*H, which is 4"),
    "below zero": (lambda p: {"ids": [0, -1, 2]}, "gave numbers from -1 to 2 for 'ids'"),
    "an output": (lambda p: {"out": KEPT}, "gave numbers for 'out', which is no tensor that the kernel reads"),
    "a name": (lambda p: {"mask": KEPT}, "gave numbers for 'mask', which is no tensor that the kernel reads"),
    "a dimension": (lambda p: {"T": 3}, "gave numbers for 'T', which is no tensor"),
    "ragged": (lambda p: {"keep": [[1, 0, 0, 0], [1]]}, "gave no numbers for 'keep': ValueError"),
    "words": (lambda p: {"ids": ["a", "b", "c"]}, "gave no numbers for 'ids': "),
    "no mapping": (lambda p: [1, 2, 3], "gave a list, not a mapping"),
    "an error": (lambda p: {"ids": [p.V]}, "raised AttributeError: chosen has no dimension 'V'"),
    "an exit": (lambda p: exit(3), "raised SystemExit: 3"),
}  # fmt: skip


@pytest.mark.parametrize(("usual", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_declaration_is_told(usual: Usual, message: str) -> None:
    """The message names the kernel, the argument and what is wrong with it, before anything is launched."""
    made = saying(usual)
    with pytest.raises(NotTunable, match=f"(?s)chosen cannot be timed: its usual inputs are wrong.*{message}.*usual="):
        usual_inputs(made, posed(made, SIZES, keep="u8"))


def test_a_wrong_declaration_costs_its_kernel_alone() -> None:
    """Nothing of that kernel is compiled, launched or timed, and the next one is tuned as ever."""
    here = Bed()
    wrong = dataclasses.replace(double_kernel, usual=lambda p: {"x": [1.0]})
    with pytest.raises(NotTunable, match=r"gave \(1,\) numbers for 'x', which has \(4, 8\)"):
        here.tune(wrong, problem=problem(made=wrong))
    assert (here.script.launched, here.script.timed) == ([], [])
    assert winner_of(here.tune()) is not None


# --- what a store knows -------------------------------------------------------------------------------------------


def test_what_is_usual_is_part_of_the_source() -> None:
    """A decision that was timed on other inputs is none for these: the digest follows the declaration's text."""
    one = saying(lambda p: {"ids": [0] * p.T})
    same = saying(lambda p: {"ids": [0] * p.T})
    other = saying(lambda p: {"ids": [1] * p.T})
    assert source_digest(one) == source_digest(same)
    assert len({source_digest(made) for made in (chosen, one, other)}) == 3
