"""The ROCm platform: what differs from other devices that torch drives, which is who a device is and what it can take.

Streams, graphs, timing and launching are ``TorchGpuPlatform``'s. A device's identity is read when it is first needed,
and again after a fork. torch and triton are imported inside methods, so that reading this file costs nothing.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from kalign_core.driver_library import UNKNOWN
from kalign_core.hal.torch_gpu import TorchGpuPlatform
from kalign_core.isolate import attempt
from kalign_core.records import Condition, DeviceModel, Identity, Toolchain
from kalign_rocm import identity, limits


class RocmPlatform(TorchGpuPlatform):
    """AMD devices through torch and Triton."""

    name: ClassVar[str] = "rocm"
    device_type: ClassVar[str] = "cuda"  # torch gives AMD devices this name too
    launch_options: ClassVar[frozenset[str]] = limits.LAUNCH_OPTIONS

    def __init__(self) -> None:
        self._identities: dict[tuple[int, int], Identity] = {}
        self._drivers: dict[int, str] = {}

    def identity(self, device: int) -> Identity:
        """Which device ``device`` is: machine, PCI address and partition. Read once per process."""
        process = os.getpid()
        if (process, device) not in self._identities:
            found, driver = identity.with_driver(_properties(device), index=device)
            self._identities[process, device] = found
            self._drivers.setdefault(process, driver)
        return self._identities[process, device]

    def toolchain(self, device: int) -> Toolchain:
        """Driver, HIP, torch, triton, its code generator, and the variables and switches that may change bits."""
        import torch

        from kalign_core.cache.fingerprint import bit_flags, versions

        process = os.getpid()
        if process not in self._drivers:
            self._drivers[process] = identity.driver_version()
        return Toolchain.of(
            driver=self._drivers[process],
            hip=torch.version.hip or UNKNOWN,
            llvm=_code_generator(),
            **versions(),
            **bit_flags(os.environ),
        )

    def model(self, device: int) -> DeviceModel:
        """The limits of the architecture, with what the device itself reports in their place."""
        found = _properties(device)
        return limits.model_for(
            identity.arch_of(found),
            shared_bytes=getattr(found, "shared_memory_per_block", 0),
            units=found.multi_processor_count,
            last_level_bytes=getattr(found, "L2_cache_size", 0),
            warp_size=getattr(found, "warp_size", 0),
        )

    def condition(self, device: int) -> Condition:
        """Clocks, temperature, throttling and foreign processes, as far as amdsmi tells them."""
        return identity.condition(_properties(device), index=device)

    def compile_target(self, device: int) -> tuple[str, int | str, int]:
        """``("hip", "gfx942", 64)``."""
        return self.model(device).compile_target


def _properties(device: int) -> Any:
    import torch

    return torch.cuda.get_device_properties(device)


def _code_generator() -> str:
    """Revision of the compiler that Triton carries, or an empty string where it does not say (before 3.9)."""

    def ask() -> str:
        from triton.backends.amd.compiler import get_amd_codegen_revision

        return str(get_amd_codegen_revision())

    return str(attempt(ask).value or "")
