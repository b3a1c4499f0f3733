"""How a launch reaches the device: plainly, replayed from a graph, or on a second stream beside other work.

A race may need company to show. Everything here gives the caller's stream back with the launch ordered before what
comes next on it. Devices without streams (an interpreter) launch plainly whatever is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.errors import BadArgument

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch, Platform

WAYS = ("", "graph", "stream")
_COMPANY_WORDS = 1 << 22
_COMPANY_COPIES = 8


def fly(platform: Platform, device: int, launch: Launch, args: Sequence[Any], how: str) -> None:
    """Launch once on ``device``, the way ``how`` says; raises ``BadArgument`` for a way that does not exist."""
    if how not in WAYS:
        raise BadArgument(f"a case runs {how!r}", why=f"ways to launch are {', '.join(repr(way) for way in WAYS)}")
    if not how or platform.model(device).backend == "interpreter":
        launch(*args)
    elif how == "graph":
        sampler = platform.timer(device).sampler(launch, [tuple(args)], 1)
        try:
            sampler.sample_us()
        finally:
            sampler.close()
    else:
        _beside_others(device, launch, args)


def _beside_others(device: int, launch: Launch, args: Sequence[Any]) -> None:
    """Launch on a stream of its own while copies keep the current one busy. torch calls every vendor's streams cuda."""
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(here)
    company = torch.empty((2, _COMPANY_WORDS), dtype=torch.int32, device=torch.device("cuda", device))
    for copy in range(_COMPANY_COPIES):
        company[copy % 2].copy_(company[1 - copy % 2])
    with torch.cuda.stream(side):
        launch(*args)
    here.wait_stream(side)


def random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """The state of torch's random-number generators that a launch on ``device`` could have touched."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)
