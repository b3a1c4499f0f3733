"""Which AMD device this is, and in what state.

torch names the device, because only the run time knows what HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and partitions
left of the machine; amdsmi and the kernel's files enrich what torch says, matched by PCI address: amdsmi counts in PCI
order and ignores the variables. Only where partitions share one address does the run time's own number decide, and
where that is not certain nothing is matched. What cannot be read is ``unknown`` and nothing raises; how that is kept is
``kalign_core.driver_library``'s.

Imports neither torch nor triton nor ``kalign_core.hal``; ``amdsmi`` only inside ``library``.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kalign_core.driver_library import (
    UNKNOWN,
    Fields,
    Library,
    ask,
    attribute,
    file_text,
    foreign_processes,
    number,
    pci_device_id,
    pci_location,
    present,
    text,
)
from kalign_core.isolate import attempt
from kalign_core.records import Condition, Identity

# Violations that spoil a sample. The package power cap is recorded only: under large matmuls it is the normal state.
SPOILING = {
    "active_prochot_thrm": "processor hot",
    "active_socket_thrm": "socket thermal",
    "active_vr_thrm": "regulator thermal",
    "active_hbm_thrm": "memory thermal",
}
POWER_CAP = "active_ppt_pwr"
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


# --- what is asked ------------------------------------------------------------------------------------------------


def library() -> tuple[Any, str]:
    """The amdsmi module, or None with the reason in words. Loads the driver's library as a part of the import."""
    outcome = attempt(importlib.import_module, "amdsmi")
    if outcome.error is not None:
        return None, f"amdsmi cannot be used: {outcome.reason}; install the amdsmi package of the ROCm release in use"
    if not hasattr(outcome.value, "amdsmi_get_processor_handles"):
        return None, "the module amdsmi is not AMD's; type: pip uninstall -y amdsmi; pip install 'kalign[rocm]'"
    return outcome.value, ""


def identity(
    properties: Any,
    smi: Any = None,
    root: Path = Path("/"),
    index: int = 0,
    variables: Mapping[str, str] | None = None,
) -> Identity:
    """Which device torch's ``properties`` (``torch.cuda.get_device_properties``) describe. Never raises.

    The key is machine, PCI address, PCI device id and partition: AMD's UUID is shared by the partitions of a board
    and its market name varies. ``smi`` is the amdsmi module (the installed one by default), ``root`` the folder under
    which ``/sys`` and ``/etc`` are looked up, ``index`` torch's number of the device under the masks in ``variables``.
    """
    masks = os.environ if variables is None else variables
    seen = AMDSMI.query(lambda library: _seen(library, properties, index, masks), _Seen(), smi)
    return _identity(properties, seen, root, index)


def with_driver(properties: Any, smi: Any = None, root: Path = Path("/"), index: int = 0) -> tuple[Identity, str]:
    """``identity`` and ``driver_version`` in one query: each begins with the whole of amdsmi's initialisation."""

    def read(library: Any) -> tuple[_Seen, str]:
        return _seen(library, properties, index, os.environ), text(attempt(_driver, library).value)

    seen, driver = AMDSMI.query(read, (_Seen(), ""), smi)
    return _identity(properties, seen, root, index), driver or _driver_in_kernel(root)


def _identity(properties: Any, seen: _Seen, root: Path, index: int) -> Identity:
    address, name = _address(properties) or seen.pci_address, text(attribute(properties, "name"))
    machine, told_apart = _machine(root), _partition(seen, root, address)
    pci_id = seen.pci_device_id or pci_device_id(root, address and f"{address}.0") or UNKNOWN
    if not machine or not address:
        told_apart = (*told_apart, ("pci", UNKNOWN))
    partition = "-".join(str(value) for _, value in told_apart)
    return Identity(
        vendor="amd",
        name=name or seen.name or "AMD GPU",
        key="/".join(part for part in (machine, address or f"device {index}", pci_id, partition) if part),
        pci_device_id=pci_id,
        must_match=(*_kind(properties), *told_apart),
        provenance=present(
            (
                ("market_name", seen.name if seen.name != name else ""),
                ("pci_bus_id", address),
                ("vbios", seen.vbios),
                ("power_limit_w", seen.power_limit_w),
            )
        ),
    )


def condition(
    properties: Any, smi: Any = None, index: int = 0, variables: Mapping[str, str] | None = None
) -> Condition:
    """Clocks, temperature, throttling and foreign processes of the device torch calls ``properties``. Never raises."""
    masks = os.environ if variables is None else variables
    return AMDSMI.query(lambda library: _condition(library, properties, index, masks), Condition(), smi)


def driver_version(smi: Any = None, root: Path = Path("/")) -> str:
    """The driver's version from amdsmi, else from ``/sys/module/amdgpu``, else ``unknown``. Never raises.

    The driver inside the kernel has no version of its own; it is named by the kernel's release.
    """
    return AMDSMI.query(_driver, "", smi) or _driver_in_kernel(root)


def _driver_in_kernel(root: Path) -> str:
    """The driver's version as the kernel's files tell it, or ``unknown``."""
    version = text(file_text(root, "/sys/module/amdgpu/version"))
    release = text(file_text(root, "/proc/sys/kernel/osrelease"))
    inside_kernel = f"kernel {release}" if release and attempt((root / "sys/module/amdgpu").exists).value else UNKNOWN
    return version or inside_kernel


def arch_of(properties: Any) -> str:
    """``gfx942``, or an empty string where torch does not say."""
    return text(attribute(properties, "gcnArchName")).split(":", 1)[0]


AMDSMI = Library("amdsmi", lambda: library(), "amdsmi_init", "amdsmi_shut_down")


def _field(field: str, library: Any, function: str, *args: Any) -> Any:
    """One field of the table that ``function`` answers, or None."""
    answer = ask(library, function, *args)
    return answer.get(field) if isinstance(answer, dict) else None


def _kind(properties: Any) -> Fields:
    """What torch says of the kind of device: architecture, unit count, memory."""
    memory = number(attribute(properties, "total_memory"))
    return (
        ("arch", arch_of(properties) or UNKNOWN),
        ("units", number(attribute(properties, "multi_processor_count")) or UNKNOWN),
        ("memory_gib", memory // 2**30 if memory else UNKNOWN),
    )


def _address(properties: Any) -> str:
    """``0000:05:00``, as all partitions of a board share it, or an empty string where torch does not say."""
    found = pci_location(properties)
    return "{:04x}:{:02x}:{:02x}".format(*found) if found else ""


def _machine(root: Path) -> str:
    """The machine id, else the host name, else nothing: an AMD board has no UUID that could be relied on."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        found = text(file_text(root, path))
        if found and found.strip("0"):
            return found
    return text(attempt(socket.gethostname).value)


def _partition(seen: _Seen, root: Path, address: str) -> Fields:
    """Compute partition, memory partition and the number of the part, as far as the board has them.

    A board that is divided and whose parts cannot be told apart has an ``unknown`` number.
    """
    folder = f"/sys/bus/pci/devices/{address}.0"
    compute = seen.compute_partition or text(file_text(root, f"{folder}/current_compute_partition")).upper()
    memory = seen.memory_partition or text(file_text(root, f"{folder}/current_memory_partition")).upper()
    part = UNKNOWN if seen.partition_id is None else str(seen.partition_id)
    part = "" if compute in ("", "SPX") else part
    return present((("compute_partition", compute), ("memory_partition", memory), ("partition", part)))


# --- what amdsmi says ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """What amdsmi says of one device; empty where it says nothing."""

    compute_partition: str = ""
    memory_partition: str = ""
    partition_id: int | None = None
    name: str = ""
    pci_address: str = ""
    pci_device_id: str = ""
    vbios: str = ""
    power_limit_w: int = 0


def _unmasked(index: int, variables: Mapping[str, str]) -> int | None:
    """The number that torch's device ``index`` has without masks, or None where the masks are no plain numbers.

    The ROCr mask comes first; the HIP mask counts among what it leaves.
    """
    hip = next((variables[name] for name in MASKS if variables.get(name)), None)
    for mask in (hip, variables.get("ROCR_VISIBLE_DEVICES")):
        if mask is None:
            continue
        words = [word.strip() for word in mask.split(",")]
        if not all(word.isdecimal() for word in words) or index >= len(words):
            return None
        index = int(words[index])
    return index


def _bdf(smi: Any, handle: Any) -> str:
    """A handle's PCI address without its function, which on some releases numbers the partition."""
    return text(ask(smi, "amdsmi_get_gpu_device_bdf", handle)).lower().rsplit(".", 1)[0]


def _locate(smi: Any, properties: Any, index: int, variables: Mapping[str, str]) -> Any:
    """The handle of torch's device, or None where that is not certain."""
    handles = list(ask(smi, "amdsmi_get_processor_handles") or ())
    address = _address(properties)
    fitting = [handle for handle in handles if not address or _bdf(smi, handle) == address]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    wanted = _unmasked(index, variables)
    if wanted is None:
        return None
    hip = [number(_field("hip_id", smi, "amdsmi_get_gpu_enumeration_info", handle)) for handle in handles]
    if None in hip:  # before ROCm 6.4; the run time counts in the order of the kernel's nodes
        nodes = [number(_field("node_id", smi, "amdsmi_get_gpu_kfd_info", handle)) for handle in handles]
        order = sorted(node for node in nodes if node is not None)
        hip = [order.index(node) if node is not None and len(order) == len(handles) else None for node in nodes]
    named = [handle for handle, its in zip(handles, hip, strict=True) if its == wanted]
    return named[0] if len(named) == 1 and any(named[0] is handle for handle in fitting) else None


def _seen(smi: Any, properties: Any, index: int, variables: Mapping[str, str]) -> _Seen:
    handle = _locate(smi, properties, index, variables)
    if handle is None:
        return _Seen()
    asked = ("vendor_id", "device_id", "market_name")
    vendor, device, market_name = (_field(name, smi, "amdsmi_get_gpu_asic_info", handle) for name in asked)
    cap = number(_field("power_cap", smi, "amdsmi_get_power_cap_info", handle)) or 0
    return _Seen(
        compute_partition=text(ask(smi, "amdsmi_get_gpu_compute_partition", handle)).upper(),
        memory_partition=text(ask(smi, "amdsmi_get_gpu_memory_partition", handle)).upper(),
        partition_id=number(_field("current_partition_id", smi, "amdsmi_get_gpu_kfd_info", handle)),
        name=text(market_name),
        pci_address=_bdf(smi, handle),
        pci_device_id=_hexadecimal(vendor, device),
        vbios=text(_field("version", smi, "amdsmi_get_gpu_vbios_info", handle)),
        power_limit_w=cap // 10**6 if cap > 10**5 else cap,  # microwatts in some releases, watts in others
    )


def _hexadecimal(vendor: Any, device: Any) -> str:
    """``1002:74a1`` from numbers or from text such as ``0x74a1``, which depends on the release."""
    parts = [f"{part:04x}" if number(part) is not None else text(part).lower() for part in (vendor, device)]
    parts = [part.removeprefix("0x").zfill(4) for part in parts]
    return ":".join(parts) if all(re.fullmatch(r"[0-9a-f]{4}", part) and part.strip("0") for part in parts) else ""


def _driver(smi: Any) -> str:
    """The driver's version as the first device tells it: a machine has one driver."""
    handles = ask(smi, "amdsmi_get_processor_handles")
    return text(_field("driver_version", smi, "amdsmi_get_gpu_driver_info", handles[0])) if handles else ""


def _condition(smi: Any, properties: Any, index: int, variables: Mapping[str, str]) -> Condition:
    handle = _locate(smi, properties, index, variables)
    if handle is None:
        return Condition()

    def clock(kind: str) -> int | None:
        return number(
            _field("clk", smi, "amdsmi_get_clock_info", handle, attribute(attribute(smi, "AmdSmiClkType"), kind))
        )

    kinds = (("AmdSmiTemperatureType", "HOTSPOT"), ("AmdSmiTemperatureMetric", "CURRENT"))
    sensor = [attribute(attribute(smi, kind), name) for kind, name in kinds]
    heat = number(ask(smi, "amdsmi_get_temp_metric", handle, *sensor))
    violations = ask(smi, "amdsmi_get_violation_status", handle)
    active = {name for name, value in violations.items() if value is True} if isinstance(violations, dict) else set()
    return Condition(
        sm_clock_mhz=clock("GFX"),
        memory_clock_mhz=clock("MEM"),
        temperature_c=heat if heat is None or heat < 1000 else heat // 1000,  # thousandths in some releases
        throttle=tuple(name for field, name in SPOILING.items() if field in active),
        power_capped=POWER_CAP in active,
        foreign_processes=_foreign(ask(smi, "amdsmi_get_gpu_process_list", handle)),
    )


def _foreign(processes: Any) -> int | None:
    if not isinstance(processes, (list, tuple)):
        return None
    numbers = (number(process.get("pid")) for process in processes if isinstance(process, dict))
    return foreign_processes({found for found in numbers if found is not None})
