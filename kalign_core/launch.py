"""The launch path, and nothing else on it: a call's key, one look-up, one launch.

A site belongs to one kernel in one session. Its memo is keyed by mode and phase, by everything the compiled code
depends on (dtypes, alignment, sizes and strides, the bucket of bucketed dimensions) and by the tensors' devices. A
miss goes to ``session.resolve``, a launch that fails to ``session.recover``; nothing here reads a file, takes a lock or
waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kalign_core import context
from kalign_core.declare import Kernel
from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch
from kalign_core.problems import integer

if TYPE_CHECKING:
    from kalign_core.session import Session

MEMO_LIMIT = 16384

Resolve = Callable[["Site", context.Call, tuple[Any, ...]], tuple[Launch, bool]]


class Site:
    """Where one kernel is launched in one session; called with the kernel's run-time arguments."""

    __slots__ = ("_bucketed", "_exact", "_tensors", "kernel", "memo", "session")

    def __init__(self, kernel: Kernel, session: Session) -> None:
        self.kernel, self.session = kernel, session
        self.memo: dict[tuple[Any, ...], Launch] = {}
        names = kernel.parameters
        self._tensors = tuple(i for i, name in enumerate(names) if name in kernel.args)
        self._bucketed = tuple((i, kernel.bucket[name]) for i, name in enumerate(names) if name in kernel.bucket)
        self._exact = tuple(i for i, name in enumerate(names) if name not in kernel.args and name not in kernel.bucket)

    def __call__(self, *args: Any) -> Launch | None:
        """Launch the kernel for ``args``, in parameter order; gives the launch if it stands for all such calls."""
        call = context.current()
        key = self.key(call, args)
        launch = self.memo.get(key)
        keep = launch is not None
        if launch is None:
            launch, keep = self.session.resolve(self, call, args)
            if keep:
                if len(self.memo) >= MEMO_LIMIT:
                    self.memo.clear()
                self.memo[key] = launch
        try:
            launch(*args)
        except CandidateFailed as error:
            launch = self.memo[key] = self.session.recover(self, call, args, error)
        return launch if keep else None

    def key(self, call: context.Call, args: Sequence[Any]) -> tuple[Any, ...]:
        """Everything that decides which launch answers ``args``."""
        parts: list[Any] = [call]
        for i in self._tensors:
            tensor = args[i]
            if tensor is None:
                parts.append(None)
            else:
                parts += (tensor.__class__, tensor.dtype, tensor.device, tensor.data_ptr() & 15 == 0)
        for i in self._exact:
            value = args[i]
            kind = value.__class__
            # What equals an integer and is none, as other libraries have them, is told from it and refused.
            parts.append(value if kind is int else float if isinstance(value, float) else (kind, value))
        for i, edge in self._bucketed:
            size = args[i]
            if size.__class__ is not int:
                size = integer(self.kernel, self.kernel.parameters[i], size)
            parts += (edge(size), size >> 31)
        return tuple(parts)
