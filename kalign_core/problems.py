"""From a kernel's arguments to the problem they pose, and the checks that a call makes sense at all.

Runs once per memo key, so it may take its time. What a key does not hold, such as the length of a second tensor beside
the dimensions, an operator checks on every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kalign_core.cache.key import index_bits
from kalign_core.declare import Kernel, Role, axis_size
from kalign_core.errors import BadArgument, MixedDevices
from kalign_core.records import DTYPES, Argument, Problem


def problem_of(kernel: Kernel, args: Sequence[Any], phase: str) -> Problem:
    """The problem that ``args`` (run-time arguments in parameter order) pose.

    Raises ``BadArgument`` for a wrong number or kind of arguments, a shape or stride that contradicts the declaration
    or an unknown dtype, ``MixedDevices`` where the tensors do not share one device.
    """
    if len(args) != len(kernel.parameters):
        raise BadArgument(
            f"kernel {kernel.name} got {len(args)} arguments for {len(kernel.parameters)} parameters",
            why=f"its run-time parameters are {', '.join(kernel.parameters)}",
        )
    named = dict(zip(kernel.parameters, args, strict=True))
    dims = {dim: integer(kernel, dim, named[dim]) for dim in kernel.dims}
    one_device(kernel.name, {name: named[name] for name in kernel.args if named[name] is not None})
    arguments = []
    for name, value in named.items():
        if name in dims:
            continue
        if name in kernel.args:
            arguments.append(_tensor(kernel, name, kernel.args[name], value, dims, named))
        else:
            arguments.append(_number(kernel, name, value))
    known = tuple(arguments)
    # One launch serves a whole bucket, so that offsets have to be wide enough for its largest problem.
    edges = {dim: kernel.bucket_edge(dim, size) for dim, size in dims.items()}
    return Problem(kernel.name, tuple(dims.items()), known, phase, index_bits(kernel, edges, known))


def one_device(owner: str, tensors: dict[str, Any]) -> None:
    """Raise ``BadArgument`` for what is no tensor, ``MixedDevices`` unless all ``tensors`` are on one device."""
    devices = set()
    for name, tensor in tensors.items():
        if not hasattr(tensor, "data_ptr"):
            kind = type(tensor).__name__
            raise BadArgument(f"{owner}: {name} is {kind}, not a tensor", fix=f"torch.as_tensor({name})")
        devices.add(tensor.device)
    if len(devices) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise MixedDevices(
            f"{owner}: {where}",
            why="a kernel runs on one device and reads tensors of that device only",
            fix="move the tensors to one device, for example weight.to(x.device)",
        )


def _tensor(kernel: Kernel, name: str, role: Role, value: Any, dims: dict[str, int], named: dict[str, Any]) -> Argument:
    if value is None:
        return Argument(name, "none")
    if getattr(value, "fake_mode", None) is not None:
        raise BadArgument(
            f"{kernel.name}: {name} is a fake tensor",
            why="a kernel reads and writes memory, and a fake tensor has none",
            fix="call the operator on real tensors; torch.compile does so by itself",
        )
    dtype = DTYPES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None:
        raise BadArgument(f"{kernel.name}: {name} is {value.dtype}", why=f"kernels take {', '.join(DTYPES)}")
    shape = tuple(axis_size(axis, dims) for axis in role.shape)
    if tuple(value.shape) != shape:
        raise BadArgument(
            f"{kernel.name}: {name} has shape {tuple(value.shape)}",
            why=f"declared as ({' '.join(role.shape)}), which is {shape} here",
        )
    strides = tuple(int(named[s]) if isinstance(s, str) else s for s in role.strides)
    for size, passed, real in zip(shape, strides, value.stride(), strict=True):
        if size > 1 and passed != real:
            raise BadArgument(
                f"{kernel.name}: {name} has strides {tuple(value.stride())}, declared {strides}",
                why="the kernel would read other elements than the tensor holds",
                fix=f"pass {name}.contiguous(), or the tensor's own strides",
            )
    return Argument(name, dtype, strides, value.data_ptr() % 16 == 0)


def _number(kernel: Kernel, name: str, value: Any) -> Argument:
    if hasattr(value, "data_ptr"):
        raise BadArgument(
            f"{kernel.name}: {name} is a tensor, and the kernel declares no role for it",
            fix=f"@kernel(args={{..., {name!r}: data(...)}})",
        )
    if isinstance(value, float):
        return Argument(name, "float", value=value)
    if value is None:
        return Argument(name, "none")
    return Argument(name, "int", value=integer(kernel, name, value))


def integer(kernel: Kernel, name: str, value: Any) -> int:
    """``value`` of the parameter ``name``; raises ``BadArgument`` for what is no integer of Python's own."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if hasattr(value, "data_ptr"):
        raise BadArgument(f"{kernel.name}: {name} is {type(value).__name__}, which is no integer")
    kinds = {"__index__": "int", "__float__": "float"}  # what other libraries' numbers can be made into
    kind = next((kinds[way] for way in kinds if hasattr(value, way) and not isinstance(value, (bool, float))), "")
    raise BadArgument(
        f"{kernel.name}: {name} is {value!r}, which is no integer" + (" or float of Python's own" if kind else ""),
        why="the compiler takes no others" if kind else "",
        fix=f"{kind}({name})" if kind else "",
    )
