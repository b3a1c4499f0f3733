"""``kalign`` as a command for which time passes only while a candidate hangs (``standstill.py``).

What costs its deadline, or the budget, is then certain; the process, its worker and what is said are the real ones.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import SimpleNamespace

from kalign_core.cli import isolated, main, tune
from tests.core.standstill import Standstill

if __name__ == "__main__":
    clock = Standstill(Path(os.environ["REPLAY_HANGS"]))
    isolated.time = tune.time = SimpleNamespace(monotonic=clock)  # type: ignore[assignment]
    isolated.Overdue = functools.partial(isolated.Overdue, clock=clock)  # type: ignore[assignment, misc]
    main.main()
