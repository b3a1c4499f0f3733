"""Which problems a command works on: operators, shapes, dtype and phase from options, a file or the defaults."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kalign_core import context
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.isolate import attempt

if TYPE_CHECKING:
    from kalign_core.ops.base import Operator
    from kalign_core.session import Session

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Work:
    """One operator at one size, dtype and phase."""

    operator: Operator
    sizes: dict[str, int]
    dtype: str
    phase: str

    def __str__(self) -> str:
        shape = " ".join(f"{dim}={size}" for dim, size in self.sizes.items())
        return f"{self.operator.name} {shape} {self.dtype} {self.phase}"


def options(function: F) -> F:
    """The options that choose problems."""
    for option in (
        click.option("--phase", default="train", show_default=True, help="train, prefill, decode or one declared."),
        click.option("--dtype", default=None, help="bf16, fp16 or fp32; the operator's first by default."),
        click.option("--shapes", "shapes_file", type=click.Path(path_type=Path), help="TOML file of [[problem]]s."),
        click.option("--shape", "shapes", multiple=True, help="Sizes, such as T=4096,H=4096; may be given repeatedly."),
        click.argument("operators", nargs=-1, metavar="[OP]..."),
    ):
        function = option(function)
    return function


def chosen(
    session: Session,
    operators: Sequence[str],
    shapes: Sequence[str],
    shapes_file: Path | None,
    dtype: str | None,
    phase: str,
) -> list[Work]:
    """The work that options ask for; raises ``UnknownName`` or ``BadArgument`` with what to type."""
    from kalign_core import ops

    if shapes_file is not None:
        return [_from_table(row, number, phase) for number, row in enumerate(_tables(shapes_file), start=1)]
    context.known_phase(phase)
    wanted = [operator_named(name) for name in operators] or list(ops.operators())
    if shapes and len(wanted) != 1:
        raise BadArgument("--shape goes with one operator", fix="kalign tune rms_norm --shape T=4096,H=4096")
    interpreted = session.platform.model(session.platform.devices()[0]).interpreted
    return [
        Work(op, op.sizes(sizes), op.dtype_named(dtype or op.dtypes[0]), phase)
        for op in wanted
        for sizes in ([parse_shape(text) for text in shapes] or (op.small_shapes if interpreted else op.shapes))
    ]


def operator_named(name: str) -> Operator:
    """The operator called ``name``, or the one at ``module:name``; raises ``UnknownName`` or ``BadArgument``."""
    from kalign_core import ops  # before the module: it settles whether kernels are compiled

    if "=" in name:
        why = "what stands apart is an operator; the sizes of a shape are one word with commas"
        raise BadArgument(f"{name!r} is no operator", why=why, fix="kalign tune rms_norm --shape T=4096,H=4096")
    module, colon, attribute = name.partition(":")
    if not colon:
        return ops.named(name)
    found = attempt(lambda: getattr(importlib.import_module(module), attribute))
    if found.error is not None:
        raise BadArgument(f"{name} cannot be imported: {found.reason}", fix="PYTHONPATH=. kalign tune module:operator")
    return ops.register(found.value)


def parse_shape(text: str) -> dict[str, int]:
    """``T=4096,H=128`` as sizes by name; raises ``BadArgument``."""
    sizes = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not value.isdecimal() or name in sizes:
            raise BadArgument(f"--shape {text!r}: {part!r} is not NAME=SIZE", fix="--shape T=4096,H=4096")
        sizes[name] = int(value)
    return sizes


def _tables(path: Path) -> list[dict[str, Any]]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument(f"--shapes {path}: {error}", fix="a TOML file of [[problem]] tables") from error
    rows = document.get("problem")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise BadArgument(
            f"--shapes {path} holds no [[problem]] table",
            why="each problem is a table with op, the dimension names, and optionally dtype and phase",
            fix='[[problem]]\nop = "rms_norm"\nT = 4096\nH = 4096',
        )
    return rows


def _from_table(row: dict[str, Any], number: int, phase: str) -> Work:
    from kalign_core import ops

    rest = dict(row)
    name = rest.pop("op", None)
    if not isinstance(name, str):
        known = [op.name for op in ops.operators()]
        raise UnknownName("operator", name, known, fix=f'problem {number}: op = "rms_norm"')
    operator = operator_named(name)
    fields = ("op", *operator.dims, "dtype", "phase")
    for field in rest:
        if field not in fields:
            raise UnknownName(f"field of problem {number} ({name})", field, fields)
    example = {"op": f'"{name}"', **operator.shapes[0]}
    fix = f"[[problem]] {number}: " + "; ".join(f"{field} = {value}" for field, value in example.items())
    dtype = str(rest.pop("dtype", operator.dtypes[0]))
    phase = context.known_phase(str(rest.pop("phase", phase)))
    sizes = operator.sizes(rest, fix=fix)
    dtype = operator.dtype_named(dtype, fix=f'[[problem]] {number}: dtype = "{operator.dtypes[0]}"')
    return Work(operator, sizes, dtype, phase)
