"""What the operators on sampled tokens share: log-probabilities as rows of sequences, masks as bytes, constants.

A batch is ``(B S)``, padded, or ``(T)``, packed, which counts as one sequence.
"""

from __future__ import annotations

import torch

from kalign_core.errors import BadArgument
from kalign_core.kernels.tokens import MOST_TOKENS
from kalign_core.ops.base import check_dtype, check_same, rows_of
from kalign_core.problems import one_device

DTYPES = ("fp32", "bf16", "fp16")


def check_tokens(owner: str, mask: torch.Tensor | None, **given: torch.Tensor) -> None:
    """Raise ``BadArgument`` or ``MixedDevices`` unless all are ``(B S)`` or ``(T)`` of one dtype, the mask boolean."""
    one_device(owner, given if mask is None else {**given, "mask": mask})
    (first_name, first), *others = given.items()
    if first.dim() not in (1, 2):
        raise BadArgument(
            f"{owner}: {first_name} is {tuple(first.shape)}",
            why="a batch of sequences is (B S), packed tokens are (T)",
            fix=f"{first_name}.flatten(0, -2)" if first.dim() else f"{first_name}.reshape(1)",
        )
    if first.shape[-1] > MOST_TOKENS:
        raise BadArgument(f"{owner}: a sequence of {first.shape[-1]} tokens", why=f"at most {MOST_TOKENS} are taken")
    check_dtype(owner, first_name, first, DTYPES)
    check_same(owner, (first_name, first), *others)
    if mask is None:
        return
    if mask.dtype is not torch.bool:
        raise BadArgument(f"{owner}: mask is {mask.dtype}", why="it says which tokens count", fix="mask.bool()")
    if mask.shape != first.shape:
        raise BadArgument(f"{owner}: mask is {tuple(mask.shape)}, {first_name} {tuple(first.shape)}")


def check_constants(owner: str, **constants: torch.Tensor | None) -> None:
    """Raise ``BadArgument`` where one of ``constants`` asks for a gradient, which would be lost in silence."""
    for name, tensor in constants.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise BadArgument(
                f"{owner}: {name} requires a gradient", why="only logp has one here", fix=f"{name}.detach()"
            )


def as_bytes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """``mask`` as bytes, in place: what kernels load."""
    return None if mask is None else mask.view(torch.uint8)


def sequences(owner: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as ``(B S)`` with dense rows; a view where strides allow."""
    return rows_of(owner, name, tensor if tensor.dim() == 2 else tensor.unsqueeze(0))


def one_row(*tensors: torch.Tensor | None) -> bool:
    """Whether all ``tensors`` are dense and short enough to be one row: then no row's end is in the way of a load."""
    return all(t is None or (t.is_contiguous() and t.numel() <= MOST_TOKENS) for t in tensors)


def stride_of(tensor: torch.Tensor | None) -> int:
    """The row stride of ``tensor: (B S)``, 0 where there is none."""
    return 0 if tensor is None else tensor.stride(0)
