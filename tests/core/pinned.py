"""A scripted platform whose launches can be pinned as a device's can: fired with addresses instead of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.ops.base import check_out, output_like
from kalign_core.ops.hits import extent
from kalign_core.ops.noting import exact, launch
from kalign_core.ops.recall import Form
from kalign_core.session import Session
from tests.core.scripted import scale_kernel

Addresses = Sequence[int | None]


class PinnedPlatform(ReplayPlatform):
    """``fired`` counts launches by address; while ``refuses`` is set there are none, as while a profiler listens."""

    name: ClassVar[str] = "pinned"

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script)
        self.fired, self.refuses = 0, False

    def launcher(self, *args: Any) -> Any:
        return PinnedLaunch(self, super().launcher(*args))


class PinnedLaunch:
    """A launch that finds its tensors in memory where it was pinned, and reads them as the first ones were laid out."""

    def __init__(self, platform: PinnedPlatform, inner: Any) -> None:
        self._platform, self._inner, self.scripted = platform, inner, inner.scripted

    def __call__(self, *args: Any) -> None:
        self._inner(*args)

    def pin(self, args: Sequence[Any], numbers: tuple[Any, ...]) -> Callable[[Addresses], bool]:
        """A launch of tensors laid out like those of ``args`` at other addresses."""
        likes = args[: len(args) - len(numbers)]
        layouts = [
            None if like is None else (like.dtype, like.shape, like.stride(), extent(like).span) for like in likes
        ]

        def fire(addresses: Addresses) -> bool:
            if self._platform.refuses:
                return False
            self._platform.fired += 1
            self._inner(*_tensors(addresses, layouts), *numbers)
            return True

        return fire


def _tensors(addresses: Addresses, layouts: Sequence[Any]) -> list[torch.Tensor | None]:
    """Tensors of those layouts at those addresses; what shares memory shares a storage, as the interpreter wants it."""
    rooms: list[tuple[int, int]] = []
    for start, length in sorted((at, layout[3]) for at, layout in zip(addresses, layouts, strict=True) if at):
        if rooms and start < rooms[-1][1]:
            rooms[-1] = (rooms[-1][0], max(rooms[-1][1], start + length))
        else:
            rooms.append((start, start + length))
    storages = [torch.frombuffer((ctypes.c_byte * (b - a)).from_address(a), dtype=torch.uint8) for a, b in rooms]
    made: list[torch.Tensor | None] = []
    for at, layout in zip(addresses, layouts, strict=True):
        if at is None:
            made.append(None)
            continue
        dtype, shape, stride, _ = layout
        number, (first, _) = next((n, room) for n, room in enumerate(rooms) if room[0] <= at < room[1])
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(storages[number].untyped_storage(), (at - first) // tensor.element_size(), shape, stride)
        made.append(tensor)
    return made


class Scaled:
    """``scaled(x, factor, out=None)``: x: ``(T F)`` times a number, recalled; ``ran`` counts its plain path."""

    def __init__(self) -> None:
        self.ran = 0
        self.form, self.form_into = Form("scaled", self.plain), Form("scaled(out=)", self.plain, outs=1, in_place=(0,))

    def __call__(self, x: torch.Tensor, factor: Any = 2.0, out: torch.Tensor | None = None) -> torch.Tensor:
        rest = (exact(factor),)
        if out is None:
            known = self.form.again((x,), rest)
            return self.form((x,), rest, (x, factor)) if known is None else known
        known = self.form_into.again((x, out), rest)
        return self.form_into((x, out), rest, (x, factor, out)) if known is None else known

    def plain(self, x: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
        """What every first call of its kind runs."""
        self.ran += 1
        if out is not None:
            check_out("scaled", out, in_place=True, x=x)
        result = output_like("scaled", out, x.shape, x)
        launch(scale_kernel, x, result, *x.shape, x.stride(0), result.stride(0), factor)
        return result


def fired(session: Session) -> int:
    """How many launches of ``session`` were made by address so far."""
    assert isinstance(session.platform, PinnedPlatform)
    return session.platform.fired
