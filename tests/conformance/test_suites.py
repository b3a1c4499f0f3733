"""The suites themselves: they need pytest and say so, nothing of kalign needs them, and they see what they look for."""

from __future__ import annotations

import ast
import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kalign_core import testing
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.records import DeviceModel, Identity
from kalign_core.testing import PluginConformance, elsewhere
from kalign_core.testing.identity import own_words

ROOT = Path(__file__).resolve().parents[2]
MODEL = DeviceModel("npu", "npu1", warp_size=32, max_warps=16, shared_bytes=0)


def test_importing_the_package_is_light(child: Callable[..., Any]) -> None:
    """Importing kalign_core.testing imports neither pytest nor a device library and selects no platform."""
    heavy = ("pytest", "torch", "triton", "kalign_core.hal")
    code = f"import sys, kalign_core.testing; print([name for name in {heavy} if name in sys.modules])"
    assert child(code).stdout.strip() == "[]"


def test_without_pytest_the_error_says_what_to_type(child: Callable[..., Any]) -> None:
    """Where pytest is not installed, asking for a suite says that it is missing, why, and how to install it."""
    done = child("import sys; sys.modules['pytest'] = None; from kalign_core.testing import StoreConformance")
    assert done.returncode == 1
    assert "MissingPackage: kalign_core.testing.StoreConformance is a pytest class" in done.stderr
    assert "try: pip install pytest" in done.stderr


def test_other_names_are_no_attributes() -> None:
    """A name that the package does not have is an AttributeError, as of any module."""
    assert not hasattr(testing, "GpuConformance")


def test_dir_lists_the_suites() -> None:
    """``dir()`` shows the suites before they are loaded."""
    assert dir(testing) == testing.__all__


def test_kalign_does_not_need_its_suites() -> None:
    """No module of kalign outside the package of suites imports it, or pytest."""
    found = []
    for path in sorted(ROOT.glob("kalign_*/**/*.py")):
        if "testing" not in path.parts:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            named += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            found += [path for name in named if name.startswith(("kalign_core.testing", "pytest"))]
    assert found == []


@pytest.mark.parametrize("suite", testing.__all__)
def test_rules_are_sentences(suite: str) -> None:
    """Each test of a suite says its rule in its docstring, for whoever breaks it."""
    rules = {name: rule for name, rule in inspect.getmembers(getattr(testing, suite)) if name.startswith("test_")}
    assert rules
    assert [name for name, rule in rules.items() if not (inspect.getdoc(rule) or "").strip().endswith(".")] == []


def test_a_suite_without_its_plugin_says_so() -> None:
    """A class that forgets to name its plugin is told what to write."""

    class Forgetful(PluginConformance):
        pass

    with pytest.raises(BadArgument, match="Forgetful does not say which plugin it tests"):
        Forgetful()._said("plugin")


def test_a_record_that_is_not_there_is_an_unknown_name() -> None:
    """A misspelt platform or store is guessed, from those the plugin gives."""
    with pytest.raises(UnknownName, match="did you mean 'cpu'"):
        elsewhere.platform_record("kalign_core.embedded", "cpx")
    with pytest.raises(UnknownName, match="the store is one of: toml"):
        elsewhere.store_record("kalign_core.cache.plugin", "sqlite")


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import json", ""),
        ("open('/dev/null').close()", ""),
        ("import contextlib\nwith contextlib.suppress(OSError): open('/dev/npu0')", "opens /dev/npu0"),
        ("import ctypes; ctypes.CDLL('libc.so.6')", "loads the library libc.so.6"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-V'])", "calls subprocess.Popen"),
        ("import kalign_core.hal", "imports kalign_core.hal"),
    ],
)
def test_what_a_plugin_does_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, seen: str) -> None:
    """A library, a device, a process or a platform that a plugin touches while it loads is written down."""
    name = f"plugin_{zlib.crc32(source.encode())}"
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    done = elsewhere.ask("loading", name)
    assert any(act.startswith(seen) for act in done) if seen else done == []


def test_a_process_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin raises in the other process is in the error here."""
    (tmp_path / "plugin_that_raises.py").write_text("raise OSError('libnpu.so')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"OSError: libnpu\.so"):
        elsewhere.ask("loading", "plugin_that_raises")


@pytest.mark.parametrize(
    ("key", "enough"),
    [
        ("GPU-3f597b0b-769d-499a-f2cb-d47b93f30000", True),
        ("4c1f8a7b2d3e4f5061728394a5b6c7d8/0000:60:00.0", True),
        ("node-17.example.org", True),
        ("NPU One 64 GB", False),
        ("npu:0", False),
        ("NPU One/1", False),
        ("npu1-device-3", False),
        ("", False),
    ],
)
def test_what_names_a_device(key: str, enough: bool) -> None:
    """A key has to hold a word that is neither of the model's name nor a small number."""
    assert bool(own_words(Identity("npu", "NPU One 64 GB", key), MODEL)) is enough
