"""An NVML and torch's device properties as tests describe them, under nvidia-ml-py's and torch's own names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class NVMLError(Exception):
    """What the fake raises where the driver would."""


def properties(number: int = 0, **changes: Any) -> SimpleNamespace:
    """torch's properties of an H200 whose UUID and PCI address end in ``number``; a value None removes the field."""
    fields: dict[str, Any] = {
        "name": "NVIDIA H200",
        "uuid": uuid_of(number),
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 150109880320,
        "pci_domain_id": 0x7F,
        "pci_bus_id": 0xC0 + number,
        "pci_device_id": 0,
        **changes,
    }
    return SimpleNamespace(**{name: value for name, value in fields.items() if value is not None})


def uuid_of(number: int) -> str:
    return f"3f597b0b-769d-499a-f2cb-d47b93f3{number:04x}"


@dataclass(eq=False)
class Slice:
    """A MIG slice of a board."""

    uuid: str
    multiprocessors: int
    memory_mib: int
    gpu_slices: int = 1
    compute_slices: int = 1
    board: Board | None = None


@dataclass(eq=False)
class Board:
    """One board as NVML knows it. ``slices`` not None is MIG mode."""

    number: int = 0
    name: Any = "NVIDIA H200"
    pci_device: int = 0x233510DE
    slices: list[Slice] | None = None
    reasons: int = 0
    processes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in self.slices or ():
            each.board = self

    @property
    def uuid(self) -> str:
        return f"GPU-{uuid_of(self.number)}"

    @property
    def address(self) -> str:
        return f"0000007F:{0xC0 + self.number:02X}:00.0"


class FakeNvml:
    """NVML over ``boards``, in this order. ``failing`` names calls and what they raise; ``answers`` what others give.

    A call outside initialise and shut down is an error, and so is a second initialise: a query keeps nothing open.
    """

    def __init__(
        self, *boards: Board, failing: Mapping[str, BaseException] | None = None, **answers: Callable[..., Any]
    ) -> None:
        self.boards, self.failing, self.answers = boards, dict(failing or {}), answers
        self.open, self.calls = 0, []  # type: tuple[int, list[str]]

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("nvml"):
            return found

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.failing:
                raise self.failing[name]
            if name not in ("nvmlInit", "nvmlShutdown") and self.open != 1:
                raise NVMLError(f"{name} while {self.open} times initialised")
            return self.answers.get(name, found)(*args)

        return call

    def nvmlInit(self) -> None:
        if self.open:
            raise NVMLError("initialised twice")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return "580.159.04"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return self._find(lambda each: each.uuid == uuid)

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> Any:
        return self._find(lambda each: getattr(each, "address", "") == address)

    def nvmlDeviceIsMigDeviceHandle(self, handle: Any) -> Any:
        return ctypes.c_uint(isinstance(handle, Slice))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Slice) -> Any:
        return handle.board

    def nvmlDeviceGetMigMode(self, handle: Board) -> Any:
        return [int(handle.slices is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Board) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Board, index: int) -> Any:
        if handle.slices is None or index >= len(handle.slices):
            raise NVMLError("Not Found")
        return handle.slices[index]

    def nvmlDeviceGetAttributes(self, handle: Slice) -> Any:
        return SimpleNamespace(
            multiprocessorCount=handle.multiprocessors,
            memorySizeMB=handle.memory_mib,
            gpuInstanceSliceCount=handle.gpu_slices,
            computeInstanceSliceCount=handle.compute_slices,
        )

    def nvmlDeviceGetUUID(self, handle: Board | Slice) -> Any:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Any) -> Any:
        return handle.name

    def nvmlDeviceGetPciInfo(self, handle: Board) -> Any:
        return SimpleNamespace(busId=handle.address, pciDeviceId=handle.pci_device)

    def nvmlDeviceGetVbiosVersion(self, handle: Board) -> Any:
        return "96.00.A5.00.1A"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Board) -> Any:
        return 700000

    def nvmlDeviceGetEccMode(self, handle: Board) -> Any:
        return [1, 1]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Board) -> Any:
        return handle.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Board) -> Any:
        return handle.reasons

    def nvmlDeviceGetClockInfo(self, handle: Board, kind: int) -> Any:
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle: Board, sensor: int) -> Any:
        return 33

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return [SimpleNamespace(pid=pid) for pid in getattr(handle, "processes", ())]

    def _find(self, matches: Callable[[Any], bool]) -> Any:
        for each in self._all():
            if matches(each):
                return each
        raise NVMLError("Not Found")

    def _all(self) -> Iterator[Any]:
        for board in self.boards:
            yield board
            yield from board.slices or ()


FUNCTIONS = tuple(name for name in vars(FakeNvml) if name.startswith("nvml"))


class Unreachable:
    """A package that has none of NVML's functions."""
