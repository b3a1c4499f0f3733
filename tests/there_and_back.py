"""One call of any operator and its gradient, for tests on the host and on devices."""

from __future__ import annotations

from typing import Any

import torch


def there_and_back(call: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Every result of ``call(*args)`` and the gradient of every argument that requires one, for upstream ones."""
    made = call(*args)
    results = list(made) if isinstance(made, tuple) else [made]
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    ends = [r for r in results if r.requires_grad]
    if not ends:
        return results
    return [*results, *torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends])]
