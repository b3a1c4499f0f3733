"""kalign: launch parameters of GPU kernels, tuned on the device at hand without changing a bit of their results.

The public names, loaded when first used: importing this package imports neither torch nor triton nor a plugin and
touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kalign_core import hal as hal
    from kalign_core import ops as ops
    from kalign_core.api import explain as explain
    from kalign_core.api import tune as tune
    from kalign_core.api import verify as verify
    from kalign_core.api import warmup as warmup
    from kalign_core.context import declare_phase as declare_phase
    from kalign_core.context import set_mode as set_mode
    from kalign_core.context import using as using
    from kalign_core.declare import kernel as kernel
    from kalign_core.errors import KalignError as KalignError
    from kalign_core.hookspecs import hookimpl as hookimpl
    from kalign_core.ops.base import Operator as Operator
    from kalign_core.records import Config as Config

__version__ = "0.1.0"

_HOMES = {
    "Config": "kalign_core.records",
    "KalignError": "kalign_core.errors",
    "Operator": "kalign_core.ops.base",
    "declare_phase": "kalign_core.context",
    "explain": "kalign_core.api",
    "hookimpl": "kalign_core.hookspecs",
    "kernel": "kalign_core.declare",
    "set_mode": "kalign_core.context",
    "tune": "kalign_core.api",
    "using": "kalign_core.context",
    "verify": "kalign_core.api",
    "warmup": "kalign_core.api",
}
_MODULES = ("hal", "ops")

__all__ = sorted((*_HOMES, *_MODULES, "__version__"))  # computed so that it cannot drift


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kalign_core.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
