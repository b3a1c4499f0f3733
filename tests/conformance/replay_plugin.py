"""The scripted platform as a plugin would give it, so that the suite finds it by name in any process.

``replay`` itself is handed to a session and selected by nobody, which is why kalign registers no such plugin.
"""

from __future__ import annotations

from kalign_core.embedded import probe
from kalign_core.hookspecs import hookimpl
from kalign_core.records import DeviceModel, PlatformRecord

KALIGN_API = 1
MODEL = DeviceModel(
    "interpreter", "scripted", warp_size=32, max_warps=32, shared_bytes=232448, units=132, scripted=True
)


@hookimpl
def kalign_platforms() -> list[PlatformRecord]:
    """The scripted platform."""
    return [PlatformRecord("replay", probe, "tests.conformance.replay_platform:Replay", (MODEL,), fallback=True)]
