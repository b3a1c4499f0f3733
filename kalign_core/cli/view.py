"""What ``kalign tune`` shows on standard error while it works: a table that lives on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kalign_core.cli.output import say, table

Row = dict[str, Any]
STAGES = ("compile", "check", "time", "gate", "race")
FATES = ("refused", "failed", "hung", "refuted")


class View:
    """Plain lines: one when a piece of work begins, one for each kernel's outcome, one for each warning."""

    total = 0

    def begin(self, total: int) -> None:
        """So many pieces of work are to be done."""
        self.total = total

    def work(self, number: int, label: str) -> None:
        """Piece number ``number``, from 0, begins."""
        self.print(f"[{number + 1}/{self.total}] {label}")

    def kernel(self, begun: Row, reference: str) -> None:
        """The tuning of one kernel begins."""

    def progress(self, what: str, done: int, total: int) -> None:
        """As ``tuner.build.Progress``."""

    def row(self, row: Row) -> None:
        """A kernel is done."""
        self.print(f"  {told(row)}")

    def note(self, text: str) -> None:
        """A warning, or what became of a worker."""
        self.print(f"  {text}")

    def close(self) -> None:
        """Nothing more will be shown."""

    def print(self, text: str) -> None:
        """One line that stays."""
        say(text)


class LiveView(View):
    """The same lines, and below them how far the kernel under way is, redrawn in place. ``clock`` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._started, self._number, self._label, self._kernel = clock(), 0, "", ""
        self._stage, self._counts = "", dict.fromkeys((*STAGES, *FATES), 0)
        self._candidates, self._gain = 0, 1.0
        self._live = Live(console=console, get_renderable=self.drawn, refresh_per_second=4, transient=True)

    def begin(self, total: int) -> None:
        super().begin(total)
        self._started = self._clock()
        self._live.start()

    def work(self, number: int, label: str) -> None:
        self._number, self._label, self._kernel = number, label, ""

    def kernel(self, begun: Row, reference: str) -> None:
        self._kernel, self._stage = f"{begun['kernel']} {begun['problem']}", ""
        self._counts, self._candidates, self._gain = dict.fromkeys(self._counts, 0), 0, 1.0

    def progress(self, what: str, done: int, total: int) -> None:
        if what == "best":
            self._gain = total / done if done else 1.0
            return
        self._counts[what] = done
        self._candidates = max(self._candidates, total)
        if what in STAGES:
            self._stage = what

    def close(self) -> None:
        self._live.stop()

    def print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def drawn(self) -> RenderableType:
        """What is on the screen now."""
        head = f"[{self._number + 1}/{self.total}] {self._label}   {self._times()}"
        if not self._kernel:
            return Text(head)
        counts = self._counts
        cells = [self._stage, self._candidates, counts["compile"], counts["check"], counts["time"],
                 *(counts[fate] for fate in FATES), f"{self._gain:.2f}x"]  # fmt: skip
        columns = ("stage", "total", "compiled", "checked", "timed", *FATES, "gain")  # 80 letters with their gaps
        return Group(Text(head), Text(f"  {self._kernel}"), table("", columns, [cells]))

    def _times(self) -> str:
        elapsed_s = self._clock() - self._started
        if not self._number:
            return f"{elapsed_s:.0f} s"
        left_s = elapsed_s / self._number * (self.total - self._number)
        return f"{elapsed_s:.0f} s, about {left_s:.0f} s left"


def view() -> View:
    """The one for this process's standard error."""
    return LiveView(Console(stderr=True)) if sys.stderr.isatty() else View()


def told(row: Row) -> str:
    """One row in one line."""
    name = f"{row.get('kernel', '')} {row.get('problem', '')}"
    if row["how"] == "hit":
        return f"{name}: hit, nothing timed; {row['config']}"
    if "refused" not in row:
        return f"{name}: {row['how']}, stays with its reference: {row['reason']}"
    counts = ", ".join(f"{fate} {row[fate]}" for fate in ("refused", "failed", "refuted", "timed"))
    if row["hung"]:
        counts += f" ({row['hung']} of the failed hung)"
    if row.get("inert_knobs"):
        counts += f", changing no code: {', '.join(row['inert_knobs'])}"
    times = ""
    if "config" in row:
        times = f"; reference {row['reference_us']} us, winner {row['winner_us']} us, gain {row['gain']}x"
        times += f"; {row['config']}"
    seconds = sum(row["seconds"].values())
    return f"{name}: {counts}{times} ({seconds:.1f} s)" + (f"; not stored: {row['reason']}" if row["reason"] else "")


@contextlib.contextmanager
def shown(made: View) -> Iterator[View]:
    """``made``, closed after the block whatever happens in it."""
    try:
        yield made
    finally:
        made.close()
