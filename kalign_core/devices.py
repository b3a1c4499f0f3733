"""Frozen values about devices: what one can take, which one it is, which toolchain drives it, in what state it is.

Part of ``records``, which gives them again; apart from it so that either is read in one sitting. Imports nothing but
the standard library.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """What one multiprocessor or compute unit holds at a time: what an estimate of occupancy needs.

    ``warps`` and ``blocks`` are the most it holds. ``shared_bytes`` are given out in steps of ``shared_step_bytes``,
    ``reserved_bytes`` more to each block than it asked for. ``registers`` lie in ``partitions`` equal parts and are
    given out to a warp in steps of ``register_step``, counted over all of its lanes.
    """

    warps: int
    blocks: int
    shared_bytes: int
    shared_step_bytes: int
    registers: int
    register_step: int
    partitions: int = 4
    reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Limits of one kind of device, as a compiler target; what can be known without the device.

    ``backend`` is Triton's (``cuda``, ``hip``) or ``interpreter``; ``arch`` as users write it (``sm_90``,
    ``gfx942``). A limit of 0 means there is none. ``last_level_bytes`` is the cache a cold timing must rotate past,
    ``unit`` what one of its ``units`` holds, where that is known. ``scripted`` where launches are interpreted and yet
    times, and what they depend on, are a device's.
    """

    backend: str
    arch: str
    warp_size: int
    max_warps: int
    shared_bytes: int
    registers_per_block: int = 65536
    registers_per_thread: int = 255
    units: int = 0
    last_level_bytes: int = 0
    tmem_columns: int = 0
    max_ctas: int = 1
    unit: Unit | None = None
    scripted: bool = False

    @property
    def interpreted(self) -> bool:
        """Whether kernels run under Triton's interpreter: on the host, some milliseconds for each program."""
        return self.backend == "interpreter"

    @property
    def measurable(self) -> bool:
        """Whether a clock can rank launches there: an interpreter takes its time whatever the launch options are."""
        return self.scripted or not self.interpreted

    @property
    def target(self) -> str:
        """``cuda:sm_90``: how a target is written on the command line."""
        return f"{self.backend}:{self.arch}"

    @property
    def compile_target(self) -> tuple[str, int | str, int]:
        """Backend, architecture and warp size as Triton takes them: an architecture ``sm_90`` is the number 90."""
        number = self.arch.rpartition("_")[2]
        return self.backend, int(number) if number.isdecimal() else self.arch, self.warp_size


@dataclass(frozen=True, slots=True)
class Identity:
    """Which device this is. Empty strings are absent fields, ``unknown`` is a field that could not be read.

    ``vendor`` and ``name`` are for readers; ``key`` is what names the device (a UUID, or machine and PCI address)
    and selects its file; ``must_match`` are further fields that an entry's device has to share; ``provenance`` is
    recorded and never compared.
    """

    vendor: str
    name: str
    key: str
    pci_device_id: str = ""
    must_match: tuple[tuple[str, str | int], ...] = ()
    provenance: tuple[tuple[str, str | int], ...] = ()

    @property
    def known(self) -> bool:
        """Whether decisions for this device may be stored: nothing that names it is unknown."""
        values = (self.key, self.pci_device_id, *(v for _, v in self.must_match))
        return bool(self.key) and "unknown" not in values

    @property
    def file_stem(self) -> str:
        """``nvidia-10de2335-3f9a01c2``: vendor, PCI device id where there is one, eight hex digits of the key."""
        digest = hashlib.sha256(self.key.encode()).hexdigest()[:8]
        pci = "".join(c for c in self.pci_device_id.lower() if c in "0123456789abcdef")
        return "-".join(part for part in (self.vendor, pci, digest) if part)


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The facts an entry is valid for: driver, run time, torch, triton, their code generators, bit-affecting flags.

    Sorted name and value pairs; two toolchains are equal when every fact is. A value ``unknown`` equals nothing.
    """

    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, **facts: str) -> Toolchain:
        """A toolchain of the facts that are not empty."""
        return cls(tuple(sorted((k, v) for k, v in facts.items() if v)))

    @property
    def known(self) -> bool:
        return all(value != "unknown" for _, value in self.facts)

    @property
    def id(self) -> str:
        """``t`` and eight hex digits: the name of the table that holds these facts in a file."""
        return "t" + hashlib.sha256(repr(self.facts).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Condition:
    """The state of a device while it was measured; None where it cannot be read.

    ``throttle`` names reasons that spoil a sample, ``power_capped`` the software power cap, which is recorded only.
    ``foreign_processes`` counts other processes on the device.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    power_capped: bool = False
    foreign_processes: int | None = None
