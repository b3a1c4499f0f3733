"""Fixtures of tests that run ``kalign tune`` in processes of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.tune_process import PLUGIN, Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, distribution: Callable[..., str]) -> Callable[[], Place]:
    """``place()`` is a new folder in which the scripted platform is installed as a plugin."""

    def make() -> Place:
        folder = tmp_path_factory.mktemp("place")
        distribution(folder, "replay", PLUGIN)
        return Place(folder)

    return make
