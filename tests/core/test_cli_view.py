"""What kalign tune shows while it works, and what it makes of a worker's death."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kalign_core.cli.isolated import MOST_FALLEN, Death, Going
from kalign_core.cli.view import LiveView, View, shown, told

TUNED = {
    "kernel": "rms_norm", "problem": "T<=16 H=64", "how": "tuned", "reason": "", "config": "ROWS=2",
    "refused": 1, "failed": 2, "refuted": 3, "timed": 4, "hung": 1, "seconds": {"gate": 1.0, "race": 0.5},
    "reference_us": 20.0, "winner_us": 10.0, "gain": 2.0,
}  # fmt: skip


# --- lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "rms_norm T<=16 H=64: refused 1, failed 2, refuted 3, timed 4 (1 of the failed hung); "
             "reference 20.0 us, winner 10.0 us, gain 2.0x; ROWS=2 (1.5 s)"),
        ({"how": "hit"}, "rms_norm T<=16 H=64: hit, nothing timed; ROWS=2"),
        ({"hung": 0, "how": "not stored", "reason": "the device was slowed down"},
         "rms_norm T<=16 H=64: refused 1, failed 2, refuted 3, timed 4; reference 20.0 us, winner 10.0 us, "
         "gain 2.0x; ROWS=2 (1.5 s); not stored: the device was slowed down"),
    ],
    ids=["tuned", "hit", "not stored"],
)  # fmt: skip
def test_a_row_is_a_line(changed: dict[str, Any], line: str) -> None:
    """Each outcome is one line with counts, times, gain, configuration and, where there is one, the reason."""
    assert told({**TUNED, **changed}) == line


def test_what_is_not_tunable_says_why() -> None:
    """A kernel that stays as it is has its reason instead of counts."""
    row = {"kernel": "rms_norm", "problem": "T<=16 H=64", "how": "not tunable", "reason": "it is collective"}
    assert told(row) == "rms_norm T<=16 H=64: not tunable, stays with its reference: it is collective"


# --- the table ----------------------------------------------------------------------------------------------------


class Screen:
    """A live view on a terminal of text, and a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=160, color_system=None)
        self.view = LiveView(self.console, lambda: self.now)

    def drawn(self) -> str:
        """What would be on a screen as wide as the narrowest in use."""
        paper = Console(file=io.StringIO(), width=80, color_system=None)
        with paper.capture() as captured:
            paper.print(self.view.drawn())
        return captured.get()


@pytest.fixture
def screen() -> Any:
    made = Screen()
    with shown(made.view):
        made.view.begin(4)
        yield made


def columns(text: str) -> dict[str, str]:
    """The table's one row by its head."""
    _, _, head, row = [line for line in text.splitlines() if line.strip()]
    starts = [at for at, letter in enumerate(head) if letter != " " and (at == 0 or head[at - 2 : at] == "  ")]
    ends = [*starts[1:], len(row)]
    return {head[a:b].strip(): row[a:b].strip() for a, b in zip(starts, ends, strict=True)}


def test_the_table_counts(screen: Screen) -> None:
    """Candidates compiled, checked and timed, those out by why, and the best gain so far fit a row of 80 letters."""
    screen.view.work(1, "rms_norm T=16 H=64 bf16 train")
    screen.view.kernel({"kernel": "rms_norm", "problem": "T<=16 H=64"}, "ROWS=1")
    steps = [("compile", 7, 9), ("check", 5, 9), ("time", 4, 9), ("refused", 3, 9), ("hung", 1, 9), ("best", 2, 25)]
    for step in steps:
        screen.view.progress(*step)
    expected = {"stage": "time", "total": "9", "compiled": "7", "checked": "5", "timed": "4",
                "refused": "3", "failed": "0", "hung": "1", "refuted": "0", "gain": "12.50x"}  # fmt: skip
    assert columns(screen.drawn()) == expected
    assert screen.drawn().splitlines()[1].strip() == "rms_norm T<=16 H=64"


def test_the_next_kernel_begins_at_nothing(screen: Screen) -> None:
    """Counts are those of the kernel under way."""
    screen.view.work(0, "rms_norm")
    for _ in range(2):
        screen.view.kernel({"kernel": "rms_norm", "problem": "T<=16"}, "ROWS=1")
        assert columns(screen.drawn())["failed"] == "0"
        screen.view.progress("failed", 2, 9)


def test_time_left_is_told_from_the_work_done(screen: Screen) -> None:
    """After one of four pieces took ten seconds, thirty are left; before any is done nothing is foretold."""
    screen.view.work(0, "first")
    screen.now = 10.0
    assert screen.drawn().split() == ["[1/4]", "first", "10", "s"]
    screen.view.work(1, "second")
    assert "10 s, about 30 s left" in screen.drawn()


def test_outcomes_stay_above_the_table(screen: Screen) -> None:
    """Rows and notes are printed and not redrawn."""
    screen.view.row(TUNED)
    screen.view.note("the worker is started anew: [why]")
    assert "gain 2.0x" in screen.file.getvalue()
    assert "started anew: [why]" in screen.file.getvalue()


def test_plain_lines_need_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal there is a line for each beginning and each outcome, on standard error."""
    view = View()
    view.begin(2)
    view.work(0, "rms_norm")
    view.kernel({}, "")
    view.progress("compile", 1, 2)
    view.row({**TUNED, "how": "hit"})
    assert capsys.readouterr() == ("", "[1/2] rms_norm\n  rms_norm T<=16 H=64: hit, nothing timed; ROWS=2\n")


# --- deaths -------------------------------------------------------------------------------------------------------

REFERENCE, ONE, TWO = (("double", f"BLOCK={n}") for n in (1, 2, 3))


def going(**said: Any) -> Going:
    return Going(kernel={"kernel": "double"}, reference="BLOCK=1", **said)


def death(*suspects: Any, transient: bool = False) -> Death:
    return Death("died of SIGABRT", transient, suspects)


def test_one_suspect_is_the_culprit() -> None:
    """A candidate that is suspect alone, or beside the reference, has fallen."""
    for suspects in ((ONE,), (REFERENCE, ONE)):
        made = going()
        assert made.judge(death(*suspects)) == ""
        assert made.fallen == {
            ONE: {"kernel": "double", "config": "BLOCK=2", "reason": "died of SIGABRT", "transient": False}
        }


def test_a_plugin_that_was_being_asked_is_the_culprit() -> None:
    """A worker that dies or hangs in a hook is the plugin's fault: no candidate falls, and the kernel is given up."""
    made = going()
    said = made.judge(
        Death("timeout at 120 s in a hook", False, (ONE, ("plugin npu", "kalign_veto")), ("npu", "kalign_veto"))
    )
    assert said == (
        "plugin 'npu' in kalign_veto: timeout at 120 s in a hook; without it: export KALIGN_DISABLE_PLUGINS=npu"
    )
    assert made.fallen == {}


def test_several_suspects_are_tried_again_with_care() -> None:
    """Where several are suspect nobody has fallen yet; the next worker waits for every launch."""
    made = going()
    assert made.judge(death(REFERENCE, ONE, TWO)) == ""
    assert (made.fallen, made.careful) == ({}, True)


def test_several_suspects_in_spite_of_care_all_fall() -> None:
    """Where even care leaves several, all are left out, and none of them is remembered for it."""
    made = going(careful=True)
    assert made.judge(death(ONE, TWO)) == ""
    assert [fallen["transient"] for fallen in made.fallen.values()] == [True, True]


def test_a_reference_is_not_left_out() -> None:
    """Where only the reference is suspect the kernel cannot be tuned."""
    assert going().judge(death(REFERENCE)) == "its reference launch: died of SIGABRT"


def test_a_death_without_a_suspect_is_tried_once_more() -> None:
    """What no candidate explains may be chance once."""
    made = going()
    assert made.judge(death()) == ""
    assert "died twice" in made.judge(death())


def test_deaths_come_to_an_end() -> None:
    """A kernel of which so many candidates end their process is given up."""
    made = going()
    verdicts = [made.judge(death(("double", f"WAY={n}"))) for n in range(MOST_FALLEN)]
    assert [bool(verdict) for verdict in verdicts] == [False] * (MOST_FALLEN - 1) + [True]


def test_the_next_kernel_has_its_own_chances() -> None:
    """Care and unexplained deaths belong to one kernel; who has fallen stays out."""
    made = going(careful=True, unexplained=1, fallen={ONE: {}})
    made.next_kernel()
    assert (made.done, made.careful, made.unexplained, made.fallen) == (1, False, 0, {ONE: {}})
