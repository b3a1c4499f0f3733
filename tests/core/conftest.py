"""Fixtures that several modules share: ``kalign tune`` in processes of its own, deadlines, calls that are recalled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

from kalign_core import ops
from kalign_core.hal import torch_compat
from kalign_core.session import Session
from kalign_core.tuner import child as child_process
from tests.core.pinned import PinnedPlatform, Scaled
from tests.core.scripted import CountingStore, scripted
from tests.core.standstill import Standstill
from tests.core.tune_process import PLUGIN, Place

# The same examples on every machine and at every load: no example has a deadline, and none is drawn by chance.
settings.register_profile("kalign", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kalign")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, distribution: Callable[..., str]) -> Callable[[], Place]:
    """``place()`` is a new folder in which the scripted platform is installed as a plugin."""

    def make() -> Place:
        folder = tmp_path_factory.mktemp("place")
        distribution(folder, "replay", PLUGIN)
        return Place(folder)

    return make


@pytest.fixture
def standstill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever waits for a process, time passes only while a fake worker hangs: one at a time, or all are late."""
    path = tmp_path / "hangs"
    monkeypatch.setenv("FAKE_WORKER_HANGS", str(path))
    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=Standstill(path), sleep=time.sleep))


@pytest.fixture(params=["torch's check", "our own"])
def either_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds with torch's check of tensors and with the one in its place."""
    if request.param == "our own":
        monkeypatch.setattr(torch_compat, "_guards_work", lambda: False)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is unknown again afterwards."""
    monkeypatch.setattr(ops, "_known", dict(ops._known))


@pytest.fixture
def session() -> Iterator[Session]:
    """A session whose launches can be pinned."""
    made = Session(platform=PinnedPlatform(), store=CountingStore(), configuration=scripted().settings)
    with made.active():
        yield made


@pytest.fixture
def scaled(session: Session) -> Scaled:
    """An operator that counts how often its plain path runs."""
    return Scaled()
