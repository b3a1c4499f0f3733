"""How a launch cuts the work is no part of a result: every operator under every value of its kernels' schedule knobs.

The interpreter has no warps and no stages, so those knobs are left to a device; rows, tiles and spans are tried here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kalign_core.api import recorded
from kalign_core.declare import Kernel
from kalign_core.ops import rms_norm_plain
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import leaf, normals, ops
from tests.core.test_ops_every import both_ways
from tests.large_calls import softmax_module

DEVICE_ONLY = ("num_warps", "num_stages", "STAGES")


def inputs(op: Any, **sizes: int) -> tuple[Any, ...]:
    return tuple(op.inputs(sizes, op.dtypes[-1], 0, torch.device("cpu")))


# Sizes that no tile divides, of more rows and tiles than one.
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "swiglu": (ops.swiglu, inputs(ops.swiglu, T=3, F=300)),
    "rms_norm": (ops.rms_norm, inputs(ops.rms_norm, T=19, H=24)),
    "rms_norm with a residual": (ops.rms_norm, (leaf(19, 24), leaf(24), 1e-6, leaf(19, 24, seed=1))),
    "rms_norm of long rows": (ops.rms_norm, (leaf(2, 16400), normals(16400, seed=1))),
    "rms_norm of long rows with a residual": (
        ops.rms_norm,
        (leaf(1, 16400), normals(16400, seed=1), 1e-6, leaf(1, 16400, seed=2)),
    ),
    "rope": (ops.rope, inputs(ops.rope, T=5, HEADS=9, D=12)),
    "rope of pairs": (ops.rope, (*inputs(ops.rope, T=5, HEADS=9, D=12), True)),
    "ratio_kl": (ops.ratio_kl, inputs(ops.ratio_kl, B=3, S=300)),
    "grpo_loss": (ops.grpo_loss, inputs(ops.grpo_loss, B=3, S=2100)),
    "group_advantage": (ops.group_advantage, inputs(ops.group_advantage, B=5, G=6)),
    "embedding": (ops.embedding, (torch.tensor([1, 2, 1, 0, 1, 1, 1, 4, 1]), leaf(5, 1100))),
    "pack": (ops.pack, inputs(ops.pack, B=3, S=4, F=2100)),
    "unpack": (ops.unpack, inputs(ops.unpack, B=3, S=4, F=2100)),
    "softmax": (ops.softmax, (leaf(5, 24),)),
    "softmax of few long rows": (ops.softmax, (leaf(1, 33000),)),
    "softmax of many long rows": (ops.softmax, (leaf(2, 33000),)),
    "log_softmax": (ops.log_softmax, (leaf(5, 24),)),
    "log_softmax of few long rows": (ops.log_softmax, (leaf(1, 33000),)),
    "log_softmax of many long rows": (ops.log_softmax, (leaf(2, 33000),)),
    "selected_logprob": (
        ops.selected_logprob,
        (normals(3, 16400).requires_grad_(), torch.tensor([3, -100, 16399]), 0.7, -100, True, True),
    ),
}


@functools.cache
def kernels_of(label: str) -> tuple[Kernel, ...]:
    """What one call and its gradient run."""
    op, args = CALLS[label]
    with few_rows(), Session(configuration=Settings()).active():
        return tuple(dict.fromkeys(call.kernel for call in recorded(op, *args)))


@contextmanager
def few_rows() -> Iterator[None]:
    """One row counts as few, two as many; rms_norm has rows of more than 16,384 elements for long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_module, "FEW_ROWS", 1)
        patch.setattr(rms_norm_plain, "LONGEST_HELD", 16384)
        yield


@contextmanager
def under(kernel: Kernel, **knobs: int) -> Iterator[None]:
    """``kernel`` has ``knobs`` in its reference, so that they are what is launched."""
    before = kernel.reference

    def changed(problem: Any) -> Any:
        return (before(problem) if callable(before) else before).replace(**knobs)

    object.__setattr__(kernel, "reference", changed)  # declarations are frozen
    try:
        yield
    finally:
        object.__setattr__(kernel, "reference", before)


@functools.cache
def expected(label: str) -> list[bytes]:
    """Results and gradients of one call under the references."""
    with few_rows(), Session(configuration=Settings()).active():
        return both_ways(*CALLS[label])


PAIRS = [
    (label, kernel, knob)
    for label in CALLS
    for kernel in kernels_of(label)
    for knob in kernel.knobs
    if knob not in DEVICE_ONLY
]


@pytest.mark.parametrize(("label", "kernel", "knob"), PAIRS, ids=[f"{a}-{k.name}-{n}" for a, k, n in PAIRS])
def test_how_work_is_cut_changes_no_bit(label: str, kernel: Kernel, knob: str) -> None:
    """Results and gradients have the same bytes under every value of a knob."""
    for value in kernel.knobs[knob]:
        with under(kernel, **{knob: value}), few_rows(), Session(configuration=Settings()).active():
            assert both_ways(*CALLS[label]) == expected(label), value


def test_another_cut_of_the_sum_would_be_noticed() -> None:
    """A number that is part of the contract, changed in the same way, does change bytes."""
    label = "rms_norm"
    (kernel,) = (kernel for kernel in kernels_of(label) if kernel.name == "rms_norm_backward")
    with under(kernel, FOLD=8), Session(configuration=Settings()).active():
        assert both_ways(*CALLS[label]) != expected(label)
    with Session(configuration=Settings()).active():
        assert both_ways(*CALLS[label]) == expected(label)


def test_every_kernel_is_looked_at() -> None:
    """No shared kernel with a knob that cuts work is left out, but the product's: its tiles have their own tests."""
    seen = {kernel.name for _, kernel, _ in PAIRS}
    cutting = {k.name for op in ops.operators() for k in op.kernels if set(k.knobs) - set(DEVICE_ONLY)}
    assert cutting - seen == {"matmul"}
