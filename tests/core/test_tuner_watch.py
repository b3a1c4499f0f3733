"""The black box: what a process was at is written down where its end cannot reach it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kalign_core.errors import CandidateFailed, DeviceLost
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.tuner.failures import Guarded
from kalign_core.tuner.watch import BOX_BYTES, HOOK_S, IDLE_S, BlackBox, Overdue, WatchedPlatform
from tests.core.tuner_samples import BEST, REFERENCE, SECOND, builtin, double_kernel, problem


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def box(tmp_path: Path) -> BlackBox:
    return BlackBox.made(tmp_path / "box")


def watched(box: BlackBox, script: Script | None = None, *, careful: bool = False) -> WatchedPlatform:
    made = WatchedPlatform(ReplayPlatform(script), box, bind_s=60.0)
    made.watch(5.0, careful=careful)
    return made


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 8), torch.empty(4, 8)


def launcher(platform: WatchedPlatform, config: Any) -> Any:
    x, out = tensors()
    return platform.launcher(double_kernel, problem(), config, (x, out, 4, 8))


def named(*configs: Any) -> tuple[tuple[str, str], ...]:
    return tuple(("double", str(config)) for config in configs)


# --- the box ------------------------------------------------------------------------------------------------------


def test_a_box_outlives_its_writer(tmp_path: Path) -> None:
    """What a process wrote last is read after it was killed, with how long that may take."""
    path = tmp_path / "box"
    box = BlackBox.made(path)
    child = os.fork()
    if child == 0:
        BlackBox(path).write(named(BEST, SECOND), 5.0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    flight = box.read()
    assert (flight.suspects, flight.deadline_s) == (named(BEST, SECOND), 5.0)


def test_half_a_box_names_nobody(box: BlackBox) -> None:
    """Suspects that were not written to their end are no suspects."""
    box.write(named(BEST), 5.0)
    box._memory[30] ^= 1
    assert box.read().suspects == ()


def test_a_box_is_never_too_small(box: BlackBox) -> None:
    """Of more suspects than fit the last one is kept, and a name that does not fit is left out."""
    box.write([("kernel", str(n) * 100) for n in range(2000)], 5.0)
    assert box.read().suspects == (("kernel", "1999" * 100),)
    box.write([("kernel", "x" * BOX_BYTES)], 5.0)
    assert box.read() == type(box.read())(2, 5.0, ())


# --- deadlines ----------------------------------------------------------------------------------------------------


def test_a_launch_may_take_its_time(box: BlackBox) -> None:
    """Nothing is overdue before its deadline, and every sign of life begins it anew."""
    clock = Clock()
    overdue = Overdue(box, clock)
    box.write(named(BEST), 5.0)
    overdue()
    for now in (4.0, 8.0):
        clock.now = now
        box.beat()
        overdue()
    clock.now = 12.9
    overdue()


def test_what_takes_longer_is_overdue(box: BlackBox) -> None:
    """A launch that gives no sign of life for its deadline raises, in words that failures are told by."""
    clock = Clock()
    overdue = Overdue(box, clock)
    box.write(named(BEST), 5.0)
    overdue()
    clock.now = 5.1
    with pytest.raises(TimeoutError, match="timeout at 5 s on the device"):
        overdue()


def test_thinking_has_another_deadline(box: BlackBox) -> None:
    """Between launches a process may be silent for long, but not for ever; a message is a sign of life."""
    clock = Clock()
    overdue = Overdue(box, clock)
    overdue()
    clock.now = IDLE_S
    overdue()
    overdue.alive()
    clock.now = 2 * IDLE_S
    overdue()
    clock.now = 2 * IDLE_S + 1
    with pytest.raises(TimeoutError, match="no sign of life"):
        overdue()


def test_a_hook_has_a_deadline(box: BlackBox) -> None:
    """While a plugin is asked the box says which and what, beside what was launched before, and for how long it may."""
    platform, clock = watched(box), Clock()
    launcher(platform, BEST)(*tensors(), 4, 8)
    overdue = Overdue(box, clock)
    with platform.asking("npu", "kalign_veto"):
        assert box.read().suspects == (*named(BEST), ("plugin npu", "kalign_veto"))
        assert box.read().asked == ("npu", "kalign_veto")
        overdue()
        clock.now = HOOK_S + 1
        with pytest.raises(TimeoutError, match="timeout at 120 s in a hook"):
            overdue()
    assert (box.read().suspects, box.read().asked) == (named(BEST), None)


def test_who_watches_is_told_of_every_hook() -> None:
    """``asking`` is entered with the plugin and the hook before the plugin is called, and left after it."""
    told: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def asking(plugin: str, hook: str) -> Iterator[None]:
        told.append((plugin, hook))
        yield
        told.append(("left",))

    found = builtin("@hookimpl\ndef kalign_veto():\n    raise OSError('gone')")
    found.asking = asking
    asked = {"kernel": double_kernel, "problem": problem(), "model": ReplayPlatform().model(-1), "config": BEST}
    answers = list(found.ask("kalign_veto", **asked))
    assert told == [("core-tuner", "kalign_veto"), ("left",), ("p0", "kalign_veto"), ("left",)]
    assert isinstance(answers[-1].error, OSError)


# --- the platform -------------------------------------------------------------------------------------------------


def test_what_was_launched_is_suspect_until_the_device_is_well(box: BlackBox) -> None:
    """Launches add up to suspects, and waiting for the device clears them all."""
    platform = watched(box)
    first, second = launcher(platform, BEST), launcher(platform, SECOND)
    assert box.read().suspects == ()
    x, out = tensors()
    first(x, out, 4, 8)
    second(x, out, 4, 8)
    first(x, out, 4, 8)
    assert (box.read().suspects, box.read().deadline_s) == (named(BEST, SECOND), 5.0)
    platform.synchronize(-1)
    assert (box.read().suspects, box.read().deadline_s) == ((), 0.0)
    assert torch.equal(out, x * 2)


def test_a_careful_platform_has_one_suspect(box: BlackBox) -> None:
    """Where each launch is waited for, whoever loses the device is the only suspect."""
    script = Script(loses=lambda kernel, config, run: config == SECOND)
    platform = watched(box, script, careful=True)
    launches = [launcher(platform, config) for config in (REFERENCE, BEST, SECOND)]
    x, out = tensors()
    with pytest.raises(DeviceLost):
        for launch in launches:
            launch(x, out, 4, 8)
    assert box.read().suspects == named(SECOND)


def test_nothing_is_waited_for_in_capture(box: BlackBox) -> None:
    """While a graph is recorded even a careful platform does not wait, which would end the recording."""
    platform = watched(box, Script(capturing=True, lost=True), careful=True)
    launch = launcher(platform, BEST)
    x, out = tensors()
    launch(x, out, 4, 8)
    assert box.read().suspects == named(BEST)


def test_binding_is_watched_too(box: BlackBox) -> None:
    """While a launch is made ready its configuration is the suspect, with the time that compiling may take."""
    seen = []

    def fails(kernel: str, config: Any) -> str | None:
        seen.append(box.read())
        return "no" if config == BEST else None

    platform = watched(box, Script(fails=fails))
    with pytest.raises(CandidateFailed):
        launcher(platform, BEST)
    assert [(flight.suspects, flight.deadline_s) for flight in seen] == [(named(BEST), 60.0)]
    assert (box.read().suspects, box.read().deadline_s) == ((), 0.0)


def test_a_reading_clears_what_came_before(box: BlackBox) -> None:
    """A reading is waited for: while it is taken its configuration is suspect, afterwards nobody is."""
    seen = []

    def time_us(kernel: str, config: Any) -> float:
        seen.append(box.read().suspects)
        return 7.0

    platform = watched(box, Script(time_us=time_us))
    x, out = tensors()
    sampler = platform.timer(-1).sampler(Guarded(launcher(platform, BEST)), [(x, out, 4, 8)], 1)
    assert sampler.sample_us() == 7.0
    assert seen == [named(BEST)]
    assert box.read().suspects == ()


def test_a_watched_platform_is_the_platform(box: BlackBox) -> None:
    """Name, options, and whatever else a platform has are those of the one that is watched."""
    platform = watched(box, Script(free_bytes=5, capturing=True, target=("cuda", 90, 32)))
    inner = ReplayPlatform()
    assert (platform.name, platform.device_type, platform.launch_options) == ("replay", "cpu", inner.launch_options)
    assert (platform.free_bytes(-1), platform.capturing(), platform.compile_target(-1)) == (5, True, ("cuda", 90, 32))
    assert platform.exact_dot == inner.exact_dot
    assert platform.identity(-1) == inner.identity(-1)
