"""The command line: exit codes, what goes to which stream, and that hits time nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kalign_core import session, settings
from kalign_core.cli.main import main
from kalign_core.cli.output import emit
from kalign_core.cli.problems import parse_shape
from kalign_core.errors import BadArgument
from kalign_core.hal.replay import Script
from kalign_core.session import Session
from kalign_core.verifier.checks import SUITE
from tests.core.scripted import FASTER, X, scripted, store_winner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty cache folder."""
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def here(folder: Path) -> Iterator[Session]:
    """A session that keeps its decisions in ``folder``."""
    made = Session(configuration=settings.read({"KALIGN_CACHE_DIR": str(folder)}))
    with made.active():
        yield made
    made.close()


def kalign(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def data(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_tune_then_hit(here: Session, folder: Path) -> None:
    """Tuning writes one file; a second run says that every problem was a hit and times nothing."""
    first = data(kalign("tune", "swiglu", "--shape", "T=2,F=256", "--json"))
    assert {row["how"] for row in first["problems"]} == {"tuned"}
    assert Path(first["file"]).parent == folder
    assert Path(first["file"]).exists()
    with Session(configuration=settings.read({"KALIGN_CACHE_DIR": str(folder)})).active() as second:
        again = data(kalign("tune", "swiglu", "--shape", "T=2,F=256", "--json"))
        second.close()
    assert [row["how"] for row in again["problems"]] == ["hit", "hit"]
    assert "nothing was timed" in again["summary"]


def test_progress_goes_to_standard_error(here: Session) -> None:
    """What standard output carries is data alone; counts, times and gain of each problem stand on standard error."""
    result = kalign("tune", "swiglu", "--shape", "T=1,F=64", "--json")
    json.loads(result.stdout)
    for word in ("refused", "failed", "refuted", "timed", "reference", "winner", "gain"):
        assert word in result.stderr


def test_retune_measures_again(here: Session) -> None:
    """--retune measures what is known already."""
    kalign("tune", "swiglu", "--shape", "T=1,F=64")
    again = data(kalign("tune", "swiglu", "--shape", "T=1,F=64", "--retune", "--json"))
    assert {row["how"] for row in again["problems"]} == {"tuned"}


def test_shapes_file(here: Session, tmp_path: Path) -> None:
    """A file of [[problem]] tables gives operator, sizes, dtype and phase of each."""
    file = tmp_path / "shapes.toml"
    file.write_text('[[problem]]\nop = "rms_norm"\nT = 2\nH = 64\ndtype = "fp16"\nphase = "decode"\n')
    rows = data(kalign("tune", "--shapes", str(file), "--json"))["problems"]
    assert {row["phase"] for row in rows} == {"decode"}
    assert "x:fp16" in rows[0]["args"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tune", "swigloo"), "did you mean 'swiglu'"),
        (("tune", "swiglu", "--shape", "T=4,G=8"), "unknown dimension of swiglu 'G'"),
        (("tune", "swiglu", "--shape", "T=4"), "needs F as well"),
        (("tune", "swiglu", "--shape", "T=0,F=4"), "T=0 is no size"),
        (("tune", "swiglu", "--shape", "T=x,F=4"), "is not NAME=SIZE"),
        (("tune", "swiglu", "--shape", "T=4", "F=4"), "the sizes of a shape are one word with commas"),
        (("tune", "--shape", "T=4,F=4"), "--shape goes with one operator"),
        (("tune", "matmul", "--dtype", "fp32"), "unknown dtype of matmul 'fp32'"),
        (("tune", "swiglu", "--phase", "rollout"), "kalign.declare_phase('rollout')"),
        (("tune", "swiglu", "--effort", "heroic"), "unknown effort 'heroic'"),
        (("tune", "swiglu", "--strategy", "race"), "unknown strategy 'race'"),
        (("tune", "swiglu", "--budget", "-3"), "--budget -3 is no time"),
        (("tune", "swiglu", "--launch-deadline", "0"), "--launch-deadline 0 is no time"),
        (("tune", "nowhere:operator"), "nowhere:operator cannot be imported: ModuleNotFoundError"),
        (("tune", "json:dumps"), "is no operator"),
        (("tune", "--shapes", "nowhere.toml"), "nowhere.toml"),
        (("verify", "nothing"), "unknown operator 'nothing'"),
        (("plugins", "--traceback", "nobody"), "unknown plugin 'nobody'"),
    ],
)
def test_usage_errors(here: Session, arguments: tuple[str, ...], said: str) -> None:
    """A wrong name or value exits with 2 and says what to type, on standard error alone."""
    result = kalign(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "text", ["[[problem]]\nT = 4\n", "[[problem]]\nop = 'swiglu'\nT = 'x'\nF = 4\n", "problem = 3\n", "[[problem\n"]
)
def test_broken_shapes_files(here: Session, tmp_path: Path, text: str) -> None:
    """A shapes file that cannot be used exits with 2 and tunes nothing."""
    file = tmp_path / "shapes.toml"
    file.write_text(text)
    result = kalign("tune", "--shapes", str(file))
    assert result.exit_code == 2
    assert here.store.entries(here.facts(-1).identity) == ()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('dtyp = "bf16"', "unknown field of problem 2 (swiglu) 'dtyp'"),
        ("T = true", "swiglu: T=True is no size"),
        ('dtype = "int8"', '[[problem]] 2: dtype = "bf16"'),
        ("", '[[problem]] 2: op = "swiglu"; T = '),
    ],
)
def test_what_is_wrong_in_a_shapes_file_is_named(here: Session, tmp_path: Path, line: str, said: str) -> None:
    """The message names the field or the value, the problem it is in, and what stands there instead."""
    file = tmp_path / "shapes.toml"
    size = "" if line.startswith("T") or not line else "T = 4\n"
    good = '[[problem]]\nop = "swiglu"\nT = 4\nF = 64\n'
    file.write_text(f'{good}[[problem]]\nop = "swiglu"\nF = 4\n{size}{line}\n')
    result = kalign("tune", "--shapes", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_strategy_is_asked_for_also_where_nothing_is_tuned(here: Session) -> None:
    """A strategy that nobody provides is an error where every problem is a hit, too."""
    kalign("tune", "swiglu", "--shape", "T=1,F=64")
    result = kalign("tune", "swiglu", "--shape", "T=1,F=64", "--strategy", "race")
    assert result.exit_code == 2
    assert "did you mean 'racing'?" in result.stderr


def test_parse_shape() -> None:
    """Sizes are NAME=SIZE, separated by commas, each once."""
    assert parse_shape("T=4096, H=128") == {"T": 4096, "H": 128}
    with pytest.raises(BadArgument):
        parse_shape("T=1,T=2")


def test_verify_passes_what_was_tuned(here: Session) -> None:
    """A stored winner that still gives the reference's bytes is `not refuted`, and the exit code is 0."""
    kalign("tune", "swiglu", "--shape", "T=2,F=256")
    rows = data(kalign("verify", "swiglu", "--shape", "T=2,F=256", "--json"))["verdicts"]
    assert {row["state"] for row in rows} == {"not refuted"}
    assert all(row["cases"] > 5 for row in rows)


@pytest.mark.parametrize(("more", "which"), [((), "quick"), (("--strict",), "strict")])
def test_verify_names_its_suite(here: Session, more: tuple[str, ...], which: str) -> None:
    """A table of verdicts says of which suite, and whether it was all of it."""
    result = kalign("verify", "swiglu", "--shape", "T=2,F=16", *more)
    assert result.stdout.splitlines()[0] == f"suite {SUITE}, {which}"


@pytest.mark.usefixtures("registry")
def test_verify_removes_what_it_refutes() -> None:
    """A stored winner of other bytes costs its decision and exit code 1; what is left is the reference, exit code 0."""
    made = scripted(Script(corrupts=lambda kernel, config, run: config == FASTER))
    store_winner(made, X)
    with made.active():
        first, again = (kalign("verify", "tests.core.scripted:scale", "--shape", "T=3,F=40") for _ in range(2))
    assert (first.exit_code, again.exit_code) == (1, 0)
    assert "removed: the decision for scale T<=4 F=40, whose reference serves from now on" in first.stdout
    assert made.store.entries(made.facts(-1).identity) == ()


def test_doctor_names_platform_device_and_file(here: Session) -> None:
    """doctor says what was chosen and why, who the device is, and where its file is."""
    found = data(kalign("doctor", "--json"))
    assert found["platform"] == "cpu"
    assert found["devices"][0]["identity"]["vendor"] == "cpu"
    assert found["devices"][0]["file"].endswith(".toml")


def test_doctor_without_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no platform can be used, doctor still prints its tables and exits with 3."""
    from kalign_core import hal

    monkeypatch.setattr(hal, "selection", hal.select.Selection((), None, "nothing here", None))
    result = kalign("doctor", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["why"] == "nothing here"


def test_plugins_lists_every_row(here: Session) -> None:
    """plugins shows each plugin with distribution, version, API and state."""
    rows = {row["name"]: row for row in data(kalign("plugins", "--json"))["plugins"]}
    assert {"core-verifier", "cuda", "rocm"} <= set(rows)
    assert rows["core-verifier"]["state"] == "active"


def test_ops_lists_every_kernel(here: Session) -> None:
    """ops shows contract, reference and the size of the space here for each kernel of each operator."""
    rows = {row["kernel"]: row for row in data(kalign("ops", "--json"))["operators"]}
    assert {"swiglu", "swiglu_backward", "rms_norm", "rms_norm_backward", "matmul"} <= set(rows)
    assert rows["rms_norm"]["contract"] == "rms_norm/2"
    assert rows["swiglu"]["candidates"] > 1


def test_tables_are_for_readers(here: Session) -> None:
    """Without --json every command prints tables and no JSON."""
    for command in (("doctor",), ("plugins",), ("ops",), ("cache", "path"), ("cache", "ls")):
        result = kalign(*command)
        assert result.exit_code == 0, result.output
        assert not result.stdout.lstrip().startswith("{")


def test_the_module_runs_as_a_program(child: Any) -> None:
    """python -m kalign_core is the same program as the kalign script."""
    code = "import runpy, sys; sys.argv = ['kalign', '--version']; runpy.run_module('kalign_core', run_name='__main__')"
    assert child(code).stdout.startswith("kalign, version")


def test_session_is_restored(here: Session) -> None:
    """Commands use the session in force and leave it in force."""
    kalign("cache", "path")
    assert session.current() is here


def test_numbers_that_json_has_not_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """A NaN or an infinity among the data leaves what is printed readable for any reader of JSON."""
    emit(True, {"values": [math.nan, {"high": math.inf}, 1.5]})
    refused = lambda name: pytest.fail(f"{name} is no JSON")  # noqa: E731
    assert json.loads(capsys.readouterr().out, parse_constant=refused) == {"values": ["nan", {"high": "inf"}, 1.5]}
