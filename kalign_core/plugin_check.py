"""Check one plugin module against the hooks of ``hookspecs`` before it is registered.

pluggy takes a misspelt hook for a hook of somebody else's and never calls it, and takes wrappers that could change what
other plugins answer. Each fault here is a ``PluginFault`` that prints the offending definition beside the hook's own.
Reads the module's namespace only: no attribute of the plugin is computed. Imports neither torch, triton nor a device.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from kalign_core.errors import PluginFault
from kalign_core.hookspecs import API, PROJECT, SPECS
from kalign_core.records import DeviceModel, PlatformRecord, StoreRecord, StrategyRecord

HOOKS: Mapping[str, Callable[..., Any]] = {
    name: function for spec in SPECS for name, function in vars(spec).items() if hasattr(function, f"{PROJECT}_spec")
}
RECORD_HOOKS: Mapping[str, type[PlatformRecord] | type[StrategyRecord] | type[StoreRecord]] = {
    "kalign_platforms": PlatformRecord,
    "kalign_strategies": StrategyRecord,
    "kalign_stores": StoreRecord,
}


def check_module(module: object) -> None:
    """Raise ``PluginFault`` on the first thing in ``module`` that breaks the contract with plugins."""
    if not isinstance(module, ModuleType):
        raise PluginFault(
            f"the entry point names {type(module).__name__} {module!r}, not a module",
            fix='in pyproject.toml: [project.entry-points."kalign.plugins"] NAME = "package.plugin"',
        )
    api = vars(module).get("KALIGN_API")
    if type(api) is not int or api != API:
        raise PluginFault(
            f"KALIGN_API is {api!r}, this kalign speaks {API}",
            why="the number says which set of hooks a plugin was written for",
            fix=f"install a version of the plugin for API {API}, or write KALIGN_API = {API} in {module.__name__}",
        )
    for name, value in list(vars(module).items()):
        _check_attribute(name, value)


def _check_attribute(name: str, value: object) -> None:
    named = name.startswith(f"{PROJECT}_") and callable(value)
    marks = getattr(value, f"{PROJECT}_impl", None) if inspect.isfunction(value) else None
    if not named and not isinstance(marks, dict):
        return
    if name not in HOOKS:
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.0)[0]
        raise PluginFault(
            f"{name} is no hook of kalign; did you mean {close}?",
            why=f"the hooks are: {', '.join(HOOKS)}",
            fix=f"def {signature_of(HOOKS[close])}",
        )
    if not inspect.isfunction(value):
        raise PluginFault(f"{name} is {type(value).__name__}, not a function", fix=f"def {signature_of(HOOKS[name])}")
    if not isinstance(marks, dict):
        raise PluginFault(f"{name} is not marked as a hook implementation", fix="put @kalign_core.hookimpl above it")
    options = sorted(option for option, chosen in marks.items() if chosen)
    if options:
        raise PluginFault(
            f"{name} is marked with {', '.join(options)}",
            why="each implementation is called alone, in the order of registration; none may wrap another",
            fix="mark it with kalign_core.hookimpl",
        )
    _check_arguments(name, value)


def _check_arguments(name: str, function: Callable[..., Any]) -> None:
    known = arguments_of(HOOKS[name])
    for parameter in _parameters(function):
        if parameter.name not in known or parameter.kind not in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            raise PluginFault(
                f"{signature_of(function)} takes {str(parameter.replace(annotation=parameter.empty))!r}, "
                f"but the hook is {signature_of(HOOKS[name])}",
                why="arguments are passed by name; an implementation may leave some out and add none",
                fix=f"def {signature_of(HOOKS[name])}",
            )


def check_records(hook: str, values: Iterable[Any], taken: Mapping[str, str]) -> tuple[Any, ...]:
    """What a plugin's ``hook`` gave as records of the right kind, each with a name of its own.

    ``taken`` are the names that other plugins gave before, each with its plugin. Raises ``PluginFault``.
    """
    kind = RECORD_HOOKS[hook]
    records: dict[str, Any] = {}
    for record in values:
        if not isinstance(record, kind):
            raise PluginFault(f"{hook} gave {type(record).__name__} {record!r}, not {kind.__name__}")
        if not isinstance(record.name, str) or not record.name:
            raise PluginFault(f"{hook} gave {kind.__name__} with the name {record.name!r}, not a word")
        if record.name in taken:
            raise PluginFault(
                f"{hook} gave {record.name!r}, which the plugin {taken[record.name]!r} provides already",
                fix=f"export KALIGN_DISABLE_PLUGINS={taken[record.name]}",
            )
        if record.name in records:
            raise PluginFault(f"{hook} gave {record.name!r} twice")
        if isinstance(record, PlatformRecord):
            _check_platform(record)
        records[record.name] = record
    return tuple(records.values())


def _check_platform(record: PlatformRecord) -> None:
    if not callable(record.probe):
        raise PluginFault(f"platform {record.name!r} has the probe {record.probe!r}, which cannot be called")
    if not isinstance(record.factory, str) or record.factory.count(":") != 1:
        raise PluginFault(
            f"platform {record.name!r} has the factory {record.factory!r}",
            why="the class is named as text, so that it is imported only when the platform is used",
            fix='PlatformRecord(..., factory="package.platform:NpuPlatform")',
        )
    for model in record.models:
        if not isinstance(model, DeviceModel):
            raise PluginFault(f"platform {record.name!r} has the model {model!r}, not a DeviceModel")


@functools.lru_cache(maxsize=256)
def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that a hook or an implementation of it takes."""
    return tuple(parameter.name for parameter in _parameters(function))


def signature_of(function: Callable[..., Any]) -> str:
    """``kalign_veto(kernel, problem)``: how messages print a hook or an implementation, without annotations."""
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in _parameters(function)]
    return f"{getattr(function, '__name__', function)}{inspect.Signature(plain)}"


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    is_spec = function in HOOKS.values()
    return found[1:] if is_spec else found
