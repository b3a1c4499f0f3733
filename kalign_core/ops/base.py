"""What an operator is: a callable built on kernels that inherits tuning, gating, remembering and explaining.

A subclass says what it computes; the launch sites decide which launch computes it. Autograd is entered only where a
gradient is needed. Nothing here knows a vendor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from kalign_core.declare import Kernel
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.hal import torch_compat
from kalign_core.ops.hits import extent, overlap
from kalign_core.ops.noting import allocate, check_readable
from kalign_core.problems import one_device
from kalign_core.records import DTYPES

Sizes = Mapping[str, int]
TORCH_BY_SHORT = {short: getattr(torch, name) for name, short in DTYPES.items()}
LARGEST = torch.finfo(torch.float32).max
SMALLEST = torch.finfo(torch.float32).tiny
SHORT_BY_TORCH = {dtype: short for short, dtype in TORCH_BY_SHORT.items()}


class Operator(ABC):
    """A shared operator, called as a function.

    ``name`` is its public name, ``kernels`` what it is built on, ``dims`` the dimensions ``--shape`` takes,
    ``dtypes`` the short names it accepts, ``shapes`` and ``small_shapes`` the sizes tuned by default on a GPU and
    under an interpreter.
    """

    name: ClassVar[str]
    kernels: ClassVar[tuple[Kernel, ...]]
    dims: ClassVar[tuple[str, ...]]
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")
    shapes: ClassVar[tuple[Sizes, ...]]
    small_shapes: ClassVar[tuple[Sizes, ...]]

    @abstractmethod
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the operator."""

    @abstractmethod
    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        """Arguments for a call at ``sizes`` in ``dtype``, random from ``seed``; those with gradients require them."""

    def forms(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
        """Arguments of every form that is tuned for ``sizes`` by name: ``inputs``, and those that run other kernels."""
        yield self.inputs(sizes, dtype, seed, device)

    @abstractmethod
    def oracle(self, *args: Any) -> torch.Tensor:
        """The operator in float64, for accuracy; differentiable; never compared bytewise."""

    def exercise(self, *args: Any) -> None:
        """Call the operator on ``args`` and go back through it, so that every one of its kernels runs."""
        results = self(*args)
        ends = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])

    def sizes(self, given: Mapping[str, Any], *, fix: str = "") -> dict[str, int]:
        """``given`` checked against ``dims``; raises ``UnknownName`` or ``BadArgument`` with what to type.

        ``fix`` is what to type where sizes are not given on the command line.
        """
        fix = fix or "--shape " + ",".join(f"{dim}={size}" for dim, size in self.shapes[0].items())
        for dim in given:
            if dim not in self.dims:
                raise UnknownName(f"dimension of {self.name}", dim, self.dims, fix=fix)
        missing = [dim for dim in self.dims if dim not in given]
        if missing:
            raise BadArgument(f"{self.name} needs {', '.join(missing)} as well", fix=fix)
        wrong = [f"{dim}={size!r}" for dim, size in given.items() if not _is_size(size)]
        if wrong:
            raise BadArgument(f"{self.name}: {', '.join(wrong)} is no size to tune for", fix=fix)
        return {dim: given[dim] for dim in self.dims}

    def dtype_named(self, dtype: str, *, fix: str = "") -> str:
        """The short name of ``dtype`` (``bf16`` or ``bfloat16``); raises ``UnknownName`` for one it does not take."""
        short = DTYPES.get(dtype, dtype)
        if short not in self.dtypes:
            raise UnknownName(f"dtype of {self.name}", dtype, self.dtypes, fix=fix or f"--dtype {self.dtypes[0]}")
        return short

    def __repr__(self) -> str:
        return f"<operator {self.name}>"


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# --- argument checks ----------------------------------------------------------------------------------------------


def tensors_only(owner: str, **given: Any) -> None:
    """Raise ``BadArgument`` for what is no tensor or none a kernel can read; ``bias`` and ``out`` may be None."""
    optional = ("bias", "out")
    for name, value in given.items():
        check_readable(owner, name, value)
    one_device(owner, {name: value for name, value in given.items() if value is not None or name not in optional})


def check_out(owner: str, out: torch.Tensor, *, in_place: bool, **inputs: torch.Tensor) -> None:
    """Raise ``BadArgument`` unless ``out`` can take the result of a call on ``inputs``; marks it as written.

    Nothing that needs a gradient, no element in two rows, and no memory shared with an input, unless ``in_place``
    allows exactly the same one.
    """
    no_gradients(owner, out, *inputs.values())
    if out.dim() == 2 and out.shape[0] > 1 and out.stride(1) == 1 and out.stride(0) < out.shape[1]:
        raise BadArgument(
            f"{owner}: rows of out share memory, {out.shape[1]} elements are {out.stride(0)} apart",
            why="which of them an element keeps would be left to chance",
            fix="out=out.contiguous(), or leave out= away",
        )
    for name, tensor in inputs.items():
        same = (out.data_ptr(), out.stride()) == (tensor.data_ptr(), tensor.stride())
        if overlap(tensor.data_ptr() - out.data_ptr(), extent(out), extent(tensor)) and not (in_place and same):
            raise BadArgument(
                f"{owner}: out shares memory with {name}",
                why="an element could be written before it is read",
                fix=f"out=torch.empty_like({name})" if in_place else "leave out= away",
            )
    if not out.is_inference():
        torch_compat.mark_written((out,))


def no_gradients(owner: str, *tensors: torch.Tensor) -> None:
    """Raise ``BadArgument`` where a call with ``out=`` would have to be differentiated."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise BadArgument(
            f"{owner}: out= with tensors that require gradients",
            why="autograd cannot go back through a result that is written over",
            fix="leave out= away, or call it under torch.no_grad()",
        )


def rows_of(owner: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor: (... n)`` as ``(rows n)`` with a dense last axis; a view wherever strides allow."""
    if tensor.dim() == 2 and tensor.stride(1) == 1:
        return tensor
    if tensor.dim() < 1:
        raise BadArgument(
            f"{owner}: {name} is a scalar", why="rows lie along the last axis", fix=f"{name}.reshape(1, 1)"
        )
    flat = tensor.reshape(-1, tensor.shape[-1]) if tensor.numel() else tensor.new_empty(0, tensor.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def check_dtype(owner: str, name: str, tensor: torch.Tensor, dtypes: Sequence[str]) -> None:
    """Raise ``BadArgument`` unless ``tensor`` has one of ``dtypes`` (short names)."""
    if SHORT_BY_TORCH.get(tensor.dtype) not in dtypes:
        known = [str(TORCH_BY_SHORT[d]).removeprefix("torch.") for d in dtypes]
        raise BadArgument(
            f"{owner}: {name} is {tensor.dtype}", why=f"it takes {', '.join(known)}", fix=f"{name}.to(torch.{known[0]})"
        )


def check_same(owner: str, reference: tuple[str, torch.Tensor], *others: tuple[str, torch.Tensor]) -> None:
    """Raise ``BadArgument`` unless all tensors share shape and dtype, ``MixedDevices`` unless they share a device."""
    first_name, first = reference
    if any(tensor.device != first.device for _, tensor in others):
        one_device(owner, dict((reference, *others)))
    for name, tensor in others:
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            raise BadArgument(
                f"{owner}: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                f"{first_name} is {tuple(first.shape)} {first.dtype}",
                why="they share shape and dtype",
                fix=f"{name}.to({first_name}.dtype)" if tensor.shape == first.shape else "",
            )


def check_number(owner: str, name: str, value: Any, least: float, most: float, *, example: float) -> None:
    """Raise ``BadArgument`` unless ``value`` is a number (not a boolean or a tensor) in ``[least, most]``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        shown = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        raise BadArgument(
            f"{owner}: {name} is {shown}", why=f"it takes a number from {least:g} to {most:g}", fix=f"{name}={example}"
        )


def check_flag(owner: str, name: str, value: Any) -> None:
    """Raise ``BadArgument`` unless ``value`` is True or False: to ask a tensor would stop the host."""
    if not isinstance(value, bool):
        shown = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
        raise BadArgument(f"{owner}: {name} is {shown}", why="it is True or False", fix=f"{name}=True")


def output_like(owner: str, out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """``out`` if it fits, else a new dense tensor of ``shape`` with dtype and device of ``like``.

    Raises ``BadArgument`` where ``out`` has another shape, dtype or device, or its last axis is not dense.
    """
    if out is None:
        return allocate(shape, like.dtype, like.device)
    if out.shape != torch.Size(shape) or out.dtype != like.dtype or out.device != like.device:
        raise BadArgument(
            f"{owner}: out is {tuple(out.shape)} {out.dtype} on {out.device}",
            why=f"the result is {tuple(shape)} {like.dtype} on {like.device}",
            fix="leave out= away, or allocate it like the result",
        )
    if not out.is_contiguous() and not (out.dim() == 2 and out.stride(1) == 1):
        raise BadArgument(f"{owner}: out has strides {out.stride()}", why="its last axis has to be dense")
    return out


def random_tensor(shape: Sequence[int], dtype: str, seed: int, device: torch.device) -> torch.Tensor:
    """Standard normals from ``seed`` on ``device``, made in float32 and rounded to ``dtype``."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32)
    return values.to(TORCH_BY_SHORT[dtype])
