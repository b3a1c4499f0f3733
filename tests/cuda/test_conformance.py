"""The platform on an NVIDIA GPU keeps to the contract that every backend has to; nothing here without one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

from kalign_core.testing import PlatformConformance  # noqa: E402  # only where there is a device


class TestCuda(PlatformConformance):
    """Launches, times and identifies for real."""

    plugin = "kalign_cuda.plugin"
    name = "cuda"
