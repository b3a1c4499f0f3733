"""The contract with plugins: what a module must have, and what its hooks may give."""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType
from typing import Any

import pytest

from kalign_core.errors import PluginFault, UnknownName
from kalign_core.hookspecs import SPECS
from kalign_core.plugins import Plugins
from kalign_core.records import PluginRow

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


def row(plugins: Plugins, name: str) -> PluginRow:
    (found,) = (row for row in plugins.rows if row.name == name)
    return found


def refused(source: str) -> str:
    """The reason for which a plugin of this source is broken."""
    found = row(Plugins().with_module("npu", module(source)), "npu")
    assert found.state == "broken"
    return found.reason


# --- the contract -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["", "KALIGN_API = 2", "KALIGN_API = '1'", "KALIGN_API = True"])
def test_the_api_number_is_checked(line: str) -> None:
    """A module that does not say the API number of this kalign, as an integer, is refused."""
    assert "this kalign speaks 1" in refused(VETO.replace("KALIGN_API = 1", line))


def test_a_marked_function_has_to_be_a_hook() -> None:
    """A function that is marked and has no hook's name is refused with the closest name."""
    reason = refused(VETO.replace("kalign_veto", "veto"))
    assert reason == "veto is no hook of kalign; did you mean kalign_veto?"


def test_a_hook_has_to_be_marked() -> None:
    """A function with a hook's name that is not marked would never be asked, so it is refused."""
    assert refused(VETO.replace("@hookimpl", "")) == "kalign_veto is not marked as a hook implementation"


def test_a_hook_has_to_be_a_function() -> None:
    """A hook's name on something that only looks like a function is refused."""
    source = "KALIGN_API = 1\nimport functools\nkalign_veto = functools.partial(print)"
    assert refused(source) == "kalign_veto is partial, not a function"


def test_unknown_arguments_are_refused() -> None:
    """An argument that the hook does not give is refused, printing the signature beside the hook's own."""
    assert refused(VETO.replace("(config)", "(kernel, konfig=None)")) == (
        "kalign_veto(kernel, konfig=None) takes 'konfig=None', "
        "but the hook is kalign_veto(kernel, problem, model, config)"
    )


@pytest.mark.parametrize("arguments", ["*config", "**config", "config, /"])
def test_arguments_have_to_be_named(arguments: str) -> None:
    """Arguments are passed by name, so an implementation that cannot take them so is refused."""
    assert "but the hook is kalign_veto(kernel, problem, model, config)" in refused(
        VETO.replace("(config)", f"({arguments})")
    )


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper", "tryfirst", "trylast", "optionalhook"])
def test_pluggy_options_are_refused(option: str) -> None:
    """An implementation that would wrap or overtake others is refused."""
    mark = f"import pluggy\nhookimpl = pluggy.HookimplMarker('kalign')({option}=True)"
    source = VETO.replace("from kalign_core.hookspecs import hookimpl", mark)
    assert refused(source.replace("return", "yield")) == f"kalign_veto is marked with {option}"


def test_modules_named_like_hooks_are_let_be() -> None:
    """Importing a module whose name starts with the project's is no hook."""
    plugins = Plugins().with_module("npu", module("import kalign_core\n" + VETO))
    assert row(plugins, "npu").state == "active"


@pytest.mark.parametrize("hook", [name for spec in SPECS for name in vars(spec) if name.startswith("kalign_")])
def test_the_example_of_every_hook_loads(hook: str) -> None:
    """The plugin in a hook's docstring is complete: it loads as it stands."""
    (text,) = (inspect.getdoc(vars(spec)[hook]) for spec in SPECS if hook in vars(spec))
    assert text is not None
    lines = text.partition("::\n")[2].splitlines()
    source = "\n".join(line for line in lines if not line or line.startswith("    "))
    assert row(Plugins().with_module("example", module(source)), "example") == PluginRow(
        "example", "(memory)", "", "1", "active"
    )


# --- records ------------------------------------------------------------------------------------------------------


def test_a_plugin_whose_platforms_fail_is_rolled_back() -> None:
    """A plugin that raises when asked for its platforms is broken as a whole: none of its hooks is asked again."""
    source = VETO + "\n@hookimpl\ndef kalign_platforms():\n    raise OSError('no driver')\n"
    plugins = Plugins().with_module("npu", module(source))
    assert (row(plugins, "npu").state, row(plugins, "npu").reason) == ("broken", "OSError: no driver")
    assert plugins.manager.list_name_plugin() == []
    assert list(plugins.ask("kalign_veto", **QUESTION)) == []


def test_half_the_platforms_are_none() -> None:
    """Platforms that a plugin gave before it failed are not kept."""
    source = PLATFORM.format(name="npu").replace("return [", "yield (").replace('Platform")]', 'Platform")\n    )')
    plugins = Plugins().with_module("npu", module(source + "    raise OSError('no driver')\n"))
    assert (row(plugins, "npu").reason, plugins.platforms()) == ("OSError: no driver", ())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("None", "TypeError: 'NoneType' object is not iterable"),
        ("['npu']", "kalign_platforms gave str 'npu', not PlatformRecord"),
        ("[PlatformRecord('', len, 'a:b')]", "kalign_platforms gave PlatformRecord with the name '', not a word"),
        ("[PlatformRecord('npu', None, 'a:b')]", "platform 'npu' has the probe None, which cannot be called"),
        ("[PlatformRecord('npu', len, 'a.b')]", "platform 'npu' has the factory 'a.b'"),
        ("[PlatformRecord('npu', len, 'a:b', ('sm_90',))]", "platform 'npu' has the model 'sm_90', not a DeviceModel"),
    ],
)
def test_platforms_of_the_wrong_kind_are_refused(value: str, reason: str) -> None:
    """What kalign_platforms gives is checked when it is given, not when it is used."""
    head, _, _ = PLATFORM.partition("    return")
    assert refused(f"{head}    return {value}") == reason


RECORDS = {
    "kalign_platforms": "PlatformRecord('{}', len, 'a:b')",
    "kalign_stores": "StoreRecord('{}', len)",
    "kalign_strategies": "StrategyRecord('{}', len)",
}


def giving(hook: str, *names: str) -> ModuleType:
    """A plugin whose ``hook`` gives records of these names."""
    head = "from kalign_core.hookspecs import hookimpl\nfrom kalign_core.records import *\nKALIGN_API = 1\n"
    records = ", ".join(RECORDS[hook].format(name) for name in names)
    return module(f"{head}@hookimpl\ndef {hook}():\n    return [{records}]\n")


@pytest.mark.parametrize("hook", RECORDS)
def test_a_record_name_is_given_once(hook: str) -> None:
    """The second plugin that gives a platform, store or strategy of a name is broken, and the first works."""
    plugins = Plugins().with_module("one", giving(hook, "x")).with_module("two", giving(hook, "x", "y"))
    answers = list(plugins.ask(hook))
    assert [r.name for answer in answers if answer.error is None for r in answer.value] == ["x"]
    assert [r.state for r in plugins.rows] == ["active", "broken"]
    assert row(plugins, "two").reason == f"{hook} gave 'x', which the plugin 'one' provides already"


@pytest.mark.parametrize("hook", RECORDS)
def test_a_plugin_gives_a_name_once(hook: str) -> None:
    """A plugin that gives one name twice is broken."""
    plugins = Plugins().with_module("npu", giving(hook, "x", "x"))
    list(plugins.ask(hook))
    assert row(plugins, "npu").reason == f"{hook} gave 'x' twice"


@pytest.mark.parametrize("hook", ["kalign_stores", "kalign_strategies"])
def test_records_of_another_kind_break_the_row(hook: str) -> None:
    """A plugin that gives something else than the hook's records is broken when it is asked, and warned of."""
    source = f"from kalign_core.hookspecs import hookimpl\nKALIGN_API = 1\n@hookimpl\ndef {hook}(): return ['x']"
    plugins = Plugins().with_module("npu", module(source))
    (answer,) = plugins.ask(hook)
    assert isinstance(answer.error, PluginFault)
    assert row(plugins, "npu").state == "broken"
    assert f"{hook} gave str 'x', not" in row(plugins, "npu").reason


def test_a_broken_store_leaves_the_checks() -> None:
    """A plugin that breaks when asked for records goes on being asked for checks, which only make kalign stricter."""
    source = """
    from kalign_core.hookspecs import hookimpl
    KALIGN_API = 1
    @hookimpl
    def kalign_stores():
        raise OSError("read-only")
    @hookimpl
    def kalign_checks():
        return ["a check"]
    """
    plugins = Plugins().with_module("npu", module(source))
    list(plugins.ask("kalign_stores"))
    assert row(plugins, "npu").reason == "OSError: read-only"
    assert [answer.value for answer in plugins.ask("kalign_checks", kernel="k", problem="p")] == [("a check",)]


def test_a_platform_has_a_provider() -> None:
    """The provider of a platform is the plugin that gave it; a name nobody gave is an error."""
    plugins = Plugins().with_module("acme", module(PLATFORM.format(name="npu")))
    assert plugins.provider("npu") == "acme"
    with pytest.raises(UnknownName, match="unknown platform 'nqu'"):
        plugins.provider("nqu")
