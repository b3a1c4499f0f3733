"""Makes the tensors of a case: which numbers stand where, whatever the layout.

A row of the kernel's problem is a row of the hash, and a sum runs along the hash's columns, so that the same row can be
made again alone, elsewhere, transposed or in other company, and order probes meet the axis that is added along. Rows
that are one row in memory are the hash's first, in whatever company.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from kalign_core.declare import OUTPUTS, Kernel, Role, axis_size
from kalign_core.errors import BadArgument, NotTunable
from kalign_core.records import Argument, Case, InputFamily, Problem
from kalign_core.verifier.compare import Buffer, allocate, bytes_for, placed
from kalign_core.verifier.inputs import TORCH_DTYPES, Request, choices, integers

POISON = 0xFF  # NaN in every floating-point dtype
NEIGHBOURS = {"nan": torch.nan, "inf": torch.inf, "huge": 3.0e4, "zero": 0.0}
# A block and what it is made of take up to 18 bytes an element: few large blocks where the problem is large itself.
_LEAST_BLOCK, _LARGEST_BLOCK = 1 << 16, 1 << 24
_BYTES_PER_ELEMENT = 32
_ON_HOST_ELEMENTS = 1 << 14


def row_numbers(kernel: Kernel, whole: Problem, here: Problem, case: Case, device: torch.device) -> torch.Tensor | None:
    """Which row of the problem ``whole`` stands where in ``here``: int32 ``(rows,)``; None where there are no rows."""
    if kernel.rows is None:
        return None
    rows, present = dict(whole.dims)[kernel.rows], dict(here.dims)[kernel.rows]
    numbers = torch.arange(present, dtype=torch.int64, device=device)
    return ((numbers * case.step + case.shift) % max(rows, present)).to(torch.int32)


def empty(kernel: Kernel, problem: Problem, arg: Argument, device: torch.device, fill: int) -> Buffer:
    """A tensor for ``arg`` in memory of its own, every byte of it and around it ``fill``."""
    return allocate(*_layout(kernel, problem, arg), device, aligned=arg.aligned, fill=fill)


def bytes_taken(kernel: Kernel, problem: Problem, arg: Argument) -> int:
    """Bytes that a tensor for ``arg`` takes between its guard bands."""
    return bytes_for(*_layout(kernel, problem, arg), aligned=arg.aligned)


def laid(kernel: Kernel, problem: Problem, arg: Argument, flat: torch.Tensor) -> Buffer:
    """A tensor for ``arg`` in the ``bytes_taken`` bytes of ``flat``."""
    return placed(flat, *_layout(kernel, problem, arg), aligned=arg.aligned)


def stand_in(kernel: Kernel, problem: Problem, arg: Argument, device: torch.device) -> torch.Tensor:
    """A tensor with dtype, shape and alignment of ``arg`` and the memory of one element; its strides are zero."""
    shape, _, dtype = _layout(kernel, problem, arg)
    return torch.empty(2, dtype=dtype, device=device)[0 if arg.aligned else 1].expand(shape)


def _layout(kernel: Kernel, problem: Problem, arg: Argument) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    sizes = dict(problem.dims)
    shape = tuple(axis_size(axis, sizes) for axis in kernel.args[arg.name].shape)
    return shape, arg.strides, TORCH_DTYPES[arg.dtype]


class Rows:
    """Rows of a case by number, int32 ``(r,)`` on the host: requests about them for the tensors that have these rows.

    What is made of few numbers is made on the host, which is faster at it than it is at asking a device to.
    """

    def __init__(self, numbers: torch.Tensor, device: torch.device) -> None:
        self._here, self._device = Request("", "fp32", numbers, 1, 0), device

    def __len__(self) -> int:
        return len(self._here.rows)

    def request(self, arg: Argument, columns: int, **asked: int) -> Request:
        """A request for ``columns`` numbers in every row of ``arg``."""
        base = self._here if len(self) * columns <= _ON_HOST_ELEMENTS else self._there
        return base.about(name=arg.name, dtype=arg.dtype, columns=columns, **asked)

    @functools.cached_property
    def _there(self) -> Request:
        if len(self) <= _ON_HOST_ELEMENTS:
            return self._here.on(self._device)
        return replace(self._here, rows=self._here.rows.to(self._device))


class Maker:
    """Makes input tensors for one kernel on one device; ``families`` may grow while it is used.

    ``own_bytes`` is the size of the problem's own tensors, which bounds what making them may take.
    """

    def __init__(
        self, kernel: Kernel, families: Mapping[str, InputFamily], device: torch.device, own_bytes: int = 0
    ) -> None:
        self._kernel, self._families, self._device = kernel, families, device
        self._block_elements = min(max(_LEAST_BLOCK, own_bytes // _BYTES_PER_ELEMENT), _LARGEST_BLOCK)
        data = [name for name in kernel.parameters if name in kernel.args and kernel.args[name].kind == "data"]
        self._operands = {name: number for number, name in enumerate(data)}
        self._contracted = _contracted(kernel)

    def rows(self, numbers: torch.Tensor | None) -> Rows | None:
        """The rows of a case, for all of its tensors that have rows; ``numbers`` are on the host."""
        return None if numbers is None else Rows(numbers, self._device)

    def input(self, case: Case, problem: Problem, arg: Argument, rows: Rows | None) -> Buffer:
        """The tensor ``arg`` of ``case``; ``rows`` says which rows those of ``problem`` are."""
        role = self._kernel.args[arg.name]
        buffer = empty(self._kernel, problem, arg, self._device, POISON)
        ordered, has_rows = self._ordered(distinct(buffer.view), arg, role)
        if rows is None or not has_rows:
            rows = Rows(torch.arange(ordered.shape[0], dtype=torch.int32, device="cpu"), self._device)
        columns = max(ordered[0].numel(), 1) if len(rows) else 1
        length = ordered.shape[-1] if ordered.dim() > 1 else 1
        operand = self._operands.get(arg.name, 0)
        request = rows.request(arg, columns, seed=case.seed, length=length, operand=operand)
        for part in self._blocks(len(rows), columns):
            block = self._block(case, problem, role, request.only(part))
            ordered[part].copy_(block.view(-1, *ordered.shape[1:]))
        if has_rows and case.neighbours and ordered.dtype.is_floating_point:
            self._spoil(case, ordered, request)
        return buffer

    def _blocks(self, rows: int, columns: int) -> Iterator[slice]:
        """The rows of a tensor in blocks of as many as are made at once."""
        step = max(1, self._block_elements // columns)
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def _ordered(self, view: torch.Tensor, arg: Argument, role: Role) -> tuple[torch.Tensor, bool]:
        """``view`` with the axis of rows first and the axis that is added along last, and whether its rows differ.

        A vector without an axis of rows becomes one row.
        """
        has_rows = self._kernel.rows in role.shape
        axes = list(range(len(role.shape)))
        for axis in [axis for axis in axes if role.shape[axis] in self._contracted][:1]:
            axes.append(axes.pop(axis))
        if has_rows:
            first = role.shape.index(str(self._kernel.rows))
            axes.remove(first)
            axes.insert(0, first)
        ordered = view.permute(axes)
        differ = has_rows and arg.strides[axes[0]] != 0
        return (ordered if has_rows or ordered.dim() > 1 else ordered.unsqueeze(0)), differ

    def _block(self, case: Case, problem: Problem, role: Role, request: Request) -> torch.Tensor:
        if role.kind == "index":
            return integers(request, dict(problem.dims)[role.bound])
        if role.kind == "mask":
            return choices(request)
        if role.kind == "random" or not request.torch_dtype.is_floating_point:
            return integers(request, 1 << 30)
        family = self._families.get(case.family)
        if family is None:
            raise NotTunable(f"no input family {case.family!r}", why=f"known are {', '.join(self._families)}")
        block: torch.Tensor = family.fill(request)
        return block.abs() if role.kind == "scale" else block

    def _spoil(self, case: Case, ordered: torch.Tensor, request: Request) -> None:
        """Overwrite every row of ``ordered`` that the case does not keep."""
        others = torch.ones(
            len(ordered), dtype=torch.bool, device="cpu"
        )  # on the host, which then knows how many there are
        others[list(case.kept)] = False
        if case.neighbours == "reseeded":
            places = others.nonzero().view(-1)
            other = request.about(seed=case.seed + 7919, length=0, operand=0)
            for part in self._blocks(len(places), request.columns):
                made = self._families["normals"].fill(other.only(places[part].to(request.rows.device)))
                made = made.to(self._device).view(-1, *ordered.shape[1:])
                ordered.index_copy_(0, places[part].to(self._device), made)
        elif case.neighbours in NEIGHBOURS:
            mask = others.to(self._device).view(-1, *(1,) * (ordered.dim() - 1))
            ordered.masked_fill_(mask, NEIGHBOURS[case.neighbours])
        else:
            known = ", ".join((*NEIGHBOURS, "reseeded"))
            raise BadArgument(f"a case has {case.neighbours!r} neighbours", why=f"rows are replaced by {known}")


def distinct(view: torch.Tensor) -> torch.Tensor:
    """The elements of ``view`` that have memory of their own: of axes without a stride, the first place."""
    for axis, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[axis] > 1:
            view = view.narrow(axis, 0, 1)
    return view


def _contracted(kernel: Kernel) -> frozenset[str]:
    """Dimensions of data arguments that no output has as an axis of its own: those that a product adds over."""
    roles = kernel.args.values()
    kept = {axis for role in roles if role.kind in OUTPUTS for axis in role.shape}
    return frozenset(axis for role in roles if role.kind == "data" for axis in role.shape) - kept
