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


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are interpreted on the host, unless only a vendor's tests are asked for: one process cannot do both."""
    asked = [Path(argument.partition("::")[0]) for argument in config.args]
    if not all(VENDORS & set(path.parts) for path in asked):
        os.environ |= {"TRITON_INTERPRET": "1", "KALIGN_PLATFORM": "cpu"}


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's decisions, or runs in the mode that the user's shell asks for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("KALIGN_")]:
            patch.delenv(name)
        patch.setenv("KALIGN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Children hear Ctrl-C, though a shell that runs the tests behind its back has this process ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def child() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``child(code, *folders, KALIGN_MODE="read")`` runs ``code`` in a fresh Python with ``folders`` on its path.

    What this process finds through ``PYTHONPATH`` it finds too: kalign's own needs may be installed nowhere else.
    """

    def run(code: str, *folders: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KALIGN_", "TRITON_"))}
        path = os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**inherited, "PYTHONPATH": path, **variables},
            capture_output=True, text=True, timeout=120, check=False,
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
