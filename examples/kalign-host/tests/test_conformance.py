"""The backend keeps to its contract with kalign: the suites are kalign's, the answers are ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from kalign_host import identity

from kalign_core.records import Identity
from kalign_core.testing import CheckConformance, PlatformConformance, StoreConformance, StrategyConformance

PLUGIN = "kalign_host.plugin"


class TestPlatform(PlatformConformance):
    """The platform ``host``."""

    plugin = PLUGIN
    name = "host"

    @pytest.fixture
    def twins(self, tmp_path: Path) -> tuple[Identity, ...]:
        """Two machines of one model."""
        return tuple(self._machine(tmp_path / name, name * 32) for name in ("a", "b"))

    @pytest.fixture
    def unreadable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
        """A machine without an id and without a name."""
        monkeypatch.setattr(identity.socket, "gethostname", str)
        return identity.identity(tmp_path)

    def _machine(self, root: Path, machine_id: str) -> Identity:
        (root / "etc").mkdir(parents=True)
        (root / "etc/machine-id").write_text(machine_id + "\n", encoding="ascii")
        return identity.identity(root)


class TestStore(StoreConformance):
    """The store ``sqlite``."""

    plugin = PLUGIN
    store = "sqlite"


class TestStrategy(StrategyConformance):
    """The strategy ``halving``."""

    plugin = PLUGIN
    strategy = "halving"


class TestChecks(CheckConformance):
    """The check ``once more`` and the input family ``powers``."""

    plugin = PLUGIN
