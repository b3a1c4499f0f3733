"""Conformance suites: what a platform, a store, a search strategy and a check have to do, as tests to inherit.

Whoever writes a plugin inherits a class, names the plugin's module and runs pytest; docs/writing-a-backend.md starts
from there. The suites are how kalign's own platforms, stores, strategies and checks are held to their contract too.
They look only at what ``hal/base.py``, ``cache/base.py``, ``tuner/search.py`` and ``records.py`` promise.

pytest is needed by whoever runs them and by nobody else, so that kalign does not depend on it. Importing this package
imports neither pytest nor a suite, and selects no platform: fresh processes import it to watch a plugin load.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from kalign_core.errors import MissingPackage

if TYPE_CHECKING:
    from kalign_core.testing.checks import CheckConformance as CheckConformance
    from kalign_core.testing.platform import DescribedPlatformConformance as DescribedPlatformConformance
    from kalign_core.testing.platform import PlatformConformance as PlatformConformance
    from kalign_core.testing.plugin import PluginConformance as PluginConformance
    from kalign_core.testing.store import StoreConformance as StoreConformance
    from kalign_core.testing.strategy import StrategyConformance as StrategyConformance

_HOMES = {
    "CheckConformance": "kalign_core.testing.checks",
    "DescribedPlatformConformance": "kalign_core.testing.platform",
    "PlatformConformance": "kalign_core.testing.platform",
    "PluginConformance": "kalign_core.testing.plugin",
    "StoreConformance": "kalign_core.testing.store",
    "StrategyConformance": "kalign_core.testing.strategy",
}
_ASSERTING = ("identity", "launching", "records", "store_files", "timing")
_SUITES = (*_HOMES.values(), *(f"kalign_core.testing.{name}" for name in _ASSERTING))
__all__ = sorted(_HOMES)  # computed so that it cannot drift


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("pytest") is None:
        raise MissingPackage(
            f"kalign_core.testing.{name} is a pytest class, and pytest is not installed",
            why="kalign needs pytest for nothing else, and so does not install it",
            fix="pip install pytest",
        )
    import pytest

    pytest.register_assert_rewrite(*(name for name in _SUITES if name not in sys.modules))
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
