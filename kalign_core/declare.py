"""Declare a kernel: its contract, dimensions, argument roles, reference launch, knobs and grid.

A declaration is inert: decorating records what is said and checks that it does not contradict itself. Nothing here
imports torch, triton or any other module of kalign with side effects, so kernel files can be imported by a compile
worker that has neither a device nor torch. ``lower`` turns a declaration, a problem and a configuration into what the
compiler takes; child and parent call the same function, so that the parent finds the child's result in the compiler's
cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kalign_core.errors import CandidateFailed, DeclarationError, UnknownName
from kalign_core.records import ITEM_BYTES, Config, KnobValue, Problem

__all__ = [
    "Config", "Kernel", "Lowered", "Role", "accumulated", "axis_size", "cdiv", "data", "exact", "index", "kernel",
    "lower", "mask", "next_power_of_2", "powers_of_two", "random", "scale", "side_output", "written",
]  # fmt: skip

COMPILER_KNOBS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion", "waves_per_eu",
                  "matrix_instr_nonkdim", "kpack", "launch_pdl")  # fmt: skip
SWITCHES = frozenset({"enable_fp_fusion", "launch_pdl"})
# The constant of kernels that wait for their predecessor, and the launch option that it follows (kernels.overlap).
OVERLAP, OVERLAP_OPTION = "OVERLAP", "launch_pdl"


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)`` for positive integers."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (1 for ``n`` below 1)."""
    return 1 << max(n - 1, 0).bit_length()


def powers_of_two(n: int) -> int:
    """Bucket rule: the upper edge of the bucket that ``n`` falls in, a power of two."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def exact(n: int) -> int:
    """Bucket rule of a dimension that is not bucketed."""
    return n


# --- argument roles -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor argument is for, and its shape in dimension names.

    ``kind`` tells the verifier what to put in and what to watch. ``shape`` names one dimension per axis; ``strides``
    names the integer parameter that carries each axis's stride, or gives the stride itself (1 for the innermost).
    ``observe`` on an output says that the kernel also stores into this wider dtype (it stores
    ``value.to(out.dtype.element_ty)``): the verifier then compares what the narrow dtype's rounding would hide.
    """

    kind: str
    shape: tuple[str, ...]
    strides: tuple[str | int, ...]
    bound: str = ""
    observe: str = ""


def axis_size(axis: str, dims: Mapping[str, int]) -> int:
    """Size of one declared axis, ``T`` or ``T/64`` (rounded up), for the sizes in ``dims``."""
    name, _, block = axis.partition("/")
    return cdiv(dims[name], int(block)) if block else dims[name]


OUTPUTS = frozenset({"written", "accumulated", "side_output"})


def _role(kind: str) -> Callable[..., Role]:
    def make(*shape: str, strides: Sequence[str | int] | None = None, bound: str = "", observe: str = "") -> Role:
        if strides is None:
            if len(shape) != 1:
                raise DeclarationError(
                    f"role {kind}{shape} has {len(shape)} axes and no strides",
                    why="inputs are made from the declaration, so the stride of every axis has to be known",
                    fix=f"{kind}('T', 'H', strides=('x_stride', 1))",
                )
            strides = (1,)
        if len(strides) != len(shape):
            raise DeclarationError(f"role {kind}{shape} has {len(shape)} axes but {len(strides)} strides")
        if observe and (kind not in OUTPUTS or observe not in ITEM_BYTES):
            raise DeclarationError(
                f"role {kind}{shape} has observe={observe!r}",
                why=f"outputs are observed in a wider dtype: {', '.join(ITEM_BYTES)}",
                fix="written('M', 'N', strides=('stride', 1), observe='fp32')",
            )
        return Role(kind, shape, tuple(strides), bound, observe)

    make.__name__ = kind
    make.__doc__ = f"Role ``{kind}``: ``{kind}('T', 'H', strides=('x_stride', 1))``; see ``Role``."
    return make


data = _role("data")
index = _role("index")
mask = _role("mask")
scale = _role("scale")
random = _role("random")
written = _role("written")
accumulated = _role("accumulated")
side_output = _role("side_output")


# --- kernels ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kernel:
    """A ``@triton.jit`` function with its declaration. Compares by identity; ``name`` is unique in a process.

    ``fn`` is the jit function, ``parameters`` the names of its run-time parameters in order and ``constants`` those
    of its ``tl.constexpr`` ones. ``reference`` is a Config or a function of the problem that gives one. ``rows`` is
    the dimension that counts independent rows, or None where no row may be looked at alone. ``usual`` gives what calls
    usually pass, for timing (``docs/tuning.md``), or is None.
    """

    fn: Any
    name: str
    family: str
    contract: str
    dims: tuple[str, ...]
    args: Mapping[str, Role]
    reference: Config | Callable[[Problem], Config]
    knobs: Mapping[str, tuple[KnobValue, ...]]
    derived: Mapping[str, Callable[[Problem], KnobValue | None]]
    grid: Callable[[Problem, Config], tuple[int, ...]]
    bucket: Mapping[str, Callable[[int], int]]
    rows: str | None = None
    collective: bool = False
    usual: Callable[[Problem], Mapping[str, Any]] | None = None
    parameters: tuple[str, ...] = field(default=(), repr=False)
    constants: tuple[str, ...] = field(default=(), repr=False)

    def reference_config(self, problem: Problem) -> Config:
        """The fixed launch that defines this kernel's bits for ``problem``.

        Raises ``UnknownName`` or ``DeclarationError`` where the declared function gives no complete launch.
        """
        if isinstance(self.reference, Config):
            return self.reference
        made = self.reference(problem)
        _check_reference(self, made)
        return made

    def bucket_edge(self, dim: str, size: int) -> int:
        """Upper edge of the bucket that ``size`` of ``dim`` falls in; ``size`` itself where ``dim`` has none."""
        return self.bucket.get(dim, exact)(size)

    def outputs(self) -> tuple[str, ...]:
        """Names of the tensors the kernel may write, in parameter order."""
        return tuple(n for n in self.parameters if n in self.args and self.args[n].kind in OUTPUTS)

    @property
    def overlaps(self) -> bool:
        """Whether it may be launched before its predecessor in the stream has ended, because it waits for it."""
        return OVERLAP in self.constants

    def constants_for(self, problem: Problem, config: Config) -> dict[str, Any]:
        """Value of every ``tl.constexpr`` parameter: knobs of ``config`` and derived values."""
        derived = {name: rule(problem) for name, rule in self.derived.items()}
        if self.overlaps:
            derived[OVERLAP] = self._typed(OVERLAP_OPTION, config.get(OVERLAP_OPTION, False))
        return {name: derived[name] if name in derived else self._typed(name, config[name]) for name in self.constants}

    def options_for(self, config: Config) -> dict[str, KnobValue]:
        """The part of ``config`` that goes to the compiler rather than to the kernel's parameters.

        Raises ``CandidateFailed`` where it would launch a kernel early that does not wait for its predecessor.
        """
        if config.get(OVERLAP_OPTION) and not self.overlaps:
            raise CandidateFailed(
                f"{OVERLAP_OPTION} for {self.name}, which does not wait for the kernel before it",
                why="it would read what is still being written",
            )
        return {name: self._typed(name, value) for name, value in config.items() if name not in self.constants}

    def _typed(self, name: str, value: KnobValue) -> KnobValue:
        """``value``, as a boolean for a switch: files hold 0 and 1. Raises ``CandidateFailed`` where it is neither."""
        if name in SWITCHES and value not in (0, 1):
            raise CandidateFailed(f"{name}={value} for {self.name}, which is neither 0 nor 1")
        is_switch = name in SWITCHES or any(isinstance(known, bool) for known in self.knobs.get(name, ()))
        return bool(value) if is_switch else value

    @property
    def import_path(self) -> str | None:
        """``module:attribute`` under which a fresh process finds this kernel, or None (``__main__``, closures)."""
        module, name = self.fn.fn.__module__, self.fn.fn.__qualname__
        if module == "__main__" or "<locals>" in name:
            return None
        return f"{module}:{name}"

    def __str__(self) -> str:
        return self.name


def kernel(
    *,
    name: str,
    family: str,
    contract: str,
    dims: Sequence[str],
    args: Mapping[str, Role],
    reference: Config | Callable[[Problem], Config],
    knobs: Mapping[str, Sequence[KnobValue]],
    grid: Callable[[Problem, Config], tuple[int, ...]],
    derived: Mapping[str, Callable[[Problem], KnobValue | None]] | None = None,
    bucket: Mapping[str, Callable[[int], int]] | None = None,
    rows: str | None = None,
    collective: bool = False,
    usual: Callable[[Problem], Mapping[str, Any]] | None = None,
) -> Callable[[Any], Kernel]:
    """Declare a ``@triton.jit`` function as a kernel that kalign may tune.

    ``dims`` are integer parameters that give the problem's size; those in ``bucket`` are also listed in the
    function's ``do_not_specialize``, so that no size of them compiles again. ``args`` gives every tensor parameter's
    role. ``reference`` is the fixed launch that defines the bits. ``knobs`` are the schedule knobs that may vary with
    the values worth trying; every other constant is part of the contract and comes from the reference or from
    ``derived``. ``rows`` is the dimension whose every index is an independent row. ``grid(p, c)`` gives the launch
    grid for a problem and a configuration. ``usual(p)`` gives numbers for the inputs that decide how much there is
    to do, by name, the same ones every time: launches are timed on them. What the gate compares has others.

    Raises ``DeclarationError`` where the declaration and the function's signature disagree.
    """

    def declare(fn: Any) -> Kernel:
        parameters, constants = _signature(name, fn)
        made = Kernel(
            fn=fn, name=name, family=family, contract=contract, dims=tuple(dims), args=dict(args),
            reference=reference, knobs={k: tuple(v) for k, v in knobs.items()}, derived=dict(derived or {}),
            grid=grid, bucket=dict(bucket or {}), rows=rows, collective=collective, usual=usual,
            parameters=parameters, constants=constants,
        )  # fmt: skip
        _check(made)
        return made

    return declare


def _signature(name: str, fn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not hasattr(fn, "fn"):
        raise DeclarationError(
            f"kernel {name!r} is declared on {fn!r}, which is no jit function",
            fix="put @kernel(...) above @triton.jit",
        )
    parameters: list[str] = []
    constants: list[str] = []
    for parameter in inspect.signature(fn.fn).parameters.values():
        is_constant = "constexpr" in str(parameter.annotation)
        (constants if is_constant else parameters).append(parameter.name)
    return tuple(parameters), tuple(constants)


def _check(made: Kernel) -> None:
    """Raise ``DeclarationError`` on the first contradiction between declaration and signature."""

    def refuse(what: str, fix: str = "") -> None:
        raise DeclarationError(f"kernel {made.name!r}: {what}", why=f"its signature is {signature}", fix=fix)

    signature = f"({', '.join(made.parameters + made.constants)})"
    if tuple(inspect.signature(made.fn.fn).parameters) != made.parameters + made.constants:
        refuse("a run-time parameter stands behind a tl.constexpr one", "write the tl.constexpr parameters last")
    for dim in made.dims:
        if dim not in made.parameters:
            refuse(f"dimension {dim!r} is no run-time parameter", f"pass {dim} as an integer argument")
    if made.rows is not None and made.rows not in made.dims:
        refuse(f"rows={made.rows!r} is no dimension of {made.dims}")
    for dim in made.bucket:
        if dim not in made.dims:
            refuse(f"bucket for {dim!r}, which is no dimension of {made.dims}")
    for name, role in made.args.items():
        if name not in made.parameters or name in made.dims:
            refuse(f"role for {name!r}, which is no run-time parameter beside the dimensions")
        if role.kind == "index" and role.bound not in made.dims:
            refuse(f"{name!r} indexes {role.bound!r}, which is no dimension of {made.dims}", "index('T', bound='V')")
        for axis, stride in zip(role.shape, role.strides, strict=True):
            if axis.partition("/")[0] not in made.dims:
                refuse(f"{name!r} has an axis {axis!r} that is no dimension of {made.dims}")
            if isinstance(stride, str) and stride not in made.parameters:
                refuse(f"{name!r} has its stride in {stride!r}, which is no run-time parameter")
    if not made.outputs():
        refuse("no argument is written", "give each tensor that it stores to a role written(...)")
    _check_overlap(made, (*made.knobs, *made.derived))
    known = sorted({*made.constants, *COMPILER_KNOBS})
    for knob in made.knobs:
        if knob not in known:
            raise UnknownName("knob", knob, known)
        if knob in made.derived:
            refuse(f"{knob!r} is a knob and derived as well", f"leave {knob} out of one of them")
    for name in made.derived:
        if name not in made.constants:
            refuse(f"derived value {name!r} is no tl.constexpr parameter")
    if isinstance(made.reference, Config):
        _check_reference(made, made.reference)


def _check_reference(made: Kernel, reference: Config) -> None:
    """Raise ``UnknownName`` or ``DeclarationError`` where ``reference`` is no complete launch of ``made``."""
    known = sorted({*made.constants, *COMPILER_KNOBS})
    for knob in reference:
        if knob not in known:
            raise UnknownName("knob", knob, known)
    _check_overlap(made, reference)
    given = {*reference, *made.derived, OVERLAP}
    missing = [name for name in made.constants if name not in given]
    if missing:
        raise DeclarationError(
            f"kernel {made.name!r}: constant {missing[0]!r} has no value",
            fix=f"add {missing[0]}=... to reference or derived",
        )
    if "enable_fp_fusion" not in reference:
        raise DeclarationError(
            f"kernel {made.name!r}: the reference leaves enable_fp_fusion to the compiler",
            why="whether products and sums are fused changes bits",
            fix="Config(..., enable_fp_fusion=False)",
        )


def _check_overlap(made: Kernel, given: Iterable[str]) -> None:
    if OVERLAP in given:
        raise DeclarationError(
            f"kernel {made.name!r}: {OVERLAP} is given a value, and says whether {OVERLAP_OPTION} is on",
            fix="leave it out, or give a constant that means something else another name",
        )


# --- lowering -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the compiler takes for one kernel, problem and configuration; plain data that crosses processes.

    ``signature`` is Triton's type of every parameter, ``constants`` the value of every constant by position,
    ``divisible`` the positions of run-time arguments known to be multiples of 16, ``options`` compiler options.
    """

    kernel: str
    import_path: str | None
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, KnobValue], ...]


def lower(kernel: Kernel, problem: Problem, config: Config) -> Lowered:
    """Lower ``kernel`` for ``problem`` under ``config``: the same in a compile worker and in the launching process.

    Integers equal to 1 become constants and multiples of 16 are marked, as Triton's own launcher does, except for
    bucketed dimensions, which are never specialised on.
    """
    values = kernel.constants_for(problem, config)
    sizes = dict(problem.dims)
    arguments = {a.name: a for a in problem.args}
    signature: list[tuple[str, str]] = []
    constants: list[tuple[int, Any]] = []
    divisible: list[int] = []
    for position, name in enumerate(kernel.parameters + kernel.constants):
        if name in values:
            signature.append((name, "constexpr"))
            constants.append((position, values[name]))
            continue
        kind: str
        number: int | float | None
        if name in sizes:
            kind, number = "int", sizes[name]
        else:
            kind, number = arguments[name].dtype, arguments[name].value
        if kind == "none":
            signature.append((name, "constexpr"))
            constants.append((position, None))
        elif kind == "int" and number == 1 and name not in kernel.bucket:
            signature.append((name, "constexpr"))
            constants.append((position, 1))
        elif kind == "int":
            wide = not -(2**31) <= int(number or 0) < 2**31
            signature.append((name, "i64" if wide else "i32"))
            if name not in kernel.bucket and int(number or 0) % 16 == 0:
                divisible.append(position)
        elif kind == "float":
            signature.append((name, "fp32"))
        else:
            signature.append((name, f"*{kind}"))
            if arguments[name].aligned:
                divisible.append(position)
    options = tuple(sorted(kernel.options_for(config).items()))
    return Lowered(kernel.name, kernel.import_path, tuple(signature), tuple(constants), tuple(divisible), options)
