"""The suites' kernels compile for devices that are not here, so that the suites can be run where those are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

COMPILE = """
import json, sys, torch
from kalign_core.declare import lower
from kalign_core.errors import CandidateFailed
from kalign_core.hal import triton_compat
from kalign_core.problems import problem_of
from kalign_core.testing import kernels

def outcome(kernel, steps, target):
    tensor = torch.zeros((8, 24), dtype=torch.int32)
    problem = problem_of(kernel, kernels.arguments(tensor, tensor.clone(), steps), "train")
    lowered = lower(kernel, problem, kernel.reference_config(problem))
    try:
        return triton_compat.code_digest(triton_compat.compile_lowered(kernel.fn, lowered, target))
    except CandidateFailed as error:
        return error.what

targets = [("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)]
print(json.dumps([
    [outcome(kernels.stir_kernel, 3, target), outcome(kernels.stir_kernel, 20_000, target),
     outcome(kernels.broken_kernel, 3, target)] for target in targets
]))
"""


@pytest.fixture(scope="module")
def outcomes(child: Callable[..., Any]) -> list[list[str]]:
    """For each target: the code of a short and of a long run, and what becomes of the broken kernel."""
    done = child(COMPILE, KALIGN_PLATFORM="nobody")  # with a platform of the host kernels would be interpreted
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout)
    return found


def test_the_kernel_compiles_for_every_family(outcomes: list[list[str]]) -> None:
    """Each target gets code of its own."""
    codes = [short for short, _, _ in outcomes]
    assert len(set(codes)) == len(codes) == 4
    assert [code for code in codes if not all(letter in "0123456789abcdef" for letter in code)] == []


def test_how_long_it_runs_is_no_part_of_the_code(outcomes: list[list[str]]) -> None:
    """The number of steps is an argument: a long run is the same code as a short one, so no compiler can shorten it."""
    assert [short for short, _, _ in outcomes] == [long for _, long, _ in outcomes]


def test_the_broken_kernel_does_not_compile(outcomes: list[list[str]]) -> None:
    """The kernel that names what is not there is a failed candidate on every target."""
    assert all("no_such_function" in broken for _, _, broken in outcomes)
