"""The same problem laid out otherwise: strides, alignment, widths that a call may also have, and the wide output.

A variant changes what the compiler may assume and where elements stand, never which numbers a case holds. Nothing here
touches a tensor or a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from kalign_core.cache.key import index_bits
from kalign_core.declare import OUTPUTS, Kernel, axis_size
from kalign_core.records import ITEM_BYTES, Argument, Problem

FAR_ELEMENTS = 1 << 31
PAD = 16  # keeps a stride's specialisation class
UNEVEN = 3  # leaves it
Change = Callable[[Kernel, Problem, Argument], Argument]


def variant(kernel: Kernel, problem: Problem, name: str) -> Problem | None:
    """``problem`` laid out as ``name`` says; None where that changes nothing.

    ``padded`` and ``uneven`` rows are 16 and 3 elements further apart, ``unaligned`` tensors start one element off,
    ``transposed`` ones have their two axes exchanged in memory, ``far`` ones end past 2**31 elements, ``wide`` outputs
    have the dtype that their declaration says to observe. Raises ``KeyError`` for any other name.
    """
    change = _CHANGES[name]
    args = tuple(change(kernel, problem, arg) if arg.is_tensor else arg for arg in problem.args)
    made = _consistent(kernel, dict(problem.dims), args)
    return None if made == problem.args else with_arguments(kernel, problem, made)


def resized(kernel: Kernel, problem: Problem, dims: Mapping[str, int]) -> Problem:
    """``problem`` at other sizes; strides stay what they are, but for those that are a dimension themselves."""
    sizes = {**dict(problem.dims), **dims}
    args = _consistent(kernel, sizes, problem.args)
    return with_arguments(kernel, replace(problem, dims=tuple(sizes.items())), args)


def with_arguments(kernel: Kernel, problem: Problem, args: tuple[Argument, ...]) -> Problem:
    """``problem`` with ``args`` and the index width they need."""
    return replace(problem, args=args, index_bits=index_bits(kernel, dict(problem.dims), args))


def dense_problem(
    kernel: Kernel,
    dims: Mapping[str, int],
    dtypes: Mapping[str, str],
    numbers: Mapping[str, int | float | None] | None = None,
    phase: str = "train",
) -> Problem:
    """A problem of ``kernel`` with aligned, dense, row-major tensors.

    ``dtypes`` gives every tensor's short dtype (``none`` for an absent one), ``numbers`` every parameter that is
    neither a dimension nor a stride.
    """
    given = numbers or {}
    args = []
    for name in kernel.parameters:
        if name in kernel.args:
            role, dtype = kernel.args[name], dtypes[name]
            shape = [axis_size(axis, dims) for axis in role.shape]
            strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
            args.append(Argument(name, dtype, strides if dtype != "none" else ()))
        elif name not in kernel.dims:
            value = given.get(name)
            kind = "float" if isinstance(value, float) else "none" if name in given and value is None else "int"
            args.append(Argument(name, kind, value=value if value is not None else (None if kind == "none" else 0)))
    base = Problem(kernel.name, tuple((dim, dims[dim]) for dim in kernel.dims), tuple(args), phase)
    return with_arguments(kernel, base, _consistent(kernel, dict(dims), base.args))


def _consistent(kernel: Kernel, sizes: Mapping[str, int], args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """``args`` with stride parameters equal to the strides they carry, and strides that are dimensions at ``sizes``."""
    carried: dict[str, int] = {}
    tensors = {}
    for arg in args:
        if not arg.is_tensor:
            continue
        strides = []
        for source, stride in zip(kernel.args[arg.name].strides, arg.strides, strict=True):
            fixed = sizes.get(source) if isinstance(source, str) else source
            # Tensors that share a stride parameter share the largest of their strides.
            strides.append(stride if fixed is None else fixed)
            if isinstance(source, str) and fixed is None:
                carried[source] = max(stride, carried.get(source, stride))
        tensors[arg.name] = tuple(strides)
    made = []
    for arg in args:
        if arg.name in tensors:
            sources = kernel.args[arg.name].strides
            own = (carried.get(str(s), t) for s, t in zip(sources, tensors[arg.name], strict=True))
            made.append(replace(arg, strides=tuple(own)))
        else:
            made.append(replace(arg, value=carried[arg.name]) if arg.name in carried else arg)
    return tuple(made)


# --- the changes --------------------------------------------------------------------------------------------------


def _free_axes(kernel: Kernel, arg: Argument) -> list[int]:
    """Axes whose stride the kernel takes as a parameter of its own."""
    sources = kernel.args[arg.name].strides
    return [axis for axis, source in enumerate(sources) if isinstance(source, str) and source not in kernel.dims]


def _stretched(kernel: Kernel, arg: Argument, stretch: Callable[[int], int]) -> Argument:
    """``arg`` with its largest stride changed, if that one is free: no two elements then share a place."""
    if not arg.strides:
        return arg
    outer = max(range(len(arg.strides)), key=lambda axis: arg.strides[axis])
    if outer not in _free_axes(kernel, arg) or arg.strides[outer] <= 0:
        return arg
    strides = list(arg.strides)
    strides[outer] = stretch(strides[outer])
    return replace(arg, strides=tuple(strides))


def _padded(kernel: Kernel, problem: Problem, arg: Argument) -> Argument:
    return _stretched(kernel, arg, lambda stride: stride + PAD)


def _uneven(kernel: Kernel, problem: Problem, arg: Argument) -> Argument:
    return _stretched(kernel, arg, lambda stride: stride + UNEVEN)


def _unaligned(kernel: Kernel, problem: Problem, arg: Argument) -> Argument:
    return replace(arg, aligned=False)


def _transposed(kernel: Kernel, problem: Problem, arg: Argument) -> Argument:
    if len(arg.strides) != 2 or len(_free_axes(kernel, arg)) != 2 or 0 in arg.strides:
        return arg
    rows, columns = (axis_size(axis, dict(problem.dims)) for axis in kernel.args[arg.name].shape)
    return replace(arg, strides=(1, rows) if arg.strides[1] == 1 and columns > 1 else (columns, 1))


def _far(kernel: Kernel, problem: Problem, arg: Argument) -> Argument:
    if not arg.strides:
        return arg
    outer = max(range(len(arg.strides)), key=lambda axis: arg.strides[axis])
    steps = axis_size(kernel.args[arg.name].shape[outer], dict(problem.dims)) - 1
    if steps < 1:
        return arg
    return _stretched(kernel, arg, lambda stride: max(stride, -(-FAR_ELEMENTS // (steps * PAD)) * PAD))


def _wide(kernel: Kernel, problem: Problem, arg: Argument) -> Argument:
    role = kernel.args[arg.name]
    if role.kind not in OUTPUTS or ITEM_BYTES.get(role.observe, 0) <= ITEM_BYTES[arg.dtype]:
        return arg
    return replace(arg, dtype=role.observe)


_CHANGES: dict[str, Change] = {
    "padded": _padded,
    "uneven": _uneven,
    "unaligned": _unaligned,
    "transposed": _transposed,
    "far": _far,
    "wide": _wide,
}
VARIANTS = tuple(_CHANGES)
