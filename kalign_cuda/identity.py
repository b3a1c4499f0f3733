"""Which NVIDIA device this is, and in what state.

torch names the device, because only the run time knows what CUDA_VISIBLE_DEVICES, a container and MIG left of the
machine; NVML and the kernel's files enrich what torch says, matched by UUID, then by PCI address, never by index: NVML
counts in PCI order and ignores the variable. What cannot be read is ``unknown`` and nothing raises; how that is kept is
``kalign_core.driver_library``'s.

Imports neither torch nor triton nor ``kalign_core.hal``; ``pynvml`` only inside ``library``.
"""

from __future__ import annotations

import importlib
import re
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

# Bits of the clock event reasons. The software power cap is recorded only: under large matmuls it is the normal state.
SPOILING = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
POWER_CAP = 0x4
VERSION = r"\d+\.\d+(?:\.\d+)*"
SM_CLOCK, MEMORY_CLOCK, GPU_SENSOR = 1, 2, 0


# --- what is asked ------------------------------------------------------------------------------------------------


def library() -> tuple[Any, str]:
    """The NVML module of nvidia-ml-py, or None with the reason in words. Loads no driver library."""
    outcome = attempt(importlib.import_module, "pynvml")
    if outcome.error is not None:
        return None, f"NVML cannot be asked: {outcome.reason}; type: pip install nvidia-ml-py"
    if not hasattr(outcome.value, "_nvmlGetFunctionPointer"):
        return None, "an old pynvml hides nvidia-ml-py; type: pip uninstall -y pynvml; pip install -U nvidia-ml-py"
    return outcome.value, ""


def identity(properties: Any, nvml: Any = None, root: Path = Path("/")) -> Identity:
    """Which device torch's ``properties`` (``torch.cuda.get_device_properties``) describe. Never raises.

    The key is the UUID, the MIG slice's where there is one. ``nvml`` is the NVML module (nvidia-ml-py's by default),
    ``root`` the folder under which ``/sys`` is looked up.
    """
    return _identity(properties, NVML.query(lambda library: _seen(library, properties), _Seen(), nvml), root)


def with_driver(properties: Any, nvml: Any = None, root: Path = Path("/")) -> tuple[Identity, str]:
    """``identity`` and ``driver_version`` in one query: each begins with the whole of NVML's initialisation."""

    def read(library: Any) -> tuple[_Seen, str]:
        return _seen(library, properties), text(attempt(_driver, library).value)

    seen, driver = NVML.query(read, (_Seen(), ""), nvml)
    return _identity(properties, seen, root), driver or _driver_in_kernel(root)


def _identity(properties: Any, seen: _Seen, root: Path) -> Identity:
    uuid, address, name = _uuid(properties), _address(properties), text(attribute(properties, "name"))
    key = seen.uuid or (f"GPU-{uuid}" if uuid else "")
    told_apart = (("mig", seen.mig), ("uuid", "" if key else UNKNOWN))
    return Identity(
        vendor="nvidia",
        name=name or seen.name or "NVIDIA GPU",
        key=key or f"unknown at {address or UNKNOWN}",
        pci_device_id=seen.pci_device_id or pci_device_id(root, _bus_address(address or seen.pci_address)) or UNKNOWN,
        must_match=(*_kind(properties), *present(told_apart)),
        provenance=present(
            (
                ("nvml_name", seen.name if seen.name != name else ""),
                ("pci_bus_id", address or seen.pci_address),
                ("vbios", seen.vbios),
                ("power_limit_w", seen.power_limit_w),
                ("ecc", seen.ecc),
            )
        ),
    )


def condition(properties: Any, nvml: Any = None) -> Condition:
    """Clocks, temperature, throttling and foreign processes of the device torch calls ``properties``. Never raises."""
    return NVML.query(lambda library: _condition(library, properties), Condition(), nvml)


def driver_version(nvml: Any = None, root: Path = Path("/")) -> str:
    """The driver's version from NVML, else from ``/proc/driver/nvidia/version``, else ``unknown``. Never raises."""
    return NVML.query(_driver, "", nvml) or _driver_in_kernel(root)


def arch_of(properties: Any) -> str:
    """``sm_90``, or an empty string where torch does not say."""
    major, minor = number(attribute(properties, "major")), number(attribute(properties, "minor"))
    return "" if major is None or minor is None else f"sm_{major}{minor}"


NVML = Library("NVML", lambda: library(), "nvmlInit", "nvmlShutdown")


def _driver_in_kernel(root: Path) -> str:
    """The driver's version as the kernel's file tells it, or ``unknown``."""
    found = re.search(rf"Kernel Module.*?\s({VERSION})\s", file_text(root, "/proc/driver/nvidia/version") + " ")
    return found.group(1) if found else UNKNOWN


def _kind(properties: Any) -> Fields:
    """What torch says of the kind of device: architecture, unit count, memory."""
    memory = number(attribute(properties, "total_memory"))
    return (
        ("arch", arch_of(properties) or UNKNOWN),
        ("multiprocessors", number(attribute(properties, "multi_processor_count")) or UNKNOWN),
        ("memory_gib", memory // 2**30 if memory else UNKNOWN),
    )


def _address(properties: Any) -> str:
    """``00000000:06:00.0`` as nvidia-smi prints it, or an empty string where torch does not say."""
    found = pci_location(properties)
    return "{:08X}:{:02X}:{:02X}.0".format(*found) if found else ""


# --- what NVML says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """What NVML says of one device; empty where it says nothing."""

    uuid: str = ""
    mig: str = ""
    name: str = ""
    pci_address: str = ""
    pci_device_id: str = ""
    vbios: str = ""
    power_limit_w: int = 0
    ecc: str = ""


def _bus_address(address: str) -> str:
    """NVML's form of a PCI address as the kernel's files have it: ``0000:06:00.0``."""
    return address.lower()[-12:]


def _uuid(properties: Any) -> str:
    """torch's UUID without a prefix, or an empty string where it is absent, malformed or all zero."""
    found = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(attribute(properties, "uuid")).lower())
    return found.group(0) if found and found.group(0).strip("0-") else ""


def _locate(nvml: Any, properties: Any) -> tuple[Any, Any]:
    """The handles of the device and of its board: the same where there is no MIG, (None, board) where slices of the
    board cannot be told apart, (None, None) where NVML does not know it."""
    uuid, address = _uuid(properties), _address(properties)
    asked = [("nvmlDeviceGetHandleByUUID", f"{kind}-{uuid}") for kind in ("GPU", "MIG") if uuid]
    asked += [("nvmlDeviceGetHandleByPciBusId", address)] if address else []
    found = (ask(nvml, function, name) for function, name in asked)
    handle = next((handle for handle in found if handle is not None), None)
    if handle is None:
        return None, None
    if _is_slice(nvml, handle):
        return handle, ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    mode = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode and mode[0]:
        return _slice(nvml, handle, properties), handle
    return handle, handle


def _is_slice(nvml: Any, handle: Any) -> bool:
    return bool(ask(nvml, "nvmlDeviceIsMigDeviceHandle", handle))  # a c_uint, which is true even as an object


def _slice(nvml: Any, board: Any, properties: Any) -> Any:
    """The one slice of ``board`` with the units and about the memory that torch sees, or None where several have."""
    units = number(attribute(properties, "multi_processor_count"))
    memory = number(attribute(properties, "total_memory")) or 0
    fitting = []
    for position in range(number(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", board)) or 0):
        handle = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", board, position)
        attributes = None if handle is None else ask(nvml, "nvmlDeviceGetAttributes", handle)
        size = (number(attribute(attributes, "memorySizeMB")) or 0) * 2**20
        if attribute(attributes, "multiprocessorCount") == units and abs(size - memory) <= size // 10:
            fitting.append(handle)
    return fitting[0] if len(fitting) == 1 else None


def _profile(nvml: Any, handle: Any) -> str:
    """``1g.18gb``, or ``1c.2g.35gb`` where a slice is shared, from what NVML says of the slice."""
    attributes = ask(nvml, "nvmlDeviceGetAttributes", handle)
    gpu = number(attribute(attributes, "gpuInstanceSliceCount"))
    compute = number(attribute(attributes, "computeInstanceSliceCount"))
    size = number(attribute(attributes, "memorySizeMB"))
    if gpu is None or size is None:
        return UNKNOWN
    shared = f"{compute}c." if compute not in (None, gpu) else ""
    return f"{shared}{gpu}g.{round(size / 1024)}gb"


def _seen(nvml: Any, properties: Any) -> _Seen:
    handle, board = _locate(nvml, properties)
    if handle is None and board is None:
        return _Seen()
    sliced = handle is not board
    uuid = _uuid(properties)
    named = text(ask(nvml, "nvmlDeviceGetUUID", handle)) if handle is not None and (sliced or not uuid) else ""
    pci = ask(nvml, "nvmlDeviceGetPciInfo", board if board is not None else handle)
    combined = number(attribute(pci, "pciDeviceId"))
    milliwatts = number(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", board))
    ecc = ask(nvml, "nvmlDeviceGetEccMode", board)
    return _Seen(
        uuid=named or (f"GPU-{uuid}" if uuid and not sliced else ""),
        mig="" if not sliced else UNKNOWN if handle is None else _profile(nvml, handle),
        name=text(ask(nvml, "nvmlDeviceGetName", handle if handle is not None else board)),
        pci_address=text(attribute(pci, "busId")),
        pci_device_id=f"{combined & 0xFFFF:04x}:{combined >> 16:04x}" if combined else "",
        vbios=text(ask(nvml, "nvmlDeviceGetVbiosVersion", board)),
        power_limit_w=round((milliwatts or 0) / 1000),
        ecc=("off", "on")[bool(ecc[0])] if isinstance(ecc, (list, tuple)) and ecc else "",
    )


def _driver(nvml: Any) -> str:
    """The driver's version, or an empty string where NVML gives none."""
    found = text(ask(nvml, "nvmlSystemGetDriverVersion"))
    return found if re.fullmatch(VERSION, found) else ""


def _condition(nvml: Any, properties: Any) -> Condition:
    handle, board = _locate(nvml, properties)
    asked = board if board is not None else handle
    if asked is None:
        return Condition()
    reasons = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", asked)
    if reasons is None:  # the same call under the name it had before driver 535
        reasons = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", asked)
    bits = number(reasons) or 0
    processes = ask(nvml, "nvmlDeviceGetComputeRunningProcesses", asked if handle is None else handle)
    return Condition(
        sm_clock_mhz=number(ask(nvml, "nvmlDeviceGetClockInfo", asked, SM_CLOCK)),
        memory_clock_mhz=number(ask(nvml, "nvmlDeviceGetClockInfo", asked, MEMORY_CLOCK)),
        temperature_c=number(ask(nvml, "nvmlDeviceGetTemperature", asked, GPU_SENSOR)),
        throttle=tuple(name for bit, name in SPOILING.items() if bits & bit),
        power_capped=bool(bits & POWER_CAP),
        foreign_processes=_foreign(processes),
    )


def _foreign(processes: Any) -> int | None:
    if not isinstance(processes, (list, tuple)):
        return None
    numbers = (number(attribute(process, "pid")) for process in processes)
    return foreign_processes({found for found in numbers if found is not None})
