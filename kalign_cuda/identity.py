"""Which NVIDIA device this is, and in what state.

torch names the device, because only the run time knows what CUDA_VISIBLE_DEVICES, a container and MIG left of the
machine; NVML and the kernel's files enrich what torch says, matched by UUID, then by PCI address, never by index: NVML
counts in PCI order and ignores the variable. Every call is guarded by itself, because drivers, WSL and old packages
each lack some; what cannot be read is ``unknown`` and nothing raises. NVML is initialised and shut down per query,
under a lock and with a deadline, and no handle is kept: handles do not survive a fork or a lost board.

Imports neither torch nor triton nor ``kalign_core.hal``; ``pynvml`` only inside ``library``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kalign_core.isolate import attempt
from kalign_core.records import Condition, Identity

T = TypeVar("T")
Fields = tuple[tuple[str, str | int], ...]
log = logging.getLogger("kalign")

LIMIT_S = 2.0
UNKNOWN = "unknown"
# Bits of the clock event reasons. The software power cap is recorded only: under large matmuls it is the normal state.
SPOILING = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
POWER_CAP = 0x4
SM_CLOCK, MEMORY_CLOCK, GPU_SENSOR = 1, 2, 0

_lock = threading.Lock()
_stuck: list[threading.Thread] = []


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
    seen = _query(nvml, lambda library: _seen(library, properties), _Seen())
    uuid, address, name = _uuid(properties), _address(properties), text(_read(properties, "name"))
    key = seen.uuid or (f"GPU-{uuid}" if uuid else "")
    told_apart = (("mig", seen.mig), ("uuid", "" if key else UNKNOWN))
    return Identity(
        vendor="nvidia",
        name=name or seen.name or "NVIDIA GPU",
        key=key or f"unknown at {address or UNKNOWN}",
        pci_device_id=seen.pci_device_id or _pci_device_id(root, address or seen.pci_address) or UNKNOWN,
        must_match=(*_kind(properties), *_present(told_apart)),
        provenance=_present(
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
    return _query(nvml, lambda library: _condition(library, properties), Condition())


def driver_version(nvml: Any = None, root: Path = Path("/")) -> str:
    """The driver's version from NVML, else from ``/proc/driver/nvidia/version``, else ``unknown``. Never raises."""
    version = r"\d+\.\d+(?:\.\d+)*"
    asked = _query(nvml, lambda library: text(_ask(library, "nvmlSystemGetDriverVersion")), "")
    if re.fullmatch(version, asked):
        return asked
    found = re.search(rf"Kernel Module.*?\s({version})\s", _file(root, "/proc/driver/nvidia/version") + " ")
    return found.group(1) if found else UNKNOWN


def arch_of(properties: Any) -> str:
    """``sm_90``, or an empty string where torch does not say."""
    major, minor = _number(_read(properties, "major")), _number(_read(properties, "minor"))
    return "" if major is None or minor is None else f"sm_{major}{minor}"


def text(value: object) -> str:
    """A name as one clean line of at most 80 characters; empty where it is absent, no text, or garbage.

    Drivers and packages disagree on bytes and text, pad with NUL, and have returned bytes that are no text at all.
    """
    if isinstance(value, (bytes, bytearray)):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return ""
    line = " ".join(value.split("\0", 1)[0].split())
    readable = line.isprintable() and "\ufffd" not in line
    return line[:80] if readable and line.lower() not in ("n/a", "none", UNKNOWN) else ""


# --- how it is asked ----------------------------------------------------------------------------------------------


def _query(nvml: Any, read: Callable[[Any], T], nothing: T) -> T:
    """``read(nvml)`` between one initialise and one shut down, or ``nothing`` where that fails or takes ``LIMIT_S``."""
    answer: list[T] = []

    def work() -> None:
        module, reason = (nvml, "") if nvml is not None else library()
        if module is None:
            _announce(reason)
            return
        if not _lock.acquire(timeout=LIMIT_S):
            return
        try:
            if attempt(module.nvmlInit).error is None:
                outcome = attempt(read, module)
                answer.extend([outcome.value] if outcome.error is None else [])
                _ask(module, "nvmlShutdown")
        finally:
            _lock.release()

    if any(worker.is_alive() for worker in _stuck):
        return nothing
    worker = threading.Thread(target=attempt, args=(work,), name="kalign-nvml", daemon=True)
    if attempt(worker.start).error is not None:  # no thread to be had, as while the interpreter ends
        return nothing
    worker.join(LIMIT_S)
    if worker.is_alive():
        _stuck[:] = [worker]
        _announce(f"NVML has not answered within {LIMIT_S:g} s; going on without it")
        return nothing
    return answer[0] if answer else nothing


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _stuck.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _announce(reason: str) -> None:
    log.warning("%s", reason)


def _ask(library: Any, function: str, *args: Any) -> Any:
    """What ``function`` of the library answers, or None where it is missing or raises anything."""
    outcome = attempt(lambda: getattr(library, function)(*args))
    if outcome.error is not None:
        log.debug("%s: %s", function, outcome.reason)
    return outcome.value


def _read(value: Any, name: str) -> Any:
    """The attribute ``name`` of something that may lack it or raise."""
    return attempt(getattr, value, name, None).value


def _number(value: Any) -> int | None:
    """``value`` where it is a sensible count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else None


def _kind(properties: Any) -> Fields:
    """What torch says of the kind of device: architecture, unit count, memory."""
    memory = _number(_read(properties, "total_memory"))
    return (
        ("arch", arch_of(properties) or UNKNOWN),
        ("multiprocessors", _number(_read(properties, "multi_processor_count")) or UNKNOWN),
        ("memory_gib", memory // 2**30 if memory else UNKNOWN),
    )


def _present(fields: Fields) -> Fields:
    return tuple((name, value) for name, value in fields if value)


def _address(properties: Any) -> str:
    """``00000000:06:00.0`` as nvidia-smi prints it, or an empty string where torch does not say."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    parts = [number for name in names if (number := _number(_read(properties, name))) is not None]
    if len(parts) < len(names):
        return ""
    return "{:08X}:{:02X}:{:02X}.0".format(*parts)


def _file(root: Path, path: str) -> str:
    """Text of a small file below ``root``, or an empty string."""
    outcome = attempt(lambda: (root / path.lstrip("/")).read_bytes())
    return outcome.value.decode("utf-8", "replace").strip() if outcome.error is None else ""


def _pci_device_id(root: Path, address: str) -> str:
    """``10de:2335`` from the kernel's device files, or an empty string."""
    if not address:
        return ""
    folder = f"/sys/bus/pci/devices/{address.lower()[-12:]}"
    parts = [_file(root, f"{folder}/{name}").removeprefix("0x") for name in ("vendor", "device")]
    return ":".join(parts) if all(re.fullmatch(r"[0-9a-f]{4}", part) for part in parts) else ""


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


def _uuid(properties: Any) -> str:
    """torch's UUID without a prefix, or an empty string where it is absent, malformed or all zero."""
    found = re.search(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(_read(properties, "uuid")).lower())
    return found.group(0) if found and found.group(0).strip("0-") else ""


def _locate(nvml: Any, properties: Any) -> tuple[Any, Any]:
    """The handles of the device and of its board: the same where there is no MIG, (None, board) where slices of the
    board cannot be told apart, (None, None) where NVML does not know it."""
    uuid, address = _uuid(properties), _address(properties)
    asked = [("nvmlDeviceGetHandleByUUID", f"{kind}-{uuid}") for kind in ("GPU", "MIG") if uuid]
    asked += [("nvmlDeviceGetHandleByPciBusId", address)] if address else []
    found = (_ask(nvml, function, name) for function, name in asked)
    handle = next((handle for handle in found if handle is not None), None)
    if handle is None:
        return None, None
    if _is_slice(nvml, handle):
        return handle, _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    mode = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    if mode and mode[0]:
        return _slice(nvml, handle, properties), handle
    return handle, handle


def _is_slice(nvml: Any, handle: Any) -> bool:
    return bool(_ask(nvml, "nvmlDeviceIsMigDeviceHandle", handle))  # a c_uint, which is true even as an object


def _slice(nvml: Any, board: Any, properties: Any) -> Any:
    """The one slice of ``board`` with the units and about the memory that torch sees, or None where several have."""
    units = _number(_read(properties, "multi_processor_count"))
    memory = _number(_read(properties, "total_memory")) or 0
    fitting = []
    for position in range(_number(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", board)) or 0):
        handle = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", board, position)
        attributes = None if handle is None else _ask(nvml, "nvmlDeviceGetAttributes", handle)
        size = (_number(_read(attributes, "memorySizeMB")) or 0) * 2**20
        if _read(attributes, "multiprocessorCount") == units and abs(size - memory) <= size // 10:
            fitting.append(handle)
    return fitting[0] if len(fitting) == 1 else None


def _profile(nvml: Any, handle: Any) -> str:
    """``1g.18gb``, or ``1c.2g.35gb`` where a slice is shared, from what NVML says of the slice."""
    attributes = _ask(nvml, "nvmlDeviceGetAttributes", handle)
    gpu = _number(_read(attributes, "gpuInstanceSliceCount"))
    compute = _number(_read(attributes, "computeInstanceSliceCount"))
    size = _number(_read(attributes, "memorySizeMB"))
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
    named = text(_ask(nvml, "nvmlDeviceGetUUID", handle)) if handle is not None and (sliced or not uuid) else ""
    pci = _ask(nvml, "nvmlDeviceGetPciInfo", board if board is not None else handle)
    combined = _number(_read(pci, "pciDeviceId"))
    milliwatts = _number(_ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", board))
    ecc = _ask(nvml, "nvmlDeviceGetEccMode", board)
    return _Seen(
        uuid=named or (f"GPU-{uuid}" if uuid and not sliced else ""),
        mig="" if not sliced else UNKNOWN if handle is None else _profile(nvml, handle),
        name=text(_ask(nvml, "nvmlDeviceGetName", handle if handle is not None else board)),
        pci_address=text(_read(pci, "busId")),
        pci_device_id=f"{combined & 0xFFFF:04x}:{combined >> 16:04x}" if combined else "",
        vbios=text(_ask(nvml, "nvmlDeviceGetVbiosVersion", board)),
        power_limit_w=round((milliwatts or 0) / 1000),
        ecc=("off", "on")[bool(ecc[0])] if isinstance(ecc, (list, tuple)) and ecc else "",
    )


def _condition(nvml: Any, properties: Any) -> Condition:
    handle, board = _locate(nvml, properties)
    asked = board if board is not None else handle
    if asked is None:
        return Condition()
    reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", asked)
    if reasons is None:  # the same call under the name it had before driver 535
        reasons = _ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", asked)
    bits = _number(reasons) or 0
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", asked if handle is None else handle)
    return Condition(
        sm_clock_mhz=_number(_ask(nvml, "nvmlDeviceGetClockInfo", asked, SM_CLOCK)),
        memory_clock_mhz=_number(_ask(nvml, "nvmlDeviceGetClockInfo", asked, MEMORY_CLOCK)),
        temperature_c=_number(_ask(nvml, "nvmlDeviceGetTemperature", asked, GPU_SENSOR)),
        throttle=tuple(name for bit, name in SPOILING.items() if bits & bit),
        power_capped=bool(bits & POWER_CAP),
        foreign_processes=_foreign(processes),
    )


def _foreign(processes: Any) -> int | None:
    """How many processes are not ours, or None where the list may be another container's view.

    Inside a container the driver lists no process, or all of them under numbers of the host. Where our own number is
    missing one of the listed may be us, so that only the others are certainly foreign.
    """
    if not isinstance(processes, (list, tuple)):
        return None
    numbers = {number for p in processes if (number := _number(_read(p, "pid"))) is not None}
    if os.getpid() in numbers:
        return len(numbers) - 1
    return len(numbers) - 1 if len(numbers) > 1 else None
