"""What a probe may look at to decide whether a platform is usable: variables, device files, torch's build.

A value, not the live machine, so that selection is a pure function that tests can call with any machine they describe.
Reading it opens no device, loads no driver library and imports neither torch nor triton.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch's ``version.py`` says of the build: ``version``, and ``cuda`` or ``hip`` where it has them."""

    version: str
    cuda: str | None = None
    hip: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """One machine as a probe sees it.

    ``variables`` are environment variables, ``root`` the folder under which ``/dev`` and ``/proc`` are looked up,
    ``torch`` the installed build or None, ``triton`` whether triton can be imported, ``loaded`` the names of the
    top-level modules already imported in this process.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    torch: TorchBuild | None = None
    triton: bool = False
    loaded: frozenset[str] = frozenset()

    def has(self, path: str) -> bool:
        """Whether ``path`` (absolute, below ``root``) exists; never raises."""
        try:
            return (self.root / path.lstrip("/")).exists()
        except OSError:
            return False

    @classmethod
    def current(cls) -> Environment:
        """The machine and process we are in."""
        watched = ("torch", "triton")
        return cls(
            variables=dict(os.environ),
            torch=installed_torch(),
            triton="triton" in sys.modules or _find("triton") is not None,
            loaded=frozenset(name for name in watched if name in sys.modules),
        )


def installed_torch() -> TorchBuild | None:
    """torch's build, parsed from its ``version.py`` without importing it; None where torch is not installed."""
    spec = _find("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        try:
            text = (Path(folder) / "version.py").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        return parse_torch_version(text)
    return None


def parse_torch_version(text: str) -> TorchBuild:
    """The build that the text of a ``torch/version.py`` describes; fields it lacks are None."""

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}\s*(?::[^=\n]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found.group(1) if found else None

    return TorchBuild(version=value("__version__") or "unknown", cuda=value("cuda"), hip=value("hip"))


def _find(name: str):  # type: ignore[no-untyped-def]  # ModuleSpec is not public in typeshed for 3.11
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
