"""The one place where keys are built, for looking a decision up and for storing it alike.

A key holds what the compiled code or its bits may depend on, and nothing that only makes keys plenty: buckets instead
of bucketed sizes, layout classes instead of strides, specialisation classes instead of integers. Two calls share a key
only where the compiler is told the same of both: 1, multiples of 16, other integers and those past 32 bits never meet,
and neither do aligned and unaligned bases. Imports neither torch nor triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from kalign_core.cache.source import source_digest
from kalign_core.declare import Kernel, Role, axis_size
from kalign_core.errors import BadArgument, DeclarationError, UnknownName
from kalign_core.records import DTYPES, Argument, EntryKey, Problem, Toolchain

INT32_END = 2**31
SPECIALISED_MULTIPLE = 16
TENSOR_DTYPES = frozenset(DTYPES.values())


def entry_key(kernel: Kernel, problem: Problem, toolchain: Toolchain, suite: str) -> EntryKey:
    """The key of the decision for ``problem``, with the digest of ``kernel`` as it stands now.

    ``suite`` is the verifier's suite id. Every problem of a bucket that ``at_edge`` can scale gives the key of the
    scaled one. Raises ``UnknownName`` for a dimension, argument or dtype that is missing, ``BadArgument`` for
    arguments that contradict the declaration, ``DeclarationError`` for a bucket rule that does not round up.
    """
    return EntryKey(
        kernel=kernel.name,
        contract=kernel.contract,
        problem=problem_text(kernel, problem),
        args=args_text(kernel, problem),
        phase=problem.phase,
        toolchain=toolchain,
        source=source_digest(kernel),
        suite=suite,
    )


def problem_text(kernel: Kernel, problem: Problem) -> str:
    """Dimensions in the order of declaration: ``T<=4096`` where bucketed (upper edge), ``H=4096`` where exact.

    A bucketed size that does not fit 32 bits has a ``w`` behind its edge: such an argument is compiled as another type.
    """
    sizes, edges = _sizes(kernel, problem), _edges(kernel, problem)
    words = []
    for dim, size in sizes.items():
        if dim in kernel.bucket:
            words.append(f"{dim}<={edges[dim]}{'w' if _wide(size) else ''}")
        else:
            words.append(f"{dim}={size}")
    return " ".join(words)


def args_text(kernel: Kernel, problem: Problem) -> str:
    """Class of every argument that is no dimension, in the order of the parameters, and the index width last.

    ``x:bf16:row:a16`` is a tensor's dtype, layout and alignment, ``stride:d16`` an integer's specialisation class,
    ``eps:float`` a number whose value the code does not depend on, ``bias:none`` an absent argument.
    """
    sizes, edges = _sizes(kernel, problem), _edges(kernel, problem)
    words = []
    for name in kernel.parameters:
        if name in sizes:
            continue
        arg = problem.argument(name)
        if not arg.is_tensor:
            words.append(f"{name}:{_number_class(arg)}")
            continue
        if arg.dtype not in TENSOR_DTYPES:
            raise UnknownName("dtype", arg.dtype, sorted(TENSOR_DTYPES))
        layout = _layout(kernel, arg, sizes, edges)
        alignment = "a16" if arg.aligned else "a1"
        words.append(":".join(part for part in (name, arg.dtype, layout, alignment) if part))
    return " ".join((*words, f"index:{_index_bits(kernel, problem)}"))


def at_edge(kernel: Kernel, problem: Problem) -> Problem | None:
    """``problem`` with every bucketed dimension at its upper edge, which is where its bucket is tuned.

    None where the edge is not the same case: a tensor whose bucketed axis is not the outermost in memory would have
    other strides, an offset or a size would need another width. Such a problem is tuned at its own size.
    """
    sizes, edges = _sizes(kernel, problem), _edges(kernel, problem)
    for arg in problem.args:
        if arg.is_tensor and not _can_grow(kernel, arg, sizes, edges):
            return None
    scaled = dataclasses.replace(problem, dims=tuple((dim, edges.get(dim, size)) for dim, size in problem.dims))
    bits = _index_bits(kernel, problem)
    if _index_bits(kernel, scaled) != bits or any(_wide(sizes[d]) != _wide(edges[d]) for d in sizes):
        return None
    return dataclasses.replace(scaled, index_bits=bits)


def index_bits(kernel: Kernel, dims: Mapping[str, int], args: Iterable[Argument]) -> int:
    """64 where the element offset of any tensor may reach 2**31 at the sizes ``dims``, else 32."""
    for arg in args:
        if not arg.is_tensor:
            continue
        shape = _shape(_role(kernel, arg), dims)
        last = sum((size - 1) * abs(stride) for size, stride in zip(shape, arg.strides, strict=True) if size > 0)
        if last >= INT32_END:
            return 64
    return 32


def layout_class(shape: Sequence[int], strides: Sequence[int], free: Sequence[bool]) -> str:
    """How ``shape`` lies in memory under ``strides`` (elements): by pattern, never by number.

    Empty for a contiguous vector or a scalar; ``row`` dense with the last axis innermost, ``padded`` the same with
    gaps, ``col`` the first axis innermost, ``broadcast01`` a stride of 0 at axes 0 and 1, else ``strided``. ``free``
    marks the axes whose stride no element ever uses, because they have size 1 in the whole bucket.
    """
    axes = list(zip(shape, strides, free, strict=True))
    repeated = [str(axis) for axis, (_, stride, unused) in enumerate(axes) if stride == 0 and not unused]
    if repeated:
        return f"broadcast{''.join(repeated)}"
    tightness = _nesting(reversed(axes))
    if tightness == "dense":
        return "row" if len(axes) > 1 else ""
    if len(axes) < 2:
        return "strided"
    if tightness == "gaps":
        return "padded"
    return "col" if _nesting(axes) else "strided"


def _nesting(axes: Iterable[tuple[int, int, bool]]) -> str:
    """``dense`` or ``gaps`` where each of ``axes`` (innermost first) steps over the ones before it, else ``""``."""
    extent, dense, innermost = 1, True, True
    for size, stride, unused in axes:
        if not unused:
            if stride < extent or (innermost and stride != 1):
                return ""
            dense = dense and stride == extent
            extent, innermost = stride, False
        extent *= max(size, 1)
    return "dense" if dense else "gaps"


def _layout(kernel: Kernel, arg: Argument, sizes: Mapping[str, int], edges: Mapping[str, int]) -> str:
    role = _role(kernel, arg)
    shape, largest = _shape(role, sizes), _shape(role, edges)
    free = [a == 1 and b == 1 for a, b in zip(shape, largest, strict=True)]
    return layout_class(shape, arg.strides, free)


def _can_grow(kernel: Kernel, arg: Argument, sizes: Mapping[str, int], edges: Mapping[str, int]) -> bool:
    """Whether ``arg`` keeps its strides at the sizes ``edges``: each axis that grows steps over all others."""
    role = _role(kernel, arg)
    shape, largest = _shape(role, sizes), _shape(role, edges)
    spans = [(size - 1) * abs(stride) for size, stride in zip(largest, arg.strides, strict=True)]
    for axis, stride in enumerate(arg.strides):
        others = sum(span for other, span in enumerate(spans) if other != axis)
        if shape[axis] != largest[axis] and stride != 0 and abs(stride) <= others:
            return False
    return True


def _number_class(arg: Argument) -> str:
    if arg.dtype != "int":
        return arg.dtype
    if arg.value is None:
        raise BadArgument(f"integer argument {arg.name!r} has no value")
    number = int(arg.value)
    if number == 1:
        return "1"
    return ("n" if number % SPECIALISED_MULTIPLE else "d16") + ("w" if _wide(number) else "")


def _wide(number: int) -> bool:
    return not -INT32_END <= number < INT32_END


def _index_bits(kernel: Kernel, problem: Problem) -> int:
    return max(problem.index_bits, index_bits(kernel, dict(problem.dims), problem.args))


def _sizes(kernel: Kernel, problem: Problem) -> dict[str, int]:
    """Sizes of the problem in the order in which ``kernel`` declares its dimensions."""
    given = dict(problem.dims)
    for dim in kernel.dims:
        if dim not in given:
            raise UnknownName("dimension", dim, given)
    return {dim: int(given[dim]) for dim in kernel.dims}


def _edges(kernel: Kernel, problem: Problem) -> dict[str, int]:
    edges = {}
    for dim, size in _sizes(kernel, problem).items():
        edge = int(kernel.bucket_edge(dim, size))
        if edge < size or int(kernel.bucket_edge(dim, edge)) != edge:
            raise DeclarationError(
                f"kernel {kernel.name!r}: the bucket rule of {dim} gives {edge} for {size}",
                why="a rule gives the upper edge of its bucket: at least the size, and itself for the edge",
                fix=f"bucket={{{dim!r}: powers_of_two}}",
            )
        edges[dim] = edge
    return edges


def _role(kernel: Kernel, arg: Argument) -> Role:
    role = kernel.args.get(arg.name)
    if role is None or len(role.strides) != len(arg.strides):
        raise BadArgument(
            f"kernel {kernel.name!r}: tensor {arg.name!r} has strides {arg.strides}",
            why=f"it is declared {'without a role' if role is None else f'with the axes {role.shape}'}",
        )
    return role


def _shape(role: Role, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axis_size(axis, sizes) for axis in role.shape)
