"""Numbers of rows (token ids) as operators take them, and the check of their range that costs no synchronisation.

Whether an id names a row is known on the device alone, and asking would stop the host. So an id outside its range has
a defined result, and where ``KALIGN_DEBUG_IDS=1`` the device itself is made to stop: the error comes with the next
synchronisation and names the operator, and the process has to be restarted, as after any assertion on a device.
"""

from __future__ import annotations

import torch

from kalign_core import session
from kalign_core.errors import BadArgument

INTEGERS = (torch.int64, torch.int32)


def check_ids(owner: str, name: str, ids: torch.Tensor) -> None:
    """Raise ``BadArgument`` unless ``ids`` are int64 or int32."""
    if ids.dtype not in INTEGERS:
        raise BadArgument(f"{owner}: {name} is {ids.dtype}", why="it takes int64, int32", fix=f"{name}.long()")


def watch_range(owner: str, ids: torch.Tensor, bound: int, ignored: int | None = None) -> None:
    """Under ``KALIGN_DEBUG_IDS=1`` make the device assert that all ``ids`` are in ``[0, bound)`` or ``ignored``."""
    if not session.current().settings.debug_ids or not ids.numel():
        return
    known = (ids >= 0) & (ids < bound)
    if ignored is not None:
        known |= ids == ignored
    torch._assert_async(known.all(), f"{owner}: an id lies outside [0, {bound})")
