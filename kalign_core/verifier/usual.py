"""Usual inputs: what a kernel's declaration says that calls pass, for timing alone.

How long a kernel takes may depend on what its indices and masks say: how many rows are named, how far sequences reach.
The gate's own numbers are made to refute, and half of a random mask is set; a launch that is best on them may be slower
than the reference on what callers have. So a kernel may say what is usual, and timings are taken on that. Nothing here
changes what the gate compares, and nothing here is a caller's: tensors of calls are neither kept nor looked at.

The numbers come from the kernel's author. They are looked at before a device sees them, because one index too many may
cost the process its device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kalign_core.declare import OUTPUTS, Kernel, axis_size
from kalign_core.errors import NotTunable
from kalign_core.isolate import attempt
from kalign_core.records import Argument, Problem
from kalign_core.verifier.inputs import TORCH_DTYPES
from kalign_core.verifier.making import distinct


def usual_inputs(kernel: Kernel, problem: Problem) -> dict[str, torch.Tensor]:
    """What ``kernel`` says that calls of ``problem`` usually pass: tensors of the host, in the arguments' dtypes.

    Empty where it says nothing; arguments that the problem's calls leave out are left out. Raises ``NotTunable`` where
    the function fails, or gives what is no input of the kernel or does not fit it.
    """
    if kernel.usual is None:
        return {}
    outcome = attempt(kernel.usual, problem)
    if outcome.error is not None:
        raise _bad(kernel, f"raised {outcome.reason}") from outcome.error
    if not isinstance(outcome.value, Mapping):
        raise _bad(kernel, f"gave a {type(outcome.value).__name__}, not a mapping of arguments to numbers")
    found = {}
    for name, given in outcome.value.items():
        if name not in kernel.args or kernel.args[name].kind in OUTPUTS:
            raise _bad(kernel, f"gave numbers for {name!r}, which is no tensor that the kernel reads")
        arg = problem.argument(name)
        if arg.is_tensor:
            found[name] = _fitting(kernel, problem, arg, given)
    return found


def overlay(view: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write ``numbers`` to ``view``, of the same shape; where elements share memory, the first one's."""
    target = distinct(view)
    target.copy_(numbers[tuple(slice(size) for size in target.shape)])


def _fitting(kernel: Kernel, problem: Problem, arg: Argument, given: Any) -> torch.Tensor:
    """``given`` as a tensor of the host in the dtype of ``arg``."""
    outcome = attempt(torch.as_tensor, given, device="cpu")
    if outcome.error is not None:
        raise _bad(kernel, f"gave no numbers for {arg.name!r}: {outcome.reason}") from outcome.error
    numbers: torch.Tensor = outcome.value
    sizes, role, dtype = dict(problem.dims), kernel.args[arg.name], TORCH_DTYPES[arg.dtype]
    shape = tuple(axis_size(axis, sizes) for axis in role.shape)
    if tuple(numbers.shape) != shape:
        raise _bad(kernel, f"gave {tuple(numbers.shape)} numbers for {arg.name!r}, which has {shape}")
    if dtype.is_floating_point:
        if numbers.is_complex():
            raise _bad(kernel, f"gave complex numbers for {arg.name!r}, which is {arg.dtype}")
        return numbers.to(dtype)
    if numbers.is_floating_point() or numbers.is_complex():
        raise _bad(kernel, f"gave fractions for {arg.name!r}, which is {arg.dtype}")
    made = numbers.to(dtype)
    if not torch.equal(made.to(torch.int64), numbers.to(torch.int64)):
        raise _bad(kernel, f"gave numbers for {arg.name!r} that {arg.dtype} does not hold")
    if role.kind == "index" and numbers.numel():
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= sizes[role.bound]:
            why = f"it indexes {role.bound}, which is {sizes[role.bound]}, from 0"
            raise _bad(kernel, f"gave numbers from {least} to {most} for {arg.name!r}", why)
    return made


def _bad(kernel: Kernel, what: str, why: str = "timing takes them in the place of made-up ones") -> NotTunable:
    return NotTunable(
        f"{kernel} cannot be timed: its usual inputs are wrong: the function {what}",
        why=why,
        fix="correct usual=... of its @kernel(...), or leave it out",
    )
