"""Which platform this process uses, and why: a pure function of a machine and its plugins.

Pure, so that every machine somebody describes in a bug report becomes one line of a test. The rules know no vendor: a
probe says that its platform cannot be used where torch was built for another, so two usable platforms are a choice
that only the user can make. Imports neither torch nor triton; ``load_platform`` imports the class that was chosen.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kalign_core.environment import Environment
from kalign_core.errors import NoPlatform
from kalign_core.hal.base import Platform
from kalign_core.isolate import attempt
from kalign_core.plugins import Plugins, report
from kalign_core.records import Evidence, PlatformRecord


@dataclass(frozen=True, slots=True)
class PlatformRow:
    """One platform of the table: its name, the plugin it comes from, whether it is usable here, and the reason."""

    name: str
    plugin: str
    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The table of platforms, the one that is used (``chosen`` and ``record``, or None) and ``why`` in words."""

    rows: tuple[PlatformRow, ...]
    chosen: str | None
    why: str
    record: PlatformRecord | None


def select(environment: Environment, plugins: Plugins, wanted: str | None = None) -> Selection:
    """The platform that ``environment`` calls for.

    ``wanted`` is what the user asked for: it is used or nothing is. Otherwise the only usable platform that is no
    fallback; a fallback only where no other is usable; nothing where several are.
    """
    records = plugins.platforms()
    rows = tuple(_probed(record, plugins.provider(record.name), environment) for record in records)
    chosen, why = _forced(rows, wanted, plugins) if wanted else _by_itself(rows, records, plugins)
    return Selection(rows, chosen, why, next((record for record in records if record.name == chosen), None))


def _probed(record: PlatformRecord, plugin: str, environment: Environment) -> PlatformRow:
    outcome = attempt(record.probe, environment)
    report(plugin, outcome, f"look for {record.name}")
    if outcome.error is not None:
        return PlatformRow(record.name, plugin, False, f"its probe raised {outcome.reason}")
    evidence = outcome.value
    if not isinstance(evidence, Evidence):
        return PlatformRow(record.name, plugin, False, f"its probe gave {evidence!r}, not Evidence")
    return PlatformRow(record.name, plugin, bool(evidence.usable), str(evidence.reason))


def _forced(rows: Sequence[PlatformRow], wanted: str, plugins: Plugins) -> tuple[str | None, str]:
    names = [row.name for row in rows]
    usable = [row.name for row in rows if row.usable]
    fix = "unset KALIGN_PLATFORM" + "".join(f", or export KALIGN_PLATFORM={name}" for name in usable)
    for row in rows:
        if row.name == wanted and row.usable:
            return wanted, f"KALIGN_PLATFORM={wanted}: {row.reason}"
        if row.name == wanted:
            return None, f"KALIGN_PLATFORM={wanted} cannot be used: {row.reason}; {fix}"
    close = difflib.get_close_matches(wanted, names, n=1)
    guess = f"did you mean {close[0]}? " if close else ""
    known = f"known: {', '.join(names) or '(none)'}{_broken(plugins)}"
    return None, f"KALIGN_PLATFORM={wanted} names no platform; {guess}{known}; {fix}"


def _by_itself(
    rows: Sequence[PlatformRow], records: Sequence[PlatformRecord], plugins: Plugins
) -> tuple[str | None, str]:
    fallbacks = {record.name for record in records if record.fallback}
    usable = [row for row in rows if row.usable and row.name not in fallbacks]
    if len(usable) == 1:
        return usable[0].name, f"the only usable platform: {usable[0].reason}"
    if usable:
        found = ", ".join(f"{row.name} ({row.reason})" for row in usable)
        fix = " or ".join(f"export KALIGN_PLATFORM={row.name}" for row in usable)
        return None, f"several platforms can be used: {found}; {fix}"
    others = "; ".join(f"{row.name}: {row.reason}" for row in rows if not row.usable)
    for row in rows:
        if row.usable:
            return row.name, f"nothing else can be used here ({others or 'there is nothing else'}{_broken(plugins)})"
    return None, f"no platform can be used here ({others or 'no plugin provides one'}{_broken(plugins)})"


def _broken(plugins: Plugins) -> str:
    """What the table lacks because a plugin did not load."""
    return "".join(f"; broken plugin {row.name}: {row.reason}" for row in plugins.rows if row.state == "broken")


def is_interpreted(record: PlatformRecord) -> bool:
    """Whether kernels run under Triton's interpreter there, which has to be asked for before triton is imported."""
    return any(model.interpreted for model in record.models)


def ask_for_interpreter(record: PlatformRecord) -> bool:
    """Set ``TRITON_INTERPRET`` where ``record`` needs it and triton was not imported yet; whether it had to be set."""
    asked = os.environ.get("TRITON_INTERPRET") == "1"
    if asked or not is_interpreted(record) or "triton" in sys.modules:
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def load_platform(record: PlatformRecord) -> Platform:
    """Import and make the platform that ``record`` names; raises ``NoPlatform`` whatever goes wrong in it."""
    outcome = attempt(_made, record.factory)
    platform = outcome.value
    if outcome.error is not None:
        raise NoPlatform(
            f"platform {record.name!r} was chosen, and {record.factory} failed: {outcome.reason}",
            fix="kalign doctor, or export KALIGN_PLATFORM=NAME for another platform",
        ) from outcome.error
    if not isinstance(platform, Platform) or platform.name != record.name:
        raise NoPlatform(
            f"platform {record.name!r} was chosen, and {record.factory} gave {platform!r}",
            why=f"the factory has to give a kalign_core.hal.base.Platform with name = {record.name!r}",
        )
    return platform


def launch_options(record: PlatformRecord) -> frozenset[str]:
    """The options that a candidate may set on the platform that ``record`` names, without a device where possible.

    A factory that is a class says so itself; any other has to make its platform. Raises ``NoPlatform`` where it fails.
    """
    declared = attempt(lambda: _factory(record.factory).launch_options).value
    return declared if isinstance(declared, frozenset) else load_platform(record).launch_options


def _made(factory: str) -> object:
    return _factory(factory)()


def _factory(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
