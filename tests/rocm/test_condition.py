"""The state of an AMD device while it is measured."""

from __future__ import annotations

import os

import pytest

from kalign_core.records import Condition
from kalign_rocm import identity
from tests.rocm.fakes import FUNCTIONS, AmdSmiException, FakeSmi, Processor, properties


def condition(processor: Processor, failing: dict[str, BaseException] | None = None) -> Condition:
    return identity.condition(properties(), FakeSmi(processor, failing=failing), 0, {})


def test_everything_is_read() -> None:
    """Clocks, temperature and processes are amdsmi's."""
    expected = Condition(sm_clock_mhz=2100, memory_clock_mhz=1300, temperature_c=41, foreign_processes=0)
    assert condition(Processor(processes=[os.getpid()])) == expected


REASONS = {
    "nothing": ({}, (), False),
    "the power cap": ({"active_ppt_pwr": True}, (), True),
    "a hot processor": ({"active_prochot_thrm": True}, ("processor hot",), False),
    "hot memory and the cap": ({"active_hbm_thrm": True, "active_ppt_pwr": True}, ("memory thermal",), True),
    "not supported": ({"active_socket_thrm": "N/A", "active_vr_thrm": 255}, (), False),
}


@pytest.mark.parametrize(("violations", "throttle", "capped"), REASONS.values(), ids=REASONS)
def test_throttle_reasons(violations: dict[str, object], throttle: tuple[str, ...], capped: bool) -> None:
    """Thermal violations spoil a sample; the package power cap is recorded, what is not supported says nothing."""
    found = condition(Processor(violations=violations))
    assert (found.throttle, found.power_capped) == (throttle, capped)


def test_thousandths_of_a_degree() -> None:
    """A release that gives thousandths of a degree is understood."""
    smi = FakeSmi(Processor(), amdsmi_get_temp_metric=lambda *_: 41000)
    assert identity.condition(properties(), smi, 0, {}).temperature_c == 41


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_cannot_be_read_is_none(function: str) -> None:
    """Whichever call fails, nothing raises and the fields are numbers or None."""
    found = condition(Processor(), {function: AmdSmiException("not supported")})
    assert {type(value) for value in (found.sm_clock_mhz, found.temperature_c)} <= {int, type(None)}


def test_a_device_that_amdsmi_does_not_know() -> None:
    """Nothing is known of a device that amdsmi does not find."""
    assert identity.condition(properties(5), FakeSmi(Processor(0)), 0, {}) == Condition()


OURS = os.getpid()
PROCESSES = {
    (OURS,): 0,
    (OURS, 1, 2): 2,
    (): None,  # a container whose processes the driver hides
    (70001,): None,  # us under the host's number, or another
    (70001, 70002): 1,  # at most one of them is us
}


@pytest.mark.parametrize(("listed", "expected"), PROCESSES.items())
def test_foreign_processes(listed: tuple[int, ...], expected: int | None) -> None:
    """Others are counted where the list shows us among them, or where it shows more than could be us."""
    assert condition(Processor(processes=list(listed))).foreign_processes == expected
