"""What a launch costs the host: time until the call returns, through the launcher as it is deployed.

A device is usually waited for, so a kernel's time is the device's. Where kernels are shorter than their launches the
host decides, and two configurations may differ there: one with scratch memory or more arguments is launched more
slowly. Launches are sent in bursts that fit the device's queue, so that none waits for room in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kalign_core.hal.base import Pinned, Platform

ROUNDS = 9
MOST_LAUNCHES = 64
LEAST_LAUNCHES = 5
BURST_US = 20_000.0


def host_us(
    platform: Platform,
    device: int,
    launch: Callable[..., None],
    arguments: Sequence[Any],
    device_us: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median host microseconds of one launch of ``launch`` on ``arguments``, which takes the device ``device_us``.

    ``clock`` gives seconds. Raises what the launch raises, and ``DeviceLost``.
    """
    call = deployed(launch, arguments)
    launches = int(max(LEAST_LAUNCHES, min(MOST_LAUNCHES, BURST_US / max(device_us, 1e-3))))
    readings = []
    for _ in range(1 + ROUNDS):
        platform.synchronize(device)
        started = clock()
        for _ in range(launches):
            call()
        readings.append((clock() - started) / launches * 1e6)
    platform.synchronize(device)
    return round(statistics.median(readings[1:]), 3)  # the first one warms what is called


def deployed(launch: Any, arguments: Sequence[Any]) -> Callable[[], None]:
    """What an operator does for ``arguments`` it has seen: the pinned launch of addresses where there is one."""
    count = next((at for at, value in enumerate(arguments) if isinstance(value, (int, float))), len(arguments))
    tensors, numbers = tuple(arguments[:count]), tuple(arguments[count:])
    pin = getattr(launch, "pin", None)
    is_plain = all(isinstance(number, (int, float)) for number in numbers)
    fire: Pinned | None = pin(tuple(arguments), numbers) if pin is not None and is_plain else None

    def call() -> None:
        if fire is None or not fire([None if tensor is None else tensor.data_ptr() for tensor in tensors]):
            launch(*arguments)

    return call
