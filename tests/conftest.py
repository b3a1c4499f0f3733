"""Fixtures that tests of several modules share: a fresh interpreter, and real distributions for it to find."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VENDORS = {"cuda", "rocm"}
PATIENCE_S = 600.0


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are interpreted on the host, unless only a vendor's tests are asked for: one process cannot do both."""
    asked = [Path(argument.partition("::")[0]) for argument in config.args]
    if not all(VENDORS & set(path.parts) for path in asked):
        os.environ |= {"TRITON_INTERPRET": "1", "KALIGN_PLATFORM": "cpu"}


# What a shell may hold that changes what kalign, Python, pytest, pip, Triton or a terminal's text does in a child.
OTHERS_WISHES = (
    "KALIGN_", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PIP_", "TRITON_", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "TTY_",
    "COLUMNS", "LINES", "PYTHONDEVMODE", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONVERBOSE",
    "PYTHONWARNINGS", "XDG_CACHE_HOME",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's decisions, or runs as the user's shell asks."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(OTHERS_WISHES) and name != "TRITON_INTERPRET"]:
            patch.delenv(name)
        patch.setenv("TERM", "xterm")
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))  # a home may take no files
        patch.setenv("KALIGN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Children hear Ctrl-C, though a shell that runs the tests behind its back has this process ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Libraries that tests stand in for may be as slow as the machine is."""
    from kalign_core import driver_library
    from kalign_cuda.identity import NVML
    from kalign_rocm.identity import AMDSMI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_library, "LIMIT_S", PATIENCE_S)
        for library in (NVML, AMDSMI):
            patch.setattr(library, "limit_s", PATIENCE_S)
        yield


@pytest.fixture(scope="session")
def child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``child(code, *folders, KALIGN_MODE="read")`` runs ``code`` in a fresh Python with ``folders`` on its path.

    What this process finds through ``PYTHONPATH`` it finds too: kalign's own needs may be installed nowhere else.
    """

    def run(code: str, *folders: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KALIGN_", "TRITON_INTERPRET"))}
        path = os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "PYTHONPATH": path, **variables},
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def distribution() -> Callable[..., str]:
    """``distribution(folder, "npu", source)`` installs a plugin module with real metadata; gives the module's name."""

    def install(folder: Path, name: str, source: str, *, project: str = "", version: str = "1.2") -> str:
        project = project or f"kalign-{name}"
        module = f"plugin_{project}_{name}".replace("-", "_")
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
        info = folder / f"{project.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[kalign.plugins]\n{name} = {module}\n")
        return module

    return install
