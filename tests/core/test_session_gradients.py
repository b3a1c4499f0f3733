"""Gradients in programs that tune on the way: the same bytes, and nothing of the caller's written or left behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import kalign_core as kalign
from kalign_core.hal.replay import Script
from tests.core.scripted import bits, normals, ops, scripted


def loss_of(x: torch.Tensor) -> torch.Tensor:
    """Two losses that share what they start from, one of them with an operator on an operator's result."""
    gated = ops.swiglu(x, x)
    return (gated * gated).sum() + ops.swiglu(gated, x * 3).sum()


def once(x: torch.Tensor) -> None:
    loss_of(x).backward()


def twice_over_a_kept_graph(x: torch.Tensor) -> None:
    loss = loss_of(x)
    loss.backward(retain_graph=True)
    loss.backward()


def recomputed(x: torch.Tensor, **how: Any) -> None:
    checkpoint(loss_of, x, **how).backward()


def products_are_kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mul.Tensor else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[[torch.Tensor], None]] = {
    "two losses": once,
    "twice over a kept graph": twice_over_a_kept_graph,
    "a checkpoint": functools.partial(recomputed, use_reentrant=False),
    "a checkpoint with reentrance": functools.partial(recomputed, use_reentrant=True),
    "a selective checkpoint": functools.partial(
        recomputed,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, products_are_kept),
    ),
}


class Program:
    """One run of a program in a mode: its gradient, what its hooks saw and whether its tensors are as they were."""

    def __init__(self, way: Callable[[torch.Tensor], None], mode: str) -> None:
        self.here = scripted(Script(time_us=lambda kernel, config: 50.0 if config.num_warps == 2 else 100.0))
        leaf = normals(2, 8).requires_grad_()
        self.hooked: list[str] = []
        self.packed: list[tuple[int, ...]] = []
        leaf.register_hook(lambda grad: self.hooked.append("leaf"))
        with (
            self.here.active(),
            kalign.using(mode=mode),
            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t),
        ):
            inner = leaf * 2
            inner.register_hook(lambda grad: self.hooked.append("inner"))
            before = (bits(inner), inner._version, bits(leaf), leaf._version)
            way(inner)
            self.untouched = (bits(inner), inner._version, bits(leaf), leaf._version) == before
        assert leaf.grad is not None
        self.grad = bits(leaf.grad)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tuple(tensor.shape))
        return tensor

    @property
    def winners(self) -> set[str]:
        """The kernels for which another launch than the reference was decided on."""
        entries = self.here.store.entries(self.here.facts(-1).identity)
        return {entry.key.kernel for entry in entries if entry.config.num_warps == 2}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tuning_on_the_way_changes_nothing(way: Callable[[torch.Tensor], None]) -> None:
    """A program that tunes every kernel when it first meets it has the gradients, hooks and tensors of any other."""
    plain, tuned = Program(way, "off"), Program(way, "tune")
    assert tuned.grad == plain.grad
    assert (tuned.hooked, tuned.packed) == (plain.hooked, plain.packed)
    assert plain.untouched
    assert tuned.untouched
    assert tuned.winners == {"swiglu", "swiglu_backward"}


def test_the_graph_does_not_grow() -> None:
    """What a call that tunes gives is one node away from its inputs, as of any call."""
    for mode in ("off", "tune"):
        leaf = normals(2, 8).requires_grad_()
        with scripted().active(), kalign.using(mode=mode):
            out = ops.swiglu(leaf, leaf.detach())
        assert out.grad_fn is not None
        [(accumulates, _)] = [following for following in out.grad_fn.next_functions if following[0] is not None]
        assert accumulates.variable is leaf  # type: ignore[attr-defined]  # of a node that accumulates
        assert leaf.grad is None
