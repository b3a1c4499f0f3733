"""The two suites for platforms: the whole contract, and the part of it that needs no device."""

from __future__ import annotations

from kalign_core.testing.identity import IdentityRules
from kalign_core.testing.timing import TimerRules


class DescribedPlatformConformance(IdentityRules):
    """Everything a platform has to do before it launches: record, probe, identity, toolchain, limits, candidates.

    For machines without the device: override the fixture ``platform`` with one whose library's answers are given, and
    ``identities_elsewhere`` where a fresh process could not have them::

        class TestNpuDescribed(DescribedPlatformConformance):
            plugin = "my_package.plugin"
            name = "npu"

            @pytest.fixture
            def platform(self, monkeypatch):
                monkeypatch.setattr(identity, "library", FakeLibrary)
                return NpuPlatform()
    """


class PlatformConformance(TimerRules):
    """Everything a platform has to do, on the device at hand. Launching, timing and waiting are tried for real::

        class TestNpu(PlatformConformance):
            plugin = "my_package.plugin"
            name = "npu"

    Further fixtures to override: ``twins``, ``unreadable`` (see ``IdentityRules``), ``device``, ``models``.
    """
