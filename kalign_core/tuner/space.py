"""Which configurations are worth trying on a device: what plugins propose, less what is refused with a reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kalign_core.declare import OVERLAP_OPTION, SWITCHES
from kalign_core.hal.binding import grid_of
from kalign_core.isolate import attempt
from kalign_core.records import Config, DeviceModel, Problem

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.plugins import Plugins

log = logging.getLogger("kalign")
BUILTIN_PLUGIN = "core-tuner"
Order = tuple[tuple[int, ...], str]
_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Space:
    """Candidates in the order to try them, the reference first, and what was refused with the reason."""

    candidates: tuple[Config, ...]
    refused: tuple[tuple[Config, str], ...]

    def __contains__(self, config: Config) -> bool:
        return config in self.candidates


def space(
    plugins: Plugins, platform: str, options: frozenset[str], kernel: Kernel, problem: Problem, model: DeviceModel
) -> Space:
    """The space of ``kernel`` for ``problem`` on ``model``: the reference, then what plugins know, then all the rest.

    ``platform`` is the platform's name and ``options`` the launch options it accepts. A plugin that raises adds no
    candidates and is warned of once.
    """
    reference = kernel.reference_config(problem)
    accepted: dict[Config, None] = {reference: None}
    refused: dict[Config, str] = {}
    for config in _proposed(plugins, platform, kernel, problem, model):
        if config in accepted or config in refused:
            continue
        reason = illegal(kernel, options, reference, config) or _vetoed(
            plugins, platform, kernel, problem, model, config
        )
        if reason:
            refused[config] = reason
        else:
            accepted[config] = None
    return Space(tuple(accepted), tuple(refused.items()))


def declaration_order(kernel: Kernel, config: Config) -> Order:
    """Where ``config`` stands by the kernel's own declaration, whoever proposed it and when.

    By the place of each knob's value among those declared, undeclared values last; then by its text. Sorts candidates
    of equal time, so that the same one wins whatever the order of the plugins.
    """
    places = []
    for name, values in kernel.knobs.items():
        value = config.get(name)
        places.append(values.index(value) if value in values else len(values))
    return tuple(places), str(config)


def _proposed(
    plugins: Plugins, platform: str, kernel: Kernel, problem: Problem, model: DeviceModel
) -> Iterator[Config]:
    """What plugins propose; those that know the device come before the one that knows only the kernel."""
    asked: dict[str, Any] = {"kernel": kernel, "problem": problem, "model": model}
    answers = list(plugins.ask("kalign_candidates", platform=platform, **asked))
    for answer in sorted(answers, key=lambda answer: answer.plugin == BUILTIN_PLUGIN):
        if answer.error is not None:
            warn_once(f"plugin {answer.plugin} gave no candidates for {kernel}: {answer.error!r}")
            continue
        proposed = answer.value if isinstance(answer.value, (list, tuple)) else (answer.value,)
        configs = [config for config in proposed if isinstance(config, Config)]
        if len(configs) < len(proposed):
            warn_once(f"plugin {answer.plugin} proposed things for {kernel} that are no Config")
        yield from configs


def illegal(kernel: Kernel, options: frozenset[str], reference: Config, config: Config) -> str | None:
    """Why the contract forbids ``config``: it sets what is no schedule knob, or leaves one unset; None if it may be."""
    for name, value in config.items():
        if name in SWITCHES and value not in (0, 1):
            return f"{name}={value} is neither 0 nor 1"
        schedule = name in kernel.knobs or name in options
        if not schedule and reference.get(name) != value:
            return f"{name} is part of the contract, or no option of this platform"
    if config.get(OVERLAP_OPTION) and not kernel.overlaps:
        return f"{OVERLAP_OPTION}: {kernel} does not wait for the kernel before it"
    missing = [name for name in reference if name not in config]
    return f"leaves {', '.join(missing)} unset" if missing else None


def _vetoed(
    plugins: Plugins, platform: str, kernel: Kernel, problem: Problem, model: DeviceModel, config: Config
) -> str | None:
    grid = attempt(grid_of, kernel, problem, config)
    if grid.error is not None:
        return grid.reason
    asked: dict[str, Any] = {"kernel": kernel, "problem": problem, "model": model, "config": config}
    for answer in plugins.ask("kalign_veto", platform=platform, **asked):
        if answer.error is not None:
            return "veto raised"
        if answer.value:
            return str(answer.value)
    return None


def warn_once(text: str) -> None:
    """The same fault of a plugin for every problem of a kernel is one warning."""
    if text not in _warned:
        _warned.add(text)
        log.warning(text)
