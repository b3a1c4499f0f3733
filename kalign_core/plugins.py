"""Find plugins, load each by itself, and ask them one by one: never fatal, never silent.

The loader is our own because a bulk loader stops at the first plugin that fails, keeps half of what that one
registered and does not say whose it was. Here a plugin that fails is one row ``broken``, one warning, and nothing else;
``KALIGN_STRICT=1`` turns it into an error for those who write plugins. Nothing is remembered between two calls of
``load``, so what failed once may work the next time. The built-in plugins are part of kalign: when one of them fails,
that error is raised as it is.

Imports neither torch nor triton and nothing of ``hal``, which imports this.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from kalign_core import __version__, hookspecs
from kalign_core.errors import BadArgument, PluginFault, UnknownName
from kalign_core.isolate import Outcome, attempt
from kalign_core.plugin_check import (
    HOOKS,
    RECORD_HOOKS,
    arguments_of,
    check_module,
    check_records,
    signature_of,
)
from kalign_core.records import PlatformRecord, PluginRow
from kalign_core.settings import Settings

GROUP = "kalign.plugins"
BUILTIN: Mapping[str, str] = {
    "core-platforms": "kalign_core.embedded",
    "core-tuner": "kalign_core.tuner.plugin",
    "core-cache": "kalign_core.cache.plugin",
    "core-verifier": "kalign_core.verifier.plugin",
}
MANDATORY = "core-verifier"
SLOW_S = 5.0
# A checkout without metadata has no entry points; these two names are all the core knows of any vendor.
IN_CHECKOUT: Mapping[str, str] = {"cuda": "kalign_cuda.plugin", "rocm": "kalign_rocm.plugin"}

log = logging.getLogger("kalign")
_warned: set[str] = set()
_warning = threading.Lock()


@dataclass(frozen=True, slots=True)
class Answer:
    """What one plugin's implementation of a hook gave, or the error that it raised instead."""

    plugin: str
    value: Any
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A plugin before it is loaded: entry-point name, ``module`` or ``module:attribute``, and whose it is."""

    name: str
    target: str
    distribution: str = "kalign"
    version: str = __version__
    state: str = "active"
    module: ModuleType | None = None
    fault: BaseException | None = None

    def load(self) -> Any:
        if self.fault is not None:
            raise self.fault
        if self.module is not None:
            return self.module
        return importlib.metadata.EntryPoint(self.name, self.target, GROUP).load()

    def row(self, state: str, reason: str, api: object = "", traceback: str = "") -> PluginRow:
        return PluginRow(self.name, self.distribution, self.version, str(api), state, reason, traceback)


class Plugins:
    """The plugins of a process or a session: a row for each, and the hooks of those that work.

    ``rows`` are in the order of loading; ``manager`` holds the modules of the plugins that loaded and kept to the
    contract. ``Plugins()`` has none. ``asking(plugin, hook)`` is around every hook that is asked: who watches this
    process learns there whom it waits for.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.rows: tuple[PluginRow, ...] = ()
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        for spec in hookspecs.SPECS:
            self.manager.add_hookspecs(spec)
        self.asking: Callable[[str, str], AbstractContextManager[None]] = lambda plugin, hook: nullcontext()
        self._strict = strict
        self._platforms: dict[str, tuple[str, PlatformRecord]] = {}

    def platforms(self) -> tuple[PlatformRecord, ...]:
        """The platforms that plugins provide, in the order of registration; names are unique."""
        return tuple(record for _, record in self._platforms.values())

    def provider(self, platform_name: str) -> str:
        """Name of the plugin that provides the platform ``platform_name``; raises ``UnknownName``."""
        if platform_name not in self._platforms:
            raise UnknownName("platform", platform_name, self._platforms)
        return self._platforms[platform_name][0]

    def ask(self, hook: str, *, platform: str | None = None, **arguments: Any) -> Iterator[Answer]:
        """Call every implementation of ``hook`` by itself, in the order of registration, and give their answers.

        An implementation gets those of ``arguments`` that it takes. With ``platform``, plugins that provide platforms
        and not this one are left out, unless the function is marked ``any_platform``. Iterables come as tuples, so
        that an error in one is that plugin's. Records are checked, and a plugin that gives wrong ones, or raises
        where it should give some, becomes a row ``broken``.

        Raises ``UnknownName`` for a hook that does not exist, ``BadArgument`` where ``arguments`` are not the hook's,
        and of what a plugin raises only KeyboardInterrupt.
        """
        if hook not in HOOKS:
            raise UnknownName("hook", hook, HOOKS)
        if set(arguments) != set(arguments_of(HOOKS[hook])):
            raise BadArgument(f"{hook} was asked with ({', '.join(arguments)}); it is {signature_of(HOOKS[hook])}")
        taken: dict[str, str] = {}
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            plugin, function = implementation.plugin_name, implementation.function
            if not self._serves(plugin, function, platform):
                continue
            with self.asking(plugin, hook):
                outcome = attempt(_answered, hook, function, arguments, taken)
            report(plugin, outcome, f"answer {hook}")
            if hook in RECORD_HOOKS and outcome.error is not None:
                self._break(plugin, outcome)
            elif hook in RECORD_HOOKS:
                taken.update({record.name: plugin for record in outcome.value})
            yield Answer(plugin, outcome.value, outcome.error)

    def _serves(self, plugin: str, function: Callable[..., Any], platform: str | None) -> bool:
        """Whether ``function`` of ``plugin`` is asked about ``platform``: its own, or it provides none, or any."""
        own = {name for name, (provider, _) in self._platforms.items() if provider == plugin}
        return platform is None or not own or platform in own or getattr(function, "kalign_any_platform", False)

    def _break(self, plugin: str, outcome: Outcome) -> None:
        """Make the row of a plugin that loaded ``broken``; its other hooks go on being asked, checks among them."""
        changed = {"state": "broken", "reason": outcome.reason, "traceback": outcome.traceback}
        self.rows = tuple(
            replace(row, **changed) if row.name == plugin and row.state in ("active", "source") else row
            for row in self.rows
        )
        _warn_once(f"plugin {plugin!r} is broken: {outcome.reason}; see: kalign plugins --traceback {plugin}")

    def with_module(self, name: str, module: ModuleType) -> Plugins:
        """These plugins and ``module``, checked and registered last as the plugin ``name``."""
        made = Plugins(strict=self._strict)
        made.rows = self.rows
        made._platforms = dict(self._platforms)
        for known, plugin in self.manager.list_name_plugin():
            made.manager.register(plugin, known)
        made._add(_Found(name, module.__name__, "(memory)", "", module=module))
        return made

    def _add(self, found: _Found) -> None:
        """Load and register ``found``, or make it a row ``broken``; raises ``PluginFault`` under strict."""
        loaded: list[Any] = []
        outcome = attempt(self._load, found, loaded)
        api = getattr(loaded[0], "__dict__", {}).get("KALIGN_API", "") if loaded else ""
        if outcome.error is None:
            report(found.name, outcome, "load")
            line = next(iter(outcome.printed.strip().splitlines()), "")
            self.rows += (found.row(found.state, line and f"printed while loading: {line}", api),)
            return
        self.rows += (found.row("broken", outcome.reason, api, outcome.traceback),)
        if self._strict:
            raise PluginFault(
                f"plugin {_titled(found)} cannot be used: {outcome.reason}",
                why="KALIGN_STRICT=1 makes a broken plugin an error",
                fix=f"export KALIGN_DISABLE_PLUGINS={found.name}",
            ) from outcome.error
        _warn_once(
            f"plugin {_titled(found)} is not used: {outcome.reason}; "
            f"see: kalign plugins --traceback {found.name}"
        )  # fmt: skip

    def _load(self, found: _Found, loaded: list[Any]) -> None:
        self._refuse_second(found)
        module = found.load()
        loaded.append(module)
        check_module(module)
        self._register(found, module)

    def _refuse_second(self, found: _Found) -> None:
        for row in self.rows:
            if row.name == found.name:
                first = f"{row.distribution} {row.version}".strip()
                second = f"{found.distribution} {found.version}".strip()
                raise PluginFault(
                    f"the name {found.name!r} is taken: {first} registers it, and so does {second}",
                    why="plugins are allowed, denied and listed by name",
                    fix=f"pip uninstall {row.distribution}, or pip uninstall {found.distribution}",
                )

    def _register(self, found: _Found, module: ModuleType) -> None:
        """Register ``module`` and take its platforms, wholly or not at all."""
        other = self.manager.get_name(module)
        if other is not None:
            raise PluginFault(f"the module {module.__name__} is the plugin {other!r} already")
        try:
            self.manager.register(module, found.name)
            give = vars(module).get("kalign_platforms", tuple)
            taken = {name: provider for name, (provider, _) in self._platforms.items()}
            records = check_records("kalign_platforms", give(), taken)
            self._platforms |= {record.name: (found.name, record) for record in records}
        except BaseException:
            if self.manager.get_plugin(found.name) is module:
                self.manager.unregister(name=found.name)
            raise


def load(settings: Settings, path: Sequence[str] | None = None) -> Plugins:
    """Load the built-in plugins, then those of the entry-point group ``kalign.plugins`` sorted by name.

    ``path`` holds the folders whose metadata is read, ``sys.path`` by default. Raises ``PluginFault`` for a broken
    plugin where ``settings.strict`` says so, and the error of a broken built-in plugin as it is.
    """
    plugins = Plugins(strict=settings.strict)
    for name, target in BUILTIN.items():
        found = _Found(name, target)
        if name in settings.disabled_plugins and name != MANDATORY:
            plugins.rows += (found.row("disabled", "named in KALIGN_DISABLE_PLUGINS"),)
            continue
        plugins._load(found, [])
        plugins.rows += (found.row("active", "", hookspecs.API),)
    candidates = _discover(path)
    _warn_of_names(settings, (*BUILTIN, *(found.name for found in candidates)))
    for found in candidates:
        if found.name in settings.disabled_plugins:
            plugins.rows += (found.row("disabled", "named in KALIGN_DISABLE_PLUGINS"),)
        elif settings.plugins is not None and found.name not in settings.plugins:
            plugins.rows += (found.row("disabled", "not named in KALIGN_PLUGINS"),)
        else:
            plugins._add(found)
    return plugins


def _discover(path: Sequence[str] | None) -> list[_Found]:
    """Every plugin that metadata registers and the vendors of a checkout, by name, kalign's own first.

    A distribution that lies on the path twice counts once, where it comes first.
    """
    # Python remembers a folder whose listing failed as empty for as long as nobody writes to it.
    importlib.metadata.MetadataPathFinder().invalidate_caches()
    listed = attempt(_distributions, list(sys.path if path is None else path))
    groups: dict[str, list[_Found]] = {}
    if listed.error is not None:
        groups["metadata"] = [_Found("metadata", "", "(sys.path)", "", fault=listed.error)]
    for distribution in listed.value or ():
        group = _registered_by(distribution)
        if group:
            groups.setdefault(re.sub(r"[-_.]+", "-", group[0].distribution).lower(), group)
    found = [one for group in groups.values() for one in group]
    targets = {one.target for one in found}
    found += [_Found(n, target, state="source") for n, target in IN_CHECKOUT.items() if target not in targets]
    return sorted(found, key=lambda one: (one.name, one.distribution != "kalign", one.distribution))


def _distributions(path: list[str]) -> list[importlib.metadata.Distribution]:
    return list(importlib.metadata.distributions(path=path))


def _registered_by(distribution: importlib.metadata.Distribution) -> list[_Found]:
    """The plugins of ``distribution``; where its metadata cannot be read, one named after it that fails to load."""
    # A distribution has no public name for its own folder.
    folder = Path(str(getattr(distribution, "_path", distribution.locate_file(""))))
    try:
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            return []
        name = distribution.metadata["Name"] or folder.name
        version = distribution.version or "unknown"
        entries = distribution.entry_points.select(group=GROUP)
        return [_Found(entry.name, entry.value, name, version) for entry in entries]
    except Exception as fault:  # noqa: BLE001  # broken metadata becomes a row of its own
        return [_Found(folder.name, "", str(folder), "", fault=fault)]


def _warn_of_names(settings: Settings, known: Sequence[str]) -> None:
    """Warn of names in the allow and deny lists that do nothing."""
    lists = {"KALIGN_PLUGINS": settings.plugins or (), "KALIGN_DISABLE_PLUGINS": settings.disabled_plugins}
    for variable, names in lists.items():
        for name in names:
            if name not in known:
                _warn_once(f"{variable} names {name!r}, which is no plugin here; known: {', '.join(known)}")
    if MANDATORY in settings.disabled_plugins:
        _warn_once(f"KALIGN_DISABLE_PLUGINS names {MANDATORY!r}, which cannot be disabled: plugins only add checks")


def _titled(found: _Found) -> str:
    return f"{found.name!r} of {f'{found.distribution} {found.version}'.strip()}"


def report(plugin: str, outcome: Outcome, done: str) -> None:
    """Say what a plugin printed, and that it was slow: it cannot be interrupted, and somebody waits for it."""
    if outcome.printed.strip():
        log.info("plugin %r printed: %s", plugin, outcome.printed.strip())
    if outcome.seconds > SLOW_S:
        fix = f"without it: export KALIGN_DISABLE_PLUGINS={plugin}"
        _warn_once(f"plugin {plugin!r} takes more than {SLOW_S:g} s to {done}; {fix}")


def _warn_once(message: str) -> None:
    """Warn once in the life of the process, however often plugins are loaded."""
    with _warning:
        is_new = message not in _warned
        _warned.add(message)
    if is_new:
        log.warning(message)


def _answered(hook: str, function: Callable[..., Any], arguments: Mapping[str, Any], taken: Mapping[str, str]) -> Any:
    value = function(**{name: arguments[name] for name in arguments_of(function)})
    if hook in RECORD_HOOKS:
        return check_records(hook, value, taken)
    return value if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable) else tuple(value)
