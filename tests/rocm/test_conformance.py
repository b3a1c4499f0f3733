"""The platform on an AMD GPU keeps to the contract that every backend has to; nothing here without one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is None:
    pytest.skip("needs an AMD GPU and a torch built for ROCm", allow_module_level=True)

from kalign_core.testing import PlatformConformance  # noqa: E402  # only where there is a device


class TestRocm(PlatformConformance):
    """Launches, times and identifies for real."""

    plugin = "kalign_rocm.plugin"
    name = "rocm"
