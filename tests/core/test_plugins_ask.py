"""Asking plugins: each implementation alone, with what it takes, about what it serves."""

from __future__ import annotations

import itertools
import logging
import textwrap
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kalign_core import isolate
from kalign_core import plugins as loader
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.plugins import Plugins

PLATFORM = """
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Evidence, PlatformRecord

KALIGN_API = 1

@hookimpl
def kalign_platforms():
    return [PlatformRecord("{name}", lambda environment: Evidence(True, "it is here"), "nowhere:Platform")]
"""
VETO = """
from kalign_core.hookspecs import hookimpl

KALIGN_API = 1

@hookimpl
def kalign_veto(config):
    return f"{config} is banned"
"""
QUESTION: dict[str, Any] = {"kernel": "k", "problem": "p", "model": "m", "config": "c"}


def module(source: str, name: str = "in_memory") -> ModuleType:
    made = ModuleType(name)
    exec(textwrap.dedent(source), vars(made))
    return made


def asked(*sources: str, platform: str | None = None) -> list[tuple[str, Any, str]]:
    """Answers to a veto by plugins of these sources, named p0, p1, ..."""
    plugins = Plugins()
    for number, source in enumerate(sources):
        plugins = plugins.with_module(f"p{number}", module(source))
    assert [r.reason for r in plugins.rows] == [""] * len(sources)
    answers = plugins.ask("kalign_veto", platform=platform, **QUESTION)
    return [(a.plugin, a.value, repr(a.error) if a.error else "") for a in answers]


def test_plugins_are_asked_in_order() -> None:
    """Implementations are called in the order of registration, unlike pluggy's last one first."""
    assert asked(VETO, VETO.replace("banned", "slow")) == [("p0", "c is banned", ""), ("p1", "c is slow", "")]


@pytest.mark.parametrize("error", ["ValueError('no')", "SystemExit(2)", "KeyError('x')"])
def test_an_error_costs_one_answer(error: str) -> None:
    """What one implementation raises is its answer, and the others answer all the same."""
    raising = VETO.replace('return f"{config} is banned"', f"raise {error}")
    assert asked(raising, VETO) == [("p0", None, error), ("p1", "c is banned", "")]


def test_asking_lets_keyboard_interrupt_pass() -> None:
    """The user can stop a process that is inside a plugin's hook."""
    with pytest.raises(KeyboardInterrupt):
        asked(VETO.replace('return f"{config} is banned"', "raise KeyboardInterrupt"))


@pytest.mark.parametrize(
    ("arguments", "expected"), [("", "'c'"), ("config", "c"), ("model, kernel", "mk"), ("*, kernel, config", "kc")]
)
def test_an_implementation_gets_what_it_takes(arguments: str, expected: str) -> None:
    """An implementation may take any of the hook's arguments, in any order, by name."""
    names = arguments.replace("*", "").replace(",", " ").split()
    body = " + ".join(names) or repr("'c'")
    source = VETO.replace("(config)", f"({arguments})").replace('f"{config} is banned"', body)
    assert asked(source) == [("p0", expected, "")]


OTHER = PLATFORM.format(name="npu") + VETO.partition("KALIGN_API = 1")[2]


def test_plugins_of_other_platforms_are_left_out() -> None:
    """A plugin that provides some other platform is not asked about this one."""
    assert asked(OTHER, VETO, platform="cpu") == [("p1", "c is banned", "")]


def test_a_plugin_is_asked_about_its_own_platform() -> None:
    """A plugin is asked about the platform that it provides."""
    assert asked(OTHER, VETO, platform="npu") == [("p0", "c is banned", ""), ("p1", "c is banned", "")]


def test_a_function_marked_for_any_platform_is_asked() -> None:
    """``any_platform=True`` asks a function about platforms that its plugin does not provide."""
    marked = PLATFORM.format(name="npu") + VETO.partition("KALIGN_API = 1")[2].replace(
        "@hookimpl", "@hookimpl(any_platform=True)"
    )
    assert asked(marked, platform="cpu") == [("p0", "c is banned", "")]


def test_without_a_platform_everyone_is_asked() -> None:
    """A question about no platform goes to every plugin."""
    assert asked(OTHER, VETO) == [("p0", "c is banned", ""), ("p1", "c is banned", "")]


def test_an_error_in_a_generator_is_its_plugins() -> None:
    """What a hook yields is collected while it is asked, so that a late error does not escape into the core."""
    source = """
    from kalign_core.hookspecs import hookimpl
    KALIGN_API = 1
    @hookimpl
    def kalign_checks(kernel):
        yield kernel
        raise ValueError("late")
    """
    (answer,) = Plugins().with_module("p", module(source)).ask("kalign_checks", kernel="k", problem="p")
    assert (answer.value, repr(answer.error)) == (None, "ValueError('late')")


def test_hooks_print_nothing_to_stdout(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """What a hook prints when asked goes to the log."""
    caplog.set_level(logging.INFO, "kalign")
    asked(VETO.replace("return", "print('hello'); return"))
    assert capsys.readouterr().out == ""
    assert "plugin 'p0' printed: hello" in caplog.text


def test_an_unknown_hook_is_an_error() -> None:
    """A misspelt question is an error and not an empty answer, which would void the verifier."""
    with pytest.raises(UnknownName, match="did you mean 'kalign_checks'"):
        list(Plugins().ask("kalign_check", kernel="k", problem="p"))


def test_a_question_has_to_be_whole() -> None:
    """A question without one of the hook's arguments is the asker's error, not the plugins'."""
    with pytest.raises(BadArgument, match="kalign_checks was asked with \\(kernel\\)"):
        list(Plugins().ask("kalign_checks", kernel="k"))


@pytest.mark.parametrize(("seconds", "warned"), [(4, False), (6, True)])
def test_a_slow_answer_is_warned_of_once(
    seconds: int, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that takes more than five seconds to answer is named once, with what to type, and its answer counts."""
    monkeypatch.setattr(isolate, "time", SimpleNamespace(monotonic=itertools.count(0, seconds).__next__))
    monkeypatch.setattr(loader, "_warned", set())
    plugins = Plugins().with_module("slow", module(VETO))
    caplog.clear()
    for _ in range(2):
        assert [answer.error for answer in plugins.ask("kalign_veto", **QUESTION)] == [None]
    expected = "plugin 'slow' takes more than 5 s to answer kalign_veto; without it: export KALIGN_DISABLE_PLUGINS=slow"
    assert [record.getMessage() for record in caplog.records] == [expected] * warned
