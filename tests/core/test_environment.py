"""What a probe may look at: read without opening a device or importing a thing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kalign_core.environment import Environment, TorchBuild, parse_torch_version

CUDA = """
from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']
__version__ = '2.11.0+cu130'
debug = False
cuda: Optional[str] = '13.0'
git_version = 'abc'
hip: Optional[str] = None
"""
LIST = """
import dataclasses, json, sys
from kalign_core.environment import Environment
found = Environment.current()
print(json.dumps({"torch": found.torch and dataclasses.asdict(found.torch), "triton": found.triton,
                  "loaded": sorted(found.loaded), "imported": sorted({"torch", "triton"} & set(sys.modules))}))
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUDA, TorchBuild("2.11.0+cu130", cuda="13.0")),
        (CUDA.replace("'13.0'", "None"), TorchBuild("2.11.0+cu130")),
        ("__version__ = '2.9'\ncuda = None\nhip = '7.0.51831'\n", TorchBuild("2.9", hip="7.0.51831")),
        ('__version__ = "2.9"\ncuda: str | None = "12.8"', TorchBuild("2.9", cuda="12.8")),
        ("# cuda = '12.8'\n__version__ = '2.9'", TorchBuild("2.9")),
        ("", TorchBuild("unknown")),
    ],
)
def test_the_build_is_read_from_text(text: str, expected: TorchBuild) -> None:
    """torch's build is what its version file says; what the file lacks is None."""
    assert parse_torch_version(text) == expected


def test_device_files_are_looked_up_below_the_root(tmp_path: Path) -> None:
    """A path exists where it exists below the environment's root, links that lead nowhere excepted."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "npu0").touch()
    (tmp_path / "dev" / "npu1").symlink_to(tmp_path / "gone")
    machine = Environment(root=tmp_path)
    assert [machine.has(f"/dev/npu{n}") for n in (0, 1, 2)] == [True, False, False]


@pytest.mark.parametrize("path", ["/dev/" + "x" * 5000, "/dev/null/below", "/\0"])
def test_looking_up_a_path_never_raises(path: str) -> None:
    """A path that cannot be looked up does not exist."""
    assert Environment().has(path) is False


def found(child: Callable[..., Any], folder: Path, before: str = "") -> dict[str, Any]:
    """What a fresh process with ``folder`` first on its path finds."""
    done = child(before + LIST, folder)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    """A torch that must not be imported beside a triton that may be."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text(CUDA)
    (tmp_path / "triton.py").touch()
    return tmp_path


def test_the_installed_torch_is_not_imported(child: Callable[..., Any], fake_torch: Path) -> None:
    """The machine's torch build and triton are found without importing either."""
    assert found(child, fake_torch) == {
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None},
        "triton": True, "loaded": [], "imported": [],
    }  # fmt: skip


def test_what_is_loaded_is_seen(child: Callable[..., Any], fake_torch: Path) -> None:
    """A triton that was imported before is named, because the interpreter can no longer be asked for."""
    assert found(child, fake_torch, "import triton")["loaded"] == ["triton"]


def test_a_folder_called_torch_is_no_torch(child: Callable[..., Any], tmp_path: Path) -> None:
    """A package without a version file is not taken for an installed torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    assert found(child, tmp_path)["torch"] is None


def test_a_module_that_cannot_be_located_is_absent(child: Callable[..., Any], tmp_path: Path) -> None:
    """A torch in memory without a location, as documentation builds fake it, counts as not installed."""
    before = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\n"
    assert found(child, tmp_path, before)["torch"] is None
