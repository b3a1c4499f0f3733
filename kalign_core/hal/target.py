"""A device that is only compiled for: it has limits and nothing else, no memory, no clock, no driver.

What an operator launches on it is recorded from tensors on torch's ``meta`` device, which have shapes and strides but
no bytes, so that sizes of any machine can be asked about on any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch, Platform, Timer
from kalign_core.records import DeviceModel, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Config

NOWHERE = -1  # torch's number of the meta device


class TargetPlatform(Platform):
    """The one device of ``model``; nothing can be launched on it."""

    name: ClassVar[str] = "target"
    device_type: ClassVar[str] = "meta"
    launch_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, model: DeviceModel) -> None:
        self._model = model

    def devices(self) -> tuple[int, ...]:
        return (NOWHERE,)

    def identity(self, device: int) -> Identity:
        return Identity(vendor=self._model.backend, name=self._model.target, key="unknown")

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain.of(driver="unknown")

    def model(self, device: int) -> DeviceModel:
        return self._model

    def compile_target(self, device: int) -> tuple[str, int | str, int]:
        return self._model.compile_target

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        raise CandidateFailed(f"{kernel} cannot be launched on {self._model.target}: no device is at hand")

    def timer(self, device: int) -> Timer:
        raise CandidateFailed(f"nothing can be timed on {self._model.target}: no device is at hand")

    def synchronize(self, device: int) -> None:
        """Nothing runs there."""


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside the block torch makes on the ``meta`` device what it is asked to make on any, whatever the generator.

    Operators make their inputs with a generator of the device, which ``meta`` has not. What names no device stays the
    host's, so that lengths which an operator has to know are numbers.
    """
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if given.get("device") is not None:
                given.pop("generator", None)
                given["device"] = "meta"
            return func(*args, **given)

    with OnMeta():
        yield


def forgotten(argument: Any) -> Any:
    """``argument`` without its bytes, where it is a tensor: on the ``meta`` device, still asking for its gradient."""
    if not hasattr(argument, "data_ptr") or argument.device.type == "meta":
        return argument
    return argument.detach().to("meta").requires_grad_(argument.requires_grad)
