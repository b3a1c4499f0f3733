"""Every operator that kalign registers with torch, under torch's own check of registrations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.core.scripted import leaf, normals, ops

K = torch.ops.kalign
IDS, STARTS = torch.tensor([1, 0, 3]), torch.tensor([0, 3, 5])
MASK = torch.tensor([[True, True, False, True], [True, False, True, True]])
GRPO = (0.2, 0.2, 0.04, "token", None)


def halves(*shape: int) -> torch.Tensor:
    return leaf(*shape, dtype=torch.float16)


def tokens(make: Callable[..., torch.Tensor] = leaf) -> tuple[torch.Tensor, ...]:
    """Log-probabilities of two sequences of four tokens: the policy's, the old ones, the reference's."""
    return make(2, 4), normals(2, 4, seed=1), normals(2, 4, seed=2)


def of_rows(*more: Any) -> tuple[Any, ...]:
    """Three rows of forty, what a forward pass keeps of each, and an upstream gradient."""
    return normals(3, 40), normals(3), normals(3).abs(), normals(3, 40), *more


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "embedding": lambda: (IDS, leaf(8, 8)),
    "embedding_backward": lambda: (IDS, normals(8, 8), normals(3, 8)),
    "group_advantage": lambda: (normals(2, 4), 4, True),
    "grpo_loss": lambda: (*tokens(), normals(2), MASK, *GRPO),
    "grpo_loss_backward": lambda: (
        *tokens(normals), normals(2), MASK, normals(1)[0], normals(2), normals(1)[0], *GRPO,
    ),
    "log_softmax": lambda: (leaf(3, 40), 1.0),
    "log_softmax_backward": lambda: of_rows(1.0),
    "log_softmax_out": lambda: (normals(3, 40), 1.0, torch.empty(3, 40)),
    "matmul": lambda: (halves(2, 8), halves(8, 4), halves(4)),
    "matmul_gradient_a": lambda: (halves(8, 4).detach(), halves(2, 4).detach()),
    "matmul_gradient_b": lambda: (halves(2, 8).detach(), halves(2, 4).detach()),
    "matmul_out": lambda: (*(t.detach() for t in (halves(2, 8), halves(8, 4), halves(4))), torch.empty(2, 4).half()),
    "pack": lambda: (leaf(2, 4, 8), STARTS, 5, "right"),
    "ratio_kl": lambda: (*tokens(), MASK),
    "ratio_kl_backward": lambda: (*tokens(normals), MASK, normals(2, 4), None, None, normals(2, 4)),
    "rms_norm": lambda: (leaf(2, 8), leaf(8), 1e-6),
    "rms_norm_gradient": lambda: (normals(2, 8), normals(8), normals(2), normals(2, 8), normals(2, 8)),
    "rms_norm_gradients": lambda: (normals(2, 8), normals(8), normals(2), normals(2, 8), None),
    "rms_norm_out": lambda: (normals(2, 8), normals(8), 1e-6, torch.empty(2, 8)),
    "rms_norm_residual": lambda: (leaf(2, 8), leaf(2, 8), leaf(8), 1e-6),
    "rms_norm_weight_gradient": lambda: (normals(2, 8), normals(8), normals(2), normals(2, 8)),
    "rope": lambda: (leaf(4, 2, 8), normals(4, 4), normals(4, 4), False),
    "rope_backward": lambda: (normals(4, 4), normals(4, 4), normals(4, 2, 8), True),
    "selected_logprob": lambda: (leaf(3, 40), IDS, 1.0, -100, True, True),
    "selected_logprob_backward": lambda: (
        normals(3, 40), IDS, normals(3), normals(3), normals(3).abs(), normals(3), None, normals(3),
        1.0, -100, True, True,
    ),
    "softmax": lambda: (leaf(3, 40), 1.0),
    "softmax_backward": lambda: of_rows(1.0),
    "softmax_out": lambda: (normals(3, 40), 1.0, torch.empty(3, 40)),
    "swiglu": lambda: (leaf(2, 8), leaf(2, 8)),
    "swiglu_backward": lambda: (normals(2, 8), normals(2, 8), normals(2, 8)),
    "swiglu_out": lambda: (normals(2, 8), normals(2, 8), torch.empty(2, 8)),
    "unpack": lambda: (leaf(5, 8), STARTS, 4, "left"),
}  # fmt: skip


def test_every_registered_operator_is_checked() -> None:
    """The cases here are all operators that kalign registers."""
    assert ops.operators()
    registered = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name[:8] == "kalign::"}
    assert {name for name in registered if not name.startswith("test_")} == set(CASES)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about the tensors it looks at
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_registrations_keep_torch_s_rules(name: str) -> None:
    """Schema, fake shapes, autograd and ahead-of-time tracing with dynamic sizes are what torch wants them to be."""
    results = torch.library.opcheck(getattr(K, name).default, CASES[name]())
    assert set(results.values()) == {"SUCCESS"}
