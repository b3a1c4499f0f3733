"""The platform of this process: ``hal.platform``, chosen from ``hal.plugins`` as ``hal.selection`` says.

Importing this package loads the plugins and selects, once, and never raises: documentation builds and ``kalign doctor``
have to work where nothing else does. What went wrong is raised when ``hal.platform`` is read. Importing it makes no
device context and imports neither torch nor triton; reading ``hal.platform`` may do both.

Selection comes before any kernel is imported, because Triton's interpreter has to be asked for before triton is.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from typing import Any

from kalign_core import settings as _settings
from kalign_core.environment import Environment
from kalign_core.errors import KalignError, NoPlatform, PluginFault
from kalign_core.hal.base import Platform
from kalign_core.hal.select import PlatformRow, Selection, ask_for_interpreter, is_interpreted, load_platform
from kalign_core.hal.select import select as _select
from kalign_core.plugins import Plugins, load

__all__ = ["Platform", "PlatformRow", "Selection", "platform", "plugins", "selection"]

_log = logging.getLogger("kalign")
_making = threading.RLock()
_made: list[Platform] = []

plugins: Plugins
selection: Selection
platform: Platform


def __getattr__(name: str) -> Any:
    if name == "platform":
        return _platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _platform() -> Platform:
    """The one Platform of this process; raises ``NoPlatform``, or the error that kept the choice from being made."""
    with _making:
        if not _made:
            if _error is not None:
                raise _error.with_traceback(None)
            if selection.record is None:
                raise NoPlatform(selection.why, fix="kalign doctor prints what was looked for")
            _made.append(load_platform(selection.record))
        return _made[0]


def _renew_lock() -> None:
    """A child of fork must not wait for a lock its parent held; what was made stays."""
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def _choose() -> tuple[Plugins, Selection, Exception | None]:
    """Plugins, selection, and the error to raise on access. A value that cannot be read costs the choice alone."""
    error: Exception | None = None
    try:
        settings = _settings.read()
    except KalignError as fault:
        error, settings = fault, _settings.read(_list_variables())
    try:
        try:
            found = load(settings)
        except PluginFault as fault:
            error = error or fault
            found = load(replace(settings, strict=False))
        made = _select(Environment.current(), found, settings.platform)
    except Exception as fault:  # noqa: BLE001  # kept, and raised when the platform is asked for
        return Plugins(), Selection((), None, str(fault), None), fault
    if error is not None:
        made = replace(made, chosen=None, why=str(error), record=None)
    return found, made, error


def _list_variables() -> dict[str, str]:
    """The variables that allow and deny plugins, which hold even where another variable has a bad value."""
    names = (_settings.VARIABLES[field].name for field in ("plugins", "disabled_plugins"))
    return {name: os.environ[name] for name in names if name in os.environ}


def _ask_for_interpreter() -> None:
    """Set ``TRITON_INTERPRET`` where an interpreted platform was chosen in time, and say which one it is."""
    record = selection.record
    if record is None or not is_interpreted(record):
        return
    note = ""
    if ask_for_interpreter(record):
        note = "; TRITON_INTERPRET=1 is set for this process, before triton is imported"
    _log.info("platform %s: %s%s", record.name, selection.why, note)


plugins, selection, _error = _choose()
_ask_for_interpreter()
