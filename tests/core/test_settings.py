"""Environment variables: one typed table, read when asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kalign_core.errors import BadArgument, UnknownName
from kalign_core.settings import VARIABLES, Settings, read


def test_nothing_set_gives_the_defaults() -> None:
    """Without variables every setting has its default."""
    assert dataclasses.replace(read({}), sources=Settings().sources) == Settings()


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("KALIGN_MODE", "tune", "mode", "tune"),
        ("KALIGN_PLATFORM", "cpu", "platform", "cpu"),
        ("KALIGN_CACHE_DIR", "/var/kalign", "cache_dir", Path("/var/kalign")),
        ("KALIGN_PLUGINS", "cuda, npu,", "plugins", ("cuda", "npu")),
        ("KALIGN_DISABLE_PLUGINS", "rocm", "disabled_plugins", ("rocm",)),
        ("KALIGN_STRICT", "1", "strict", True),
        ("KALIGN_STRICT", "off", "strict", False),
        ("KALIGN_DEBUG_IDS", "1", "debug_ids", True),
        ("KALIGN_TUNE_BUDGET_S", "2.5", "tune_budget_s", 2.5),
        ("KALIGN_TUNE_BUDGET_S", "0", "tune_budget_s", 0.0),
    ],
)
def test_each_variable_is_read(name: str, text: str, field: str, value: Any) -> None:
    """A variable sets its field, as a value of the field's type, and its source says so."""
    settings = read({name: text})
    assert (getattr(settings, field), settings.sources[field]) == (value, name)


def test_sources_say_what_is_default() -> None:
    """Every field has a source, ``default`` where no variable set it."""
    sources = read({"KALIGN_MODE": "read"}).sources
    assert set(sources) == set(VARIABLES)
    assert {field for field, source in sources.items() if source != "default"} == {"mode"}


@pytest.mark.parametrize("variable", VARIABLES.values(), ids=lambda variable: variable.name)
def test_an_empty_variable_is_not_set(variable: Any) -> None:
    """An empty variable counts as not set, as shells and containers leave them."""
    assert read({variable.name: ""}) == read({})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KALIGN_STRICT", "maybe"),
        ("KALIGN_TUNE_BUDGET_S", "soon"),
        ("KALIGN_TUNE_BUDGET_S", "-1"),
        ("KALIGN_TUNE_BUDGET_S", "nan"),
        ("KALIGN_TUNE_BUDGET_S", "inf"),
    ],
)
def test_a_bad_value_names_the_variable(name: str, text: str) -> None:
    """A value that cannot be used raises an error with the variable, the value and what to type."""
    with pytest.raises(BadArgument, match=f"{name}='{text}'") as caught:
        read({name: text})
    assert caught.value.fix.startswith(f"export {name}=")


def test_an_unknown_mode_lists_the_modes() -> None:
    """A mode that does not exist is an error that names those that do."""
    with pytest.raises(UnknownName, match="off, read, tune, frozen") as caught:
        read({"KALIGN_MODE": "on"})
    assert caught.value.fix.startswith("export KALIGN_MODE=")


def test_the_process_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set after kalign was imported counts."""
    monkeypatch.setenv("KALIGN_MODE", "frozen")
    assert read().mode == "frozen"


def test_every_field_has_a_variable() -> None:
    """The table of variables and the fields of the settings are the same list."""
    fields = {field.name for field in dataclasses.fields(Settings)} - {"sources"}
    assert fields == set(VARIABLES)


def test_foreign_variables_are_let_be() -> None:
    """Variables that are not in the table change nothing."""
    assert read({"KALIGN_MOOD": "good", "PATH": "/bin"}) == read({})


def test_a_cache_folder_may_be_given_from_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` in KALIGN_CACHE_DIR is the home folder, as a user who types it means."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert read({"KALIGN_CACHE_DIR": "~/decisions"}).cache_dir == Path("/home/someone/decisions")
