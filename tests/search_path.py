"""Where a process that a test starts finds its modules: in folders of the test's, then where this process does."""

from __future__ import annotations

import os
from pathlib import Path


def search_path(*folders: Path) -> str:
    """``PYTHONPATH`` with ``folders`` in front of what it holds already."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
