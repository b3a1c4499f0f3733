"""The scripted platform as a plugin's factory makes it: with a script of its own."""

from __future__ import annotations

from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.records import Identity
from tests.conformance.replay_plugin import MODEL

TOOLCHAIN = {"driver": "1.0", "torch": "2.11.0", "triton": "scripted"}


class Replay(ReplayPlatform):
    """The scripted platform whose script names a board and a whole toolchain."""

    def __init__(self, key: str = "SN-7f3a01c2") -> None:
        super().__init__(Script(Identity("scripted", "Scripted One", key, "0000:0001"), TOOLCHAIN, MODEL))
