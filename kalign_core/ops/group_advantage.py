"""``group_advantage(rewards, group_size, normalise=True)``; contract in ``kernels/group_advantage.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core.errors import BadArgument
from kalign_core.kernels.group_advantage import group_advantage_kernel
from kalign_core.ops.base import Operator, Sizes, check_dtype, check_flag, random_tensor
from kalign_core.ops.noting import allocate, exact, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.ops.tokens import DTYPES, check_constants
from kalign_core.problems import one_device

MAX_GROUP = 4096


class GroupAdvantage(Operator):
    """``group_advantage(rewards, group_size, normalise=True)``: rewards, groups one after the other -> the same shape.

    ``reward - mean(group)``, over the group's standard deviation (that of a sample: by ``group_size - 1``) where
    normalised (GRPO, arXiv 2402.03300; without: Dr. GRPO, arXiv 2503.20783). A group whose rewards are all equal gives
    exactly 0, and so does a group of one; nothing is added to the deviation, so rewards that differ by less than 1e-22,
    whose squares vanish in float32, give infinities. Any shape whose elements, row-major, are
    whole groups: ``(B)``, ``(prompts group_size)``. float32, bfloat16, float16, computed in float32, rounded once. A
    group's bits depend on that group alone. No gradient. Raises ``BadArgument`` for a size that does not divide the
    rewards, for groups of more than 4,096, for dtypes and for rewards that ask for a gradient.
    """

    name: ClassVar[str] = "group_advantage"
    kernels = (group_advantage_kernel,)
    dims = ("B", "G")
    dtypes = DTYPES
    shapes = ({"B": 1024, "G": 16},)
    small_shapes = ({"B": 4, "G": 8},)

    def __call__(self, rewards: torch.Tensor, group_size: int, normalise: bool = True) -> torch.Tensor:
        try:
            check_constants("group_advantage", rewards=rewards)
            if is_dynamo_compiling() or is_exporting():
                return _opaque(rewards, group_size, normalise)  # type: ignore[no-any-return]  # what this returns
            return forward(rewards, group_size, normalise)
        except AttributeError:
            one_device("group_advantage", {"rewards": rewards})
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        return random_tensor((sizes["B"], sizes["G"]), dtype, seed, device), sizes["G"]

    def oracle(self, *args: Any) -> torch.Tensor:
        rewards, group_size, normalise = (*args, True)[:3]
        groups = rewards.double().reshape(-1, group_size)
        centred = groups - groups.mean(1, keepdim=True)
        if normalise and group_size > 1:
            centred = centred / groups.std(1, keepdim=True)
        alike = (groups == groups[:, :1]).all(1, keepdim=True)
        return torch.where(alike, 0.0, centred).view(rewards.shape)


def forward(rewards: torch.Tensor, group_size: int, normalise: bool) -> torch.Tensor:
    """The operator itself."""
    return _FORWARD((rewards,), (exact(group_size), exact(normalise)), (rewards, group_size, normalise))


def _forward(rewards: torch.Tensor, group_size: int, normalise: bool) -> torch.Tensor:
    _check(rewards, group_size)
    check_flag("group_advantage", "normalise", normalise)
    out = allocate(rewards.shape, rewards.dtype, rewards.device)
    if out.numel():
        groups = rewards.reshape(-1, group_size).contiguous()
        launch(group_advantage_kernel, groups, out.view(groups.shape), *groups.shape, int(normalise))
    return out


_FORWARD = Form("group_advantage", _forward)


def _check(rewards: torch.Tensor, group_size: int) -> None:
    one_device("group_advantage", {"rewards": rewards})
    check_dtype("group_advantage", "rewards", rewards, DTYPES)
    if isinstance(group_size, bool) or not isinstance(group_size, int) or not 1 <= group_size <= MAX_GROUP:
        raise BadArgument(
            f"group_advantage: group_size={group_size!r}", why=f"a group is held whole, from 1 to {MAX_GROUP} rewards"
        )
    if rewards.numel() % group_size:
        raise BadArgument(
            f"group_advantage: {rewards.numel()} rewards are no whole number of groups of {group_size}",
            why="groups stand one after the other",
        )


_opaque = opaque(
    "group_advantage(Tensor rewards, int group_size, bool normalise) -> Tensor",
    forward,
    lambda rewards, group_size, normalise: rewards.new_empty(rewards.shape),
)
