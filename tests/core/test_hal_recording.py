"""Scripts from files, and readings recorded on one platform and given back on another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kalign_core.errors import BadArgument, DeviceLost
from kalign_core.hal.misdeeds import Misdeed, Misdeeds
from kalign_core.hal.recording import Recording, RecordingPlatform
from kalign_core.hal.replay import Clock, ReplayPlatform, Script
from kalign_core.records import Condition
from tests.core.tuner_samples import BEST, REFERENCE, SECOND, Bed, double_kernel, problem, winner_of

NOISY = {BEST: (79.0, 80.0, 81.0), SECOND: (90.0, 91.0)}


def script(tmp_path: Path, **said: Any) -> Script:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(said))
    return Script.read(path)


def readings(made: Script, config: Any, count: int) -> list[float]:
    return [made.time_us("double", config) for _ in range(count)]


# --- files --------------------------------------------------------------------------------------------------------


def test_a_file_says_what_a_script_says(tmp_path: Path) -> None:
    """Times, noise, capture, memory, target, toolchain and condition of a script can come from a file."""
    made = script(
        tmp_path, times_us={str(BEST): 80.0}, other_us=120.0, capturing=True, free_bytes=7, target=["cuda", 90, 32],
        toolchain={"driver": "2"}, condition={"foreign_processes": 1},
    )  # fmt: skip
    assert (readings(made, BEST, 1), readings(made, SECOND, 1)) == ([80.0], [120.0])
    assert (made.capturing, made.free_bytes, made.target) == (True, 7, ("cuda", 90, 32))
    assert (made.toolchain, made.condition) == ({"driver": "2"}, Condition(foreign_processes=1))


def test_noise_and_drift_are_the_same_every_time(tmp_path: Path) -> None:
    """A script's noise comes from its seed, so that two processes see the same."""
    said: dict[str, Any] = {"noise": 0.1, "drift": 0.01, "seed": 3}
    first, again = (readings(script(tmp_path, **said), BEST, 20) for _ in range(2))
    other = readings(script(tmp_path, **{**said, "seed": 4}), BEST, 20)
    assert first == again
    assert first != other
    assert first[-1] > first[0]


def test_an_unknown_field_is_an_error(tmp_path: Path) -> None:
    """A script that says what no script knows is refused rather than half followed."""
    with pytest.raises(TypeError):
        script(tmp_path, times_ms={})


@pytest.mark.parametrize("what", ["explode", ""])
def test_a_misdeed_has_a_known_name(what: str) -> None:
    """What nobody knows how to do is refused with what is known."""
    with pytest.raises(BadArgument, match="abort"):
        Misdeed(what)


def test_a_misdeed_has_its_time() -> None:
    """A misdeed is done by its configuration at its launch, and by nobody else."""
    planned = Misdeeds({BEST: Misdeed("raise", 2), SECOND: Misdeed("lose", 1)})
    assert [planned.raises("double", BEST, run) is None for run in (1, 2, 3)] == [True, False, True]
    assert planned.raises("double", REFERENCE, 2) is None
    assert [planned.loses("double", config, 1) for config in (BEST, SECOND)] == [False, True]


def test_a_scripted_loss_stays(tmp_path: Path) -> None:
    """A device that a file has lost reports it whenever somebody waits for it."""
    made = script(tmp_path, misdeeds={str(BEST): {"what": "lose"}})
    platform = ReplayPlatform(made)
    x, out = torch.ones(4, 8), torch.empty(4, 8)
    platform.launcher(double_kernel, problem(), BEST, (x, out, 4, 8))(x, out, 4, 8)
    for _ in range(2):
        with pytest.raises(DeviceLost):
            platform.synchronize(-1)


# --- recordings ---------------------------------------------------------------------------------------------------


def recorded() -> Recording:
    """What a tuning on a noisy device reads."""
    here = Bed(Script(time_us=Clock(NOISY)))
    here.platform = RecordingPlatform(here.platform)  # type: ignore[assignment]
    here.tune()
    return here.platform.recorded("double")  # type: ignore[attr-defined,no-any-return]


def test_a_recording_has_what_was_read() -> None:
    """Readings are kept by configuration in the order in which they were taken."""
    found = recorded()
    assert found.device == "Scripted One"
    assert found.warm[str(BEST)][:4] == [79.0, 80.0, 81.0, 79.0]
    assert set(found.warm[str(REFERENCE)]) == {100.0}
    assert found.cold == {}


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    """A tuning on recorded readings decides as the one that was recorded."""
    path = tmp_path / "recording.json"
    recorded().write(path)
    assert Recording.read(path) == Recording.read(path)
    report = Bed(script(tmp_path, recording=str(path))).tune()
    assert winner_of(report) == BEST
    assert report.entry is not None
    assert (report.entry.warm_us, report.entry.reference_warm_us) == (80.0, 100.0)


def test_a_file_overrules_its_recording(tmp_path: Path) -> None:
    """Times that a script gives itself stand before those of its recording."""
    path = tmp_path / "recording.json"
    Recording("somewhere", {str(BEST): [80.0], str(SECOND): [90.0]}).write(path)
    made = script(tmp_path, recording=str(path), times_us={str(BEST): 85.0})
    assert (readings(made, BEST, 2), readings(made, SECOND, 2)) == ([85.0, 85.0], [90.0, 90.0])


def test_cold_readings_are_preferred(tmp_path: Path) -> None:
    """Where a recording has cold readings, which decide most problems, those are given back."""
    path = tmp_path / "recording.json"
    Recording("somewhere", {str(BEST): [80.0]}, {str(BEST): [88.0]}).write(path)
    assert readings(script(tmp_path, recording=str(path)), BEST, 1) == [88.0]


@pytest.mark.parametrize("text", ["[1]", "{", '{"device": "x", "hot": {}}'])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    """A file of another form is an error that names it."""
    path = tmp_path / "recording.json"
    path.write_text(text)
    with pytest.raises(BadArgument, match=r"recording\.json"):
        Recording.read(path)
