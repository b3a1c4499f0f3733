"""The state of an NVIDIA device while it is measured."""

from __future__ import annotations

import os

import pytest

from kalign_core.records import Condition
from kalign_cuda import identity
from tests.cuda.fakes import FUNCTIONS, Board, FakeNvml, NVMLError, Slice, properties


def condition(board: Board, failing: dict[str, BaseException] | None = None) -> Condition:
    return identity.condition(properties(), FakeNvml(board, failing=failing))


def test_everything_is_read() -> None:
    """Clocks, temperature and processes are NVML's."""
    expected = Condition(sm_clock_mhz=1980, memory_clock_mhz=3201, temperature_c=33, foreign_processes=0)
    assert condition(Board(processes=[os.getpid()])) == expected


REASONS = {
    0x0: ((), False),
    0x1: ((), False),  # idle
    0x4: ((), True),
    0x8: (("hardware slowdown",), False),
    0x20: (("software thermal",), False),
    0x40: (("hardware thermal",), False),
    0x80: (("power brake",), False),
    0x100: ((), False),  # display clocks
    0x48 | 0x4: (("hardware slowdown", "hardware thermal"), True),
}


@pytest.mark.parametrize(("bits", "expected"), REASONS.items())
def test_throttle_reasons(bits: int, expected: tuple[tuple[str, ...], bool]) -> None:
    """Hardware and thermal slowdowns spoil a sample; the software power cap is recorded, other reasons say nothing."""
    found = condition(Board(reasons=bits))
    assert (found.throttle, found.power_capped) == expected


def test_the_older_name_of_the_reasons() -> None:
    """A driver that knows the reasons under their older name is asked for them."""
    failing: dict[str, BaseException] = {"nvmlDeviceGetCurrentClocksEventReasons": NVMLError("Function Not Found")}
    assert condition(Board(reasons=0x8), failing).throttle == ("hardware slowdown",)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_cannot_be_read_is_none(function: str) -> None:
    """Whichever call fails, nothing raises and the fields are numbers or None."""
    found = condition(Board(), {function: NVMLError("Not Supported")})
    assert {type(value) for value in (found.sm_clock_mhz, found.temperature_c)} <= {int, type(None)}


def test_a_slice_has_its_board_s_clocks() -> None:
    """A MIG slice has no clocks of its own: its board is asked."""
    part = Slice("MIG-11111111-2222-3333-4444-555555555555", 16, 17920)
    nvml = FakeNvml(Board(slices=[part], reasons=0x40))
    assert identity.condition(properties(uuid=part.uuid[4:]), nvml).throttle == ("hardware thermal",)


def test_a_device_that_nvml_does_not_know() -> None:
    """Nothing is known of a device that NVML does not find."""
    assert identity.condition(properties(5), FakeNvml(Board(0))) == Condition()


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
    assert condition(Board(processes=list(listed))).foreign_processes == expected
