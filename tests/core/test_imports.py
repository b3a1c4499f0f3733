"""What importing kalign brings in, and what it must not: a device, a compiler, a driver library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

import kalign_core

DEVICE_SIDE = ("torch", "triton", "numpy", "pynvml", "amdsmi")
PLUGIN_SIDE = ("pluggy", "importlib.metadata", "filelock", "tomli_w", "platformdirs", "click", "rich")


@pytest.fixture
def imported(child: Callable[..., Any]) -> Callable[..., set[str]]:
    """``imported("kalign_core", names)``: which of ``names`` a fresh process has after importing a module."""

    def find(module: str, names: tuple[str, ...], **variables: str) -> set[str]:
        code = f"import {module}, json, sys; print(json.dumps(sorted(set({names}) & set(sys.modules))))"
        done = child(code, **variables)
        assert done.returncode == 0, done.stderr
        return set(json.loads(done.stdout))

    return find


def test_the_core_is_light(imported: Callable[..., set[str]]) -> None:
    """Importing kalign_core brings in no device library, no plugin machinery and no platform."""
    assert imported("kalign_core", (*DEVICE_SIDE, *PLUGIN_SIDE, "kalign_core.hal")) == set()


@pytest.mark.parametrize("module", ["kalign_core.records", "kalign_core.declare", "kalign_core.settings"])
def test_what_plugins_import_is_light(imported: Callable[..., set[str]], module: str) -> None:
    """The modules that plugins and compile workers import bring in no device library and select no platform."""
    assert imported(module, (*DEVICE_SIDE, "kalign_core.hal")) == set()


@pytest.mark.parametrize("platform", ["", "cpu", "cuda", "rocm", "nobody"])
def test_selecting_touches_no_device(imported: Callable[..., set[str]], platform: str) -> None:
    """Importing kalign_core.hal loads every plugin and probes every platform without a device library."""
    assert imported("kalign_core.hal", DEVICE_SIDE, KALIGN_PLATFORM=platform) == set()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux says of a process")
def test_selecting_opens_no_driver(child: Callable[..., Any]) -> None:
    """After every probe has run no driver's library is loaded, no device file is open, and there is no context."""
    found = json.loads(child(OPENED).stdout)
    assert found == {"libraries": [], "devices": []}


OPENED = """
import json, os
from kalign_core import hal
maps = open("/proc/self/maps").read()
libraries = [name for name in ("libcuda", "libnvidia", "libamdhip", "libamd_smi", "libhsa", "libtorch") if name in maps]
links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
handles = [os.readlink(link) for link in links if os.path.exists(link)]
print(json.dumps({"libraries": libraries, "devices": [h for h in handles if h.startswith("/dev/nv") or "/dri" in h]}))
"""


def test_every_plugin_of_kalign_loads(child: Callable[..., Any]) -> None:
    """The built-in plugins and both vendors load from a checkout or an installation, in this order."""
    listed = "json.dumps([[r.name, r.state, r.reason] for r in hal.plugins.rows])"
    code = f"import json, kalign_core.hal as hal; print({listed})"
    rows = json.loads(child(code, KALIGN_PLUGINS="cuda,rocm").stdout)
    found = [(name, state in ("active", "source"), reason) for name, state, reason in rows if state != "disabled"]
    names = ["core-platforms", "core-tuner", "core-cache", "core-verifier", "cuda", "rocm"]
    assert found == [(name, True, "") for name in names]


@pytest.mark.parametrize("name", kalign_core.__all__)
def test_every_public_name_resolves(name: str) -> None:
    """Each name that the package lists is there when it is asked for."""
    assert getattr(kalign_core, name) is not None


def test_dir_lists_the_public_names() -> None:
    """``dir()`` shows the lazily loaded names too."""
    assert set(kalign_core.__all__) <= set(dir(kalign_core))


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that the package does not have raises AttributeError, so that ``hasattr`` works."""
    with pytest.raises(AttributeError, match="has no attribute 'tuna'"):
        kalign_core.tuna  # noqa: B018


def test_public_names_are_kept(child: Callable[..., Any]) -> None:
    """A name is resolved once and then is a plain attribute."""
    code = "import kalign_core; kalign_core.Config; print('Config' in vars(kalign_core))"
    assert child(code).stdout.strip() == "True"
