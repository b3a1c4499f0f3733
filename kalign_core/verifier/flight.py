"""How a launch reaches the device: plainly, replayed from a graph, or on a second stream beside other work.

A race may need company to show. Everything here gives the caller's stream back with the launch ordered before what
comes next on it. Devices without streams (an interpreter) launch plainly whatever is asked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.errors import BadArgument

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch, Platform

WAYS = ("", "graph", "stream")
_MOST_COMPANY_BYTES = 1 << 24
_COMPANY_SHARE = 8  # of the arguments' bytes, so that a small problem's company takes little memory
_COMPANY_COPIES = 8
_BRAKE = (1 << 9, 32)  # adding down columns waits for memory at every row, on one multiprocessor


@contextlib.contextmanager
def ready(
    platform: Platform, device: int, launch: Launch, args: Sequence[Any], how: str
) -> Iterator[Callable[[], object]]:
    """A function that launches once on ``device``, the way ``how`` says, each time it is called inside the block.

    Raises ``BadArgument`` for a way that does not exist.
    """
    if how not in WAYS:
        raise BadArgument(f"a case runs {how!r}", why=f"ways to launch are {', '.join(repr(way) for way in WAYS)}")
    if not how or platform.model(device).interpreted:
        yield functools.partial(launch, *args)
    elif how == "graph":
        sampler = platform.timer(device).sampler(launch, [tuple(args)], 1)
        try:
            yield sampler.sample_us
        finally:
            sampler.close()
    else:
        yield functools.partial(_beside_others, device, launch, args)


def _beside_others(device: int, launch: Launch, args: Sequence[Any]) -> None:
    """Launch on a stream of its own while copies keep the current one busy. torch calls every vendor's streams cuda.

    Queueing copies takes the host longer than the device takes for them, so that both streams wait behind a brake until
    everything stands in its queue.
    """
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    # Of integers: torch refuses to scan fractions on a GPU where only deterministic algorithms are allowed.
    brake = torch.empty(_BRAKE, dtype=torch.int32, device=torch.device("cuda", device))
    torch.cumsum(brake, 0, dtype=torch.int32)
    side.wait_stream(here)
    company = _company(device, args)
    for copy in range(_COMPANY_COPIES):
        company[copy % 2].copy_(company[1 - copy % 2])
    with torch.cuda.stream(side):
        launch(*args)
    here.wait_stream(side)


def _company(device: int, args: Sequence[Any]) -> torch.Tensor:
    """Two blocks of memory to copy to and fro."""
    total = sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, torch.Tensor))
    words = max(1, min(_MOST_COMPANY_BYTES, total // _COMPANY_SHARE) // 4)
    return torch.empty((2, words), dtype=torch.int32, device=torch.device("cuda", device))


def random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """The state of torch's random-number generators that a launch on ``device`` could have touched."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)
