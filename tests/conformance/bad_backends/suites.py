"""The suites, run on the bad backends by ``test_bad_backends``. No test file by name: most of it has to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kalign_core.hal.base import Launch, Platform
from kalign_core.records import Identity
from kalign_core.testing import (
    CheckConformance,
    DescribedPlatformConformance,
    PlatformConformance,
    PluginConformance,
    StoreConformance,
    StrategyConformance,
)
from kalign_core.verifier.selftest import PANEL
from tests.conformance.bad_backends.platforms import ByModelPlatform

PLUGIN = "tests.conformance.bad_backends.plugin"


class TestLate(PlatformConformance):
    plugin = PLUGIN
    name = "late"


class TestBound(PlatformConformance):
    plugin = PLUGIN
    name = "bound"


class TestByModel(DescribedPlatformConformance):
    plugin = PLUGIN
    name = "by_model"

    @pytest.fixture
    def twins(self) -> tuple[Identity, ...]:
        """Two machines that differ in their ids, which this platform does not look at."""
        return tuple(ByModelPlatform().identity(-1) for _ in range(2))


class TestByNumber(DescribedPlatformConformance):
    plugin = PLUGIN
    name = "by_number"


class TestCurious(DescribedPlatformConformance):
    plugin = PLUGIN
    name = "curious"


class TestForgetful(StoreConformance):
    plugin = PLUGIN
    store = "forgetful"


class TestFirst(StrategyConformance):
    plugin = PLUGIN
    strategy = "first"


class TestUnsure(StrategyConformance):
    plugin = PLUGIN
    strategy = "unsure"


class TestLenient(CheckConformance):
    plugin = "tests.conformance.bad_backends.lenient"


class TestBlind(CheckConformance):
    plugin = "tests.conformance.bad_backends.blind"

    @pytest.fixture
    def bad_launches(self) -> Mapping[str, Callable[[], Launch]]:
        """The fault that this check was written for."""
        return {name: PANEL[name] for name in ("reverses the order of a sum",)}


HOPELESS = "tests.conformance.bad_backends.hopeless"


class TestHopelessPlatform(PlatformConformance):
    plugin = HOPELESS
    name = "hopeless"

    @pytest.fixture
    def work(self) -> tuple[int, int]:
        """The platform cannot be asked what it is."""
        return 1, 100

    @pytest.fixture
    def unreadable(self, platform: Platform) -> Identity:
        """What the platform says where nothing can be read."""
        return platform.identity(0)


class TestHopelessStore(StoreConformance):
    plugin = HOPELESS
    store = "list"


class TestHopelessStrategy(StrategyConformance):
    plugin = HOPELESS
    strategy = "second"


class TestHopelessChecks(CheckConformance):
    plugin = HOPELESS


class TestNoPlugin(PluginConformance):
    plugin = "tests.conformance.bad_backends.no_plugin"
