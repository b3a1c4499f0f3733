"""The suites find what is wrong: a backend with one fault fails the tests that name it, and each test fails for one."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kalign_core import testing
from tests.search_path import search_path

ROOT = Path(__file__).resolve().parents[2]
SUITES = ROOT / "tests/conformance/bad_backends/suites.py"
FAULTS: dict[str, set[str]] = {
    # A timer that gives the time of the launch, on a device that works while the host goes on.
    "TestLate": {"test_more_work_takes_longer"},
    # A launch that keeps the tensors it was bound with.
    "TestBound": {
        "test_a_launch_uses_the_tensors_it_is_given",
        "test_a_launch_serves_its_bucket",
        "test_an_empty_call_launches_nothing",
        "test_a_reading_runs_what_it_times",
    },
    # An identity that every board of the model has.
    "TestByModel": {"test_the_key_says_more_than_the_model", "test_two_boards_do_not_share_a_file"},
    # An identity that another mask gives to another board.
    "TestByNumber": {"test_the_key_says_more_than_the_model"},
    # A probe that wakes the device, in every process that imports kalign.
    "TestCurious": {"test_probing_touches_no_device", "test_the_probe_looks_at_the_environment_it_is_given"},
    # A store that writes over what other processes decided.
    "TestForgetful": {"test_writers_lose_nothing_of_each_other"},
    # A strategy that measures nothing.
    "TestFirst": {
        "test_a_clear_winner_comes_first",
        "test_one_finalist_can_be_asked_for",
        "test_what_is_out_is_no_finalist",
        "test_a_field_that_is_all_out_has_no_finalist",
        "test_readings_that_are_none_do_not_win",
        "test_a_clock_that_never_works_finds_nothing",
    },
    # A strategy that measures until there is a clear winner, which there often is not.
    "TestUnsure": {
        "test_finalists_are_of_the_field",
        "test_what_is_out_is_no_finalist",
        "test_readings_that_are_none_do_not_win",
        "test_it_ends",
        "test_a_spent_budget_ends_it",
        "test_a_budget_that_runs_out_ends_it",
        "test_it_finds_the_same_again",
        "test_it_leaves_random_numbers_alone",
    },
    # An input family of ones in the name of the core's.
    "TestLenient": {"test_the_mandatory_suite_is_whole", "test_the_mandatory_suite_still_refutes"},
    # A check that never sees what it was written for, on other cases every time.
    "TestBlind": {"test_every_check_finds_something", "test_checks_give_the_same_again"},
}


# Backends with nothing right, for the rules that none of the others breaks.
HOPELESS = {
    "TestHopelessPlatform", "TestHopelessStore", "TestHopelessStrategy", "TestHopelessChecks", "TestNoPlugin",
}  # fmt: skip
# Rules that take a GPU, a second device, or a user who is not root.
NOT_TRIED_HERE = {
    "test_a_launch_goes_to_the_current_stream",
    "test_a_launch_goes_to_the_tensors_device",
    "test_a_capture_is_noticed",
    "test_a_folder_of_somebody_else_s_is_one_warning",
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The tests that fail, by the suite they are in."""
    report = tmp_path_factory.mktemp("bad") / "report.xml"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", str(SUITES)],
        cwd=ROOT, capture_output=True, check=False, timeout=1800,
        env={**os.environ, "PYTHONPATH": search_path(ROOT), "TRITON_INTERPRET": "1", "KALIGN_PLATFORM": "cpu"},
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        assert case.find("error") is None, case.attrib
        suite = str(case.get("classname")).rpartition(".")[2]
        found.setdefault(suite, set())
        if case.find("failure") is not None:
            found[suite].add(str(case.get("name")).partition("[")[0])
    return found


def test_every_suite_ran(failed: dict[str, set[str]]) -> None:
    """Each bad backend is there, and there is no other."""
    assert set(failed) == set(FAULTS) | HOPELESS


@pytest.mark.parametrize("suite", FAULTS)
def test_the_fault_is_named(failed: dict[str, set[str]], suite: str) -> None:
    """A backend with one fault fails the tests that are about it and passes all others."""
    assert failed[suite] == FAULTS[suite]


@pytest.mark.parametrize("suite", testing.__all__)
def test_every_rule_can_be_broken(failed: dict[str, set[str]], suite: str) -> None:
    """There is no test in a suite that no bad backend fails: a test that cannot fail says nothing."""
    rules = {name for name in dir(getattr(testing, suite)) if name.startswith("test_")}
    assert rules - set().union(*failed.values()) - NOT_TRIED_HERE == set()
