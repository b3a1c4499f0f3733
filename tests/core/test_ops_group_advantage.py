"""ops.group_advantage: accuracy, the bits its contract promises, groups that are all alike, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "plain"])


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_it_is_accurate(size: int, dtype: torch.dtype, normalise: bool) -> None:
    """The result is that of float64, rounded once."""
    rewards = normals(5, size, dtype=dtype)
    exact = ops.group_advantage.oracle(rewards, size, normalise)
    assert_near(ops.group_advantage(rewards, size, normalise), exact, magnitude=exact.abs() + 4, steps=16)


@both
def test_its_bits_are_the_contract_s(normalise: bool) -> None:
    """The result is, addition by addition, what the contract in the kernel's file says."""
    rewards = normals(3, 6)
    f = np.float32

    def tree(values: Any) -> Any:
        values = np.concatenate((values, np.zeros((3, 2), f)), 1)
        while values.shape[1] > 1:
            values = values[:, 0::2] + values[:, 1::2]
        return values

    expected = rewards.numpy() - tree(rewards.numpy()) / f(6)
    if normalise:
        expected = expected / np.sqrt(tree(expected * expected) / f(5))
    assert bits(ops.group_advantage(rewards, 6, normalise)) == expected.tobytes()


@both
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1.0 / 3, 1e30])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_groups_that_are_alike_give_zero(size: int, reward: float, normalise: bool) -> None:
    """A group of equal rewards gives exactly +0, also where their mean, rounded, is none of them."""
    out = ops.group_advantage(torch.full((3, size), reward), size, normalise)
    assert bits(out) == bytes(4 * 3 * size)


@both
def test_the_least_difference_counts(normalise: bool) -> None:
    """A single reward that differs in its last bit makes a group like any other."""
    rewards = torch.ones(1, 8)
    rewards[0, 5] += torch.finfo(torch.float32).eps
    out = ops.group_advantage(rewards, 8, normalise)
    assert out.argmax() == 5
    assert out[0, 5] > 0


@both
def test_a_nan_spoils_its_group_alone(normalise: bool) -> None:
    """A reward that is no number is seen in its own group, and in no other."""
    rewards = normals(3, 8)
    expected = ops.group_advantage(rewards, 8, normalise)
    rewards[1, 2] = torch.nan
    out = ops.group_advantage(rewards, 8, normalise)
    assert out[1].isnan().all()
    assert [bits(out[0]), bits(out[2])] == [bits(expected[0]), bits(expected[2])]


@company
def test_a_group_keeps_its_bits(company: str) -> None:
    """A group's bits depend on nothing but the group."""
    assert_rows_keep_their_bits(lambda rewards: (ops.group_advantage(rewards, 24),), company, normals(5, 24))


@pytest.mark.parametrize("shape", [(24,), (4, 6), (2, 2, 6), (3, 8)])
def test_any_shape_of_whole_groups_is_taken(shape: tuple[int, ...]) -> None:
    """Groups stand one after the other, whatever the shape, and the result has the same."""
    rewards = normals(*shape)
    out = ops.group_advantage(rewards, 6)
    assert out.shape == rewards.shape
    assert bits(out) == bits(ops.group_advantage(rewards.reshape(-1, 6), 6))


def test_no_reward_gives_none() -> None:
    """Nothing in, nothing out."""
    assert ops.group_advantage(torch.empty(0, 4), 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("rewards", "size", "says"),
    [
        (normals(7), 2, "7 rewards are no whole number of groups of 2"),
        (normals(8), 0, "group_size=0"),
        (normals(8), 2.0, "group_size=2.0"),
        (normals(8), True, "group_size=True"),
        (normals(8), 4097, "from 1 to 4096 rewards"),
        (normals(8).double(), 2, "rewards is torch.float64"),
        (leaf(8), 2, r"rewards requires a gradient\n.*\n.*rewards.detach\(\)"),
        ([1.0, 2.0], 2, "rewards is list, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(rewards: Any, size: Any, says: str) -> None:
    """Wrong kinds, sizes and gradients that would be lost name the argument and the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)group_advantage: .*{says}"):
        ops.group_advantage(rewards, size)


@pytest.mark.parametrize("normalise", [None, "no", torch.tensor(True)])
def test_whether_to_normalise_is_said_by_the_host(normalise: Any) -> None:
    """What is neither True nor False is refused, a tensor most of all: the host would wait for it."""
    with pytest.raises(BadArgument, match=r"group_advantage: normalise is .*\n.*True or False"):
        ops.group_advantage(normals(8), 2, normalise)
