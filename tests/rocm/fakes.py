"""An amdsmi and torch's device properties as tests describe them, under amdsmi's and torch's own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

MACHINE = "4c1f8a7b2d3e4f5061728394a5b6c7d8"


class AmdSmiException(Exception):
    """What the fake raises where the library would."""


def properties(number: int = 0, **changes: Any) -> SimpleNamespace:
    """torch's properties of an MI300X whose PCI bus ends in ``number``; a value None removes the field."""
    fields: dict[str, Any] = {
        "name": "AMD Instinct MI300X",
        "gcnArchName": "gfx942:sramecc+:xnack-",
        "major": 9,
        "minor": 4,
        "multi_processor_count": 304,
        "total_memory": 205822885888,
        "pci_domain_id": 0,
        "pci_bus_id": 0x60 + number,
        "pci_device_id": 0,
        "warp_size": 64,
        **changes,
    }
    return SimpleNamespace(**{name: value for name, value in fields.items() if value is not None})


@dataclass(eq=False)
class Processor:
    """One handle of amdsmi: a board, or one part of it."""

    number: int = 0
    hip_id: int | None = None
    node_id: int | None = None
    part: int = 0
    compute: str = "SPX"
    memory: str = "NPS1"
    market_name: Any = "AMD Instinct MI300X"
    device: Any = "0x74a1"
    violations: dict[str, Any] = field(default_factory=dict)
    processes: list[int] = field(default_factory=list)


def parts(number: int, first: int, **fields: Any) -> list[Processor]:
    """Board ``number`` in CPX: eight parts at one address, numbered from ``first`` by the run time."""
    made = [Processor(number, hip_id=first + n, node_id=first + n + 2, part=n, compute="CPX") for n in range(8)]
    for each in made:
        each.__dict__.update(fields)
    return made


class FakeSmi:
    """amdsmi over ``processors``, in this order. ``failing`` names calls and what they raise; ``answers`` others.

    A call outside initialise and shut down is an error, and so is a second initialise: a query keeps nothing open.
    """

    class AmdSmiClkType(IntEnum):
        GFX = 1
        MEM = 5

    class AmdSmiTemperatureType(IntEnum):
        HOTSPOT = 1

    class AmdSmiTemperatureMetric(IntEnum):
        CURRENT = 0

    def __init__(
        self,
        *processors: Processor,
        failing: Mapping[str, BaseException] | None = None,
        **answers: Callable[..., Any],
    ) -> None:
        self.processors, self.failing, self.answers = processors, dict(failing or {}), answers
        self.open, self.calls = 0, []  # type: tuple[int, list[str]]

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("amdsmi_"):
            return found

        def call(*args: Any) -> Any:
            self.calls.append(name)
            print(f"{name} is chatty")
            if name in self.failing:
                raise self.failing[name]
            if name not in ("amdsmi_init", "amdsmi_shut_down") and self.open != 1:
                raise AmdSmiException(f"{name} while {self.open} times initialised")
            return self.answers.get(name, found)(*args)

        return call

    def amdsmi_init(self) -> None:
        if self.open:
            raise AmdSmiException("initialised twice")
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> Any:
        return list(self.processors)

    def amdsmi_get_gpu_device_bdf(self, handle: Processor) -> Any:
        return f"0000:{0x60 + handle.number:02x}:00.{handle.part}"

    def amdsmi_get_gpu_enumeration_info(self, handle: Processor) -> Any:
        if handle.hip_id is None:
            raise AmdSmiException("not supported")
        return {"hip_id": handle.hip_id}

    def amdsmi_get_gpu_kfd_info(self, handle: Processor) -> Any:
        return {
            "node_id": "N/A" if handle.node_id is None else handle.node_id,
            "current_partition_id": handle.part,
        }

    def amdsmi_get_gpu_asic_info(self, handle: Processor) -> Any:
        return {"market_name": handle.market_name, "vendor_id": "0x1002", "device_id": handle.device}

    def amdsmi_get_gpu_driver_info(self, handle: Processor) -> Any:
        return {"driver_name": "amdgpu", "driver_version": "6.10.5", "driver_date": "N/A"}

    def amdsmi_get_gpu_compute_partition(self, handle: Processor) -> Any:
        return handle.compute

    def amdsmi_get_gpu_memory_partition(self, handle: Processor) -> Any:
        return handle.memory

    def amdsmi_get_gpu_vbios_info(self, handle: Processor) -> Any:
        return {"name": "NAVI", "version": "022.040.003"}

    def amdsmi_get_power_cap_info(self, handle: Processor) -> Any:
        return {"power_cap": 750000000}

    def amdsmi_get_clock_info(self, handle: Processor, kind: Any) -> Any:
        return {"clk": {self.AmdSmiClkType.GFX: 2100, self.AmdSmiClkType.MEM: 1300}[kind]}

    def amdsmi_get_temp_metric(self, handle: Processor, sensor: Any, metric: Any) -> Any:
        return 41

    def amdsmi_get_violation_status(self, handle: Processor) -> Any:
        return handle.violations

    def amdsmi_get_gpu_process_list(self, handle: Processor) -> Any:
        return [{"name": "python", "pid": pid, "mem": 0} for pid in handle.processes]


FUNCTIONS = tuple(name for name in vars(FakeSmi) if name.startswith("amdsmi_"))


class Unreachable:
    """A package that has none of amdsmi's functions."""
