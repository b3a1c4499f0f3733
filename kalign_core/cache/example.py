"""A problem that has a given key: what a stored entry is asked about where no call is at hand.

Keys are made of classes, so many problems share one; any of them will do to ask which configurations are worth trying
today. Whatever is made here is turned into a key again by the one function that builds keys, and counts only if that
gives the same text: a key that cannot be read gives no problem, never a wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from kalign_core.cache.key import INT32_END, SPECIALISED_MULTIPLE, args_text, problem_text
from kalign_core.declare import Kernel, Role, axis_size
from kalign_core.errors import KalignError
from kalign_core.records import Argument, EntryKey, Problem

_LAYOUTS = ("row", "padded", "col", "strided")
_BROADCAST = "broadcast"
_NUMBERS = {"1": 1, "n": 3, "d16": SPECIALISED_MULTIPLE, "nw": INT32_END + 1, "d16w": INT32_END}


def example(kernel: Kernel, key: EntryKey) -> Problem | None:
    """A problem of ``kernel`` whose dimensions, arguments and phase have the text of ``key``, at its buckets' edges.

    None where ``key`` is not of this declaration, or of a layout that no simple tensor has.
    """
    try:
        sizes = _sizes(kernel, key.problem)
        made = Problem(kernel.name, tuple(sizes.items()), _arguments(kernel, key.args, sizes), key.phase)
        if key.args.endswith("index:64"):
            made = dataclasses.replace(made, index_bits=64)
        is_same = problem_text(kernel, made) == key.problem and args_text(kernel, made) == key.args
    except (KalignError, LookupError, ValueError):
        return None
    return made if is_same else None


def _sizes(kernel: Kernel, text: str) -> dict[str, int]:
    sizes = {}
    for word in text.split():
        name, _, size = word.replace("<=", "=").partition("=")
        sizes[name] = int(size.removesuffix("w"))
        if name in kernel.bucket and sizes[name] >= INT32_END and not size.endswith("w"):
            sizes[name] = INT32_END - 1
    return sizes


def _arguments(kernel: Kernel, text: str, sizes: Mapping[str, int]) -> tuple[Argument, ...]:
    classes = dict(word.split(":", 1) for word in text.split())
    tensors = {name: classes[name].split(":") for name in kernel.args if classes[name] != "none"}
    numbers = {name: _NUMBERS[kind] for name, kind in classes.items() if kind in _NUMBERS}
    passed = {**numbers, **sizes}
    strides = {name: _strides(kernel.args[name], words, passed, sizes) for name, words in tensors.items()}
    for name, found in strides.items():
        named = zip(kernel.args[name].strides, found, strict=True)
        passed |= {stride: value for stride, value in named if isinstance(stride, str)}
    made = []
    for name in kernel.parameters:
        if name in strides:
            made.append(Argument(name, tensors[name][0], strides[name], tensors[name][-1] == "a16"))
        elif name in numbers:
            made.append(Argument(name, "int", value=passed[name]))
        elif name not in sizes:
            made.append(Argument(name, classes[name], value=1.0 if classes[name] == "float" else None))
    return tuple(made)


def _strides(role: Role, words: Sequence[str], passed: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Strides of the layout that ``words`` (dtype, layout, alignment) name, each of the class its parameter has."""
    shape = [axis_size(axis, sizes) for axis in role.shape]
    layout = next((word for word in words[1:] if word in _LAYOUTS or word.startswith(_BROADCAST)), "row")
    for strides in _possible(layout, shape):
        fitted = tuple(_fitted(role, axis, stride, passed, sizes, layout) for axis, stride in enumerate(strides))
        if None not in fitted:
            return fitted  # type: ignore[return-value]  # none of them is None
    raise ValueError(f"no strides make {words}")


def _possible(layout: str, shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Dense strides, or what simple views make of them."""
    rows, columns = _dense(shape), tuple(reversed(_dense(shape[::-1])))
    if layout in ("row", "padded"):
        yield rows
    elif layout == "col":
        yield columns
    elif layout == "strided":
        yield from (tuple(2 * stride for stride in strides) for strides in (rows, columns))
    else:
        repeated = layout.removeprefix(_BROADCAST)
        yield tuple(0 if str(axis) in repeated else stride for axis, stride in enumerate(rows))


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(shape)]


def _fitted(
    role: Role, axis: int, stride: int, passed: Mapping[str, int], sizes: Mapping[str, int], layout: str
) -> int | None:
    """``stride`` or, in layouts with gaps, a little more, so that it is what the role says; None if it cannot be."""
    wanted = role.strides[axis]
    if isinstance(wanted, int) or wanted in sizes:
        number = wanted if isinstance(wanted, int) else sizes[wanted]
        return number if number == stride else None
    told = passed[wanted]
    most = 2 * SPECIALISED_MULTIPLE if layout != "row" and stride > 1 else 0
    first = stride + (layout == "padded" and stride > 1)
    if most and told >= INT32_END:
        first = max(first, INT32_END)
    return next((n for n in range(first, first + most + 1) if _kind(n) == _kind(told)), None)


def _kind(number: int) -> tuple[bool, bool, bool]:
    return number == 1, number % SPECIALISED_MULTIPLE == 0, number >= INT32_END
