"""kalign's own checks keep to the contract that other people's have to."""

from __future__ import annotations

from kalign_core.testing import CheckConformance


class TestCore(CheckConformance):
    """The mandatory suite."""

    plugin = "kalign_core.verifier.plugin"
