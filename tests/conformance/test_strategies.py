"""kalign's own search strategies keep to the contract that other people's have to."""

from __future__ import annotations

from kalign_core.testing import StrategyConformance


class TestRacing(StrategyConformance):
    """The strategy that is used unless another is asked for."""

    plugin = "kalign_core.tuner.plugin"
    strategy = "racing"
