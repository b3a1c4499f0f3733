"""A refutation's command runs just its case again, in another process too."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from kalign_core import ops
from kalign_core.cache.base import MemoryStore
from kalign_core.cli.main import main
from kalign_core.declare import Config
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_kernel
from kalign_core.records import Case, Refutation
from kalign_core.session import Session
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from kalign_core.verifier.repeat import (
    case_of,
    case_text,
    command,
    content_text,
    kernel_at,
    problem_of_text,
    problem_text,
)
from kalign_core.verifier.variants import VARIANTS, dense_problem, variant
from tests.bad_kernels import BAD, Bad, open_bench
from tests.core.verifier_samples import FAMILIES

CASES = st.builds(
    Case,
    check=st.sampled_from(["batch axis", "order probes", "layout"]),
    family=st.sampled_from(list(FAMILIES)),
    seed=st.integers(0, 99),
    dims=st.lists(
        st.tuples(st.sampled_from(["T", "H"]), st.integers(1, 9999)), max_size=2, unique_by=lambda d: d[0]
    ).map(tuple),
    shift=st.integers(-5, 500),
    step=st.integers(-3, 9),
    neighbours=st.sampled_from(["", "nan", "reseeded"]),
    kept=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    fill=st.integers(0, 255),
    repeats=st.integers(1, 64),
    variant=st.sampled_from(["", *VARIANTS]),
    how=st.sampled_from(["", "graph", "stream"]),
)


@given(CASES)
def test_a_case_is_written_and_read_back(case: Case) -> None:
    """Every field survives."""
    assert case_of(case_text(case), ("T", "H")) == case


def test_a_case_says_no_more_than_it_has_to() -> None:
    """Fields at their defaults are left out."""
    assert case_text(Case("batch axis", "spread", 2, (("T", 17),))) == "check=batch_axis family=spread seed=2 T=17"


@pytest.mark.parametrize("name", ["", *VARIANTS])
@pytest.mark.parametrize("bias", ["none", "bf16"])
def test_a_problem_is_written_and_read_back(name: str, bias: str) -> None:
    """Sizes, dtypes, strides, alignment, absent tensors and stride parameters, for every layout."""
    dtypes = {"a": "bf16", "b": "bf16", "bias": bias, "c": "bf16"}
    problem = dense_problem(matmul_kernel, {"M": 40, "N": 24, "K": 56}, dtypes, phase="decode")
    laid = variant(matmul_kernel, problem, name) if name else problem
    assert laid is not None
    assert problem_of_text(matmul_kernel, problem_text(laid)) == laid


@given(st.floats(allow_nan=False))
def test_numbers_are_written_and_read_back_exactly(eps: float) -> None:
    """A float stays that float."""
    dtypes = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
    problem = dense_problem(rms_norm_kernel, {"T": 4, "H": 8}, dtypes, {"eps": eps})
    assert problem_of_text(rms_norm_kernel, problem_text(problem)) == problem


def test_what_decides_a_cases_numbers_leaves_the_layout_out() -> None:
    """Sizes, dtypes and numbers count; strides and alignment do not."""
    dtypes = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
    problem = dense_problem(rms_norm_kernel, {"T": 4, "H": 8}, dtypes, {"eps": 0.5})
    other = variant(rms_norm_kernel, problem, "uneven")
    assert other is not None
    assert content_text(rms_norm_kernel, other) == content_text(rms_norm_kernel, problem)
    assert content_text(rms_norm_kernel, problem) == "T=4 H=8 x=bf16 weight=bf16 out=bf16 rstd=fp32 eps=0.5"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("check=x speed=1", UnknownName), ("check", BadArgument), ("seed=one", BadArgument), ("kept=1,b", BadArgument),
        ("Q=4", UnknownName), ("dims=3", UnknownName),
    ],
)  # fmt: skip
def test_words_that_are_no_case_are_refused(text: str, error: type[Exception]) -> None:
    """With what is known."""
    with pytest.raises(error):
        case_of(text, ("T", "H"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda text: text.replace(" eps=0.5", ""), BadArgument), (lambda text: text + " size=3", UnknownName),
        (lambda text: text.replace("bf16:8,1", "bf99:8,1"), UnknownName),
        (lambda text: text.replace("bf16:8,1", "bf16:8"), BadArgument),
        (lambda text: text.replace("T=4", "T=x"), BadArgument),
    ],
)  # fmt: skip
def test_words_that_are_no_problem_are_refused(change: Callable[[str], str], error: type[Exception]) -> None:
    """Missing and unknown parameters, unknown dtypes, too few strides, no number."""
    dtypes = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
    text = problem_text(dense_problem(rms_norm_kernel, {"T": 4, "H": 8}, dtypes, {"eps": 0.5}))
    with pytest.raises(error):
        problem_of_text(rms_norm_kernel, change(text))


@pytest.mark.parametrize(
    "path", ["rms_norm", "nowhere.at_all:kernel", "kalign_core.records:Config", "json:nothing", ":x"]
)
def test_paths_that_name_no_kernel_are_refused(path: str) -> None:
    """The error says what a path looks like."""
    with pytest.raises(BadArgument, match="names no kernel"):
        kernel_at(path)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def here() -> Iterator[Session]:
    """A session on the interpreter."""
    made = Session(platform=CpuPlatform(), store=MemoryStore())
    with made.active():
        yield made


def run(text: str) -> Result:
    program, *words = shlex.split(text)
    assert program == "kalign"
    return CliRunner().invoke(main, [*words, "--json"])


def refuted(name: str) -> tuple[Bad, Any]:
    bad = next(bad for bad in BAD if bad.name == name)
    bench = open_bench(bad, CpuPlatform(), -1, strict=False)
    gate = Gate(bench, bench.bound(bad.reference_config(bench)), CORE_CHECKS)
    return bad, gate.examine([bad.candidate(bench)])[0].refutation


# Whose reference configuration is the kernel's own: that is what the command compares with.
@pytest.mark.parametrize("name", ["cleans_nan", "starts_from_a_finite_maximum"])
def test_the_command_shows_the_refutation_again(here: Session, name: str) -> None:
    """Exit code 1, the same element, the same bytes."""
    _, found = refuted(name)
    result = run(found.repeat)
    assert result.exit_code == 1, result.output
    again = json.loads(result.stdout)["refutation"]
    for field in ("check", "family", "seed", "argument", "reference", "candidate", "differing", "repeat"):
        assert again[field] == getattr(found, field)
    assert tuple(again["coordinate"]) == found.coordinate


def test_another_process_shows_the_refutation_again() -> None:
    """The command as printed, in a process that knows nothing of this one."""
    _, found = refuted("stores_past_the_row")
    words = shlex.split(found.repeat)[1:]
    # Which platform it runs on is that process's choice; here there is the interpreter.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "KALIGN_PLATFORM": "cpu"}
    command = [sys.executable, "-m", "kalign_core", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)
    assert done.returncode == 1, done.stderr
    again = json.loads(done.stdout)["refutation"]
    assert (again["check"], again["argument"], again["repeat"]) == (found.check, found.argument, found.repeat)
    assert again["reason"] == found.reason


def test_the_command_runs_one_case_and_no_other(here: Session) -> None:
    """A case that does not show the fault does not refute, and the exit code is 0."""
    _, found = refuted("cleans_nan")
    words = shlex.split(found.repeat)
    words[-1] = case_text(Case("input families", family="normals"))
    result = run(shlex.join(words))
    assert (result.exit_code, json.loads(result.stdout)["refuted"]) == (0, False)


def test_a_good_configuration_passes_its_case(here: Session) -> None:
    """Without another kernel the command holds a configuration to its own kernel."""
    dtypes = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
    problem = dense_problem(rms_norm_kernel, {"T": 4, "H": 8}, dtypes, {"eps": 0.5})
    config = rms_norm_kernel.reference_config(problem).replace(ROWS=1)
    case = Case("batch axis", dims=(("T", 3),), variant="wide")
    assert run(command(rms_norm_kernel, problem, rms_norm_kernel, config, case, -1)).exit_code == 0


def test_the_device_is_named_where_it_is_not_the_first() -> None:
    """So that the command runs where the refutation was seen."""
    problem = dense_problem(
        rms_norm_kernel, {"T": 4, "H": 8}, dict.fromkeys(("x", "weight", "out", "rstd"), "fp32"), {"eps": 0.5}
    )
    config = Config(ROWS=1, num_warps=1, num_stages=1, enable_fp_fusion=False)
    assert "--device 3" in command(rms_norm_kernel, problem, rms_norm_kernel, config, Case("x"), 3)
    assert "--device" not in command(rms_norm_kernel, problem, rms_norm_kernel, config, Case("x"), 0)


@pytest.mark.parametrize(
    "part",
    [("--case", "check=x"), ("--kernel", "module:kernel T=1"), ("--config", "ROWS=1"), ("--candidate", "module:kernel"),
     ("--device", "0")],
)  # fmt: skip
def test_half_a_command_is_refused(here: Session, part: tuple[str, str]) -> None:
    """A part of it names no case and is not ignored: exit code 2 and what to type."""
    result = CliRunner().invoke(main, ["verify", "swiglu", *part])
    assert result.exit_code == 2
    assert "copy the whole command of a refutation" in result.stderr


def test_tuning_tells_the_commands_of_what_it_refuted(here: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``kalign tune --json`` lists as refuted comes with the commands that show it again."""
    monkeypatch.setattr(ops, "_known", dict(ops._known))  # the operator is known in this test alone
    result = CliRunner().invoke(main, ["tune", "tests.core.tiled_sum:tiled_sum", "--json"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)["problems"]
    assert (row["refuted"], len(row["repeats"])) == (1, 1)
    again = run(row["repeats"][0])
    assert again.exit_code == 1, again.output
    found = json.loads(again.stdout)["refutation"]
    assert row["refutations"] == [f"TILE=32 enable_fp_fusion=0 num_stages=1 num_warps=1: {Refutation(**found)}"]
