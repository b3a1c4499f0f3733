"""Cases and problems as words on a command line, and back: so that a refutation can be run again by itself.

A kernel's problem is written out exactly (sizes, strides, alignment, numbers), because the operator call it came from
cannot be told from it: a backward pass or the edge of a bucket has no shape that a user would type.
"""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kalign_core.cache.key import index_bits
from kalign_core.declare import Kernel
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.records import DTYPES, Argument, Case, Config, Problem, Refutation

if TYPE_CHECKING:
    from kalign_core.session import Session

_EXAMPLE = "kalign_core.kernels.matmul:matmul_kernel"
_DEFAULT = Case("")
_FIELDS = {field.name: field for field in dataclasses.fields(Case)}


def command(kernel: Kernel, problem: Problem, candidate: Kernel | None, config: Config, case: Case, device: int) -> str:
    """The command that runs ``case`` again; empty where another process could not import the kernels."""
    if candidate is None or not (_findable(kernel) and _findable(candidate)):
        return ""
    words = ["kalign", "verify", "--kernel", f"{kernel.import_path} {problem_text(problem)}"]
    if candidate is not kernel:
        words += ["--candidate", str(candidate.import_path)]
    if device > 0:
        words += ["--device", str(device)]
    return shlex.join([*words, "--config", str(config), "--case", case_text(case)])


def _findable(kernel: Kernel) -> bool:
    """Whether the kernel stands in its module under its function's name, where another process would look for it."""
    module, _, name = (kernel.import_path or "").partition(":")
    return getattr(sys.modules.get(module), name, None) is kernel


def case_text(case: Case) -> str:
    """``check=batch_axis family=normals seed=0 T=17 shift=5``: every field that is not at its default."""
    words = [f"check={case.check.replace(' ', '_')}", f"family={case.family}", f"seed={case.seed}"]
    words += [f"{dim}={size}" for dim, size in case.dims]
    for name in _FIELDS:
        value = getattr(case, name)
        if name not in ("check", "family", "seed", "dims") and value != getattr(_DEFAULT, name):
            words.append(f"{name}={','.join(map(str, value)) if name == 'kept' else value}")
    return " ".join(words)


def case_of(text: str, dims: tuple[str, ...]) -> Case:
    """The case that ``case_text`` gives for a kernel with ``dims``; raises ``BadArgument``."""
    given: dict[str, Any] = {}
    sizes = []
    for name, value in _words(text, "--case"):
        if name in dims:
            sizes.append((name, _parsed(int, value, "--case")))
        elif name == "kept":
            given[name] = tuple(_parsed(int, part, "--case") for part in value.split(","))
        elif name in _FIELDS and name != "dims":
            kind = type(getattr(_DEFAULT, name))
            given[name] = _parsed(kind, value.replace("_", " ") if name == "check" else value, "--case")
        else:
            raise UnknownName("field of a case", name, (*(f for f in _FIELDS if f != "dims"), *dims))
    return Case(**{"check": "case", **given, "dims": tuple(sizes)})


def problem_text(problem: Problem) -> str:
    """``T=4 H=256 x=bf16:256,1 weight=bf16:1 eps=1e-06 phase=train``: all a problem holds; ``:a1`` is unaligned."""
    words = [f"{dim}={size}" for dim, size in problem.dims]
    for arg in problem.args:
        if arg.is_tensor:
            strides = ",".join(map(str, arg.strides))
            words.append(f"{arg.name}={arg.dtype}:{strides}{'' if arg.aligned else ':a1'}")
        else:
            words.append(f"{arg.name}={'none' if arg.dtype == 'none' else repr(arg.value)}")
    return " ".join((*words, f"phase={problem.phase}"))


def content_text(kernel: Kernel, problem: Problem) -> str:
    """What decides the numbers a case holds: sizes, dtypes and numbers, wherever the elements lie."""
    strides = {source for role in kernel.args.values() for source in role.strides}
    words = [f"{dim}={size}" for dim, size in problem.dims]
    args = [arg for arg in problem.args if arg.name not in strides]
    return " ".join((*words, *(f"{arg.name}={arg.dtype if arg.is_tensor else repr(arg.value)}" for arg in args)))


def problem_of_text(kernel: Kernel, text: str) -> Problem:
    """The problem that ``problem_text`` gives; raises ``BadArgument`` where a word is wrong or missing."""
    given = dict(_words(text, "--kernel"))
    phase = given.pop("phase", "train")
    missing = [name for name in kernel.parameters if name not in given]
    for name in given:
        if name not in kernel.parameters:
            raise UnknownName(f"parameter of {kernel.name}", name, kernel.parameters)
    if missing:
        raise BadArgument(f"--kernel {text!r} lacks {', '.join(missing)}", why="a problem gives every parameter")
    dims = tuple((dim, _parsed(int, given[dim], "--kernel")) for dim in kernel.dims)
    args = tuple(_argument(kernel, name, given[name]) for name in kernel.parameters if name not in kernel.dims)
    return Problem(kernel.name, dims, args, phase, index_bits(kernel, dict(dims), args))


def kernel_at(path: str) -> Kernel:
    """The kernel that ``module:name`` names; raises ``BadArgument``."""
    module, colon, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise BadArgument(f"{path!r} names no kernel: {error}", fix=_EXAMPLE) from error
    if not isinstance(found, Kernel):
        raise BadArgument(f"{path!r} names no kernel", fix=_EXAMPLE)
    return found


def _argument(kernel: Kernel, name: str, value: str) -> Argument:
    if value == "none":
        return Argument(name, "none")
    if name not in kernel.args:
        try:
            return Argument(name, "int", value=int(value))
        except ValueError:
            return Argument(name, "float", value=_parsed(float, value, "--kernel"))
    dtype, _, layout = value.partition(":")
    if dtype not in DTYPES.values():
        raise UnknownName("dtype", dtype, DTYPES.values())
    strides, _, alignment = layout.partition(":")
    numbers = tuple(_parsed(int, part, "--kernel") for part in strides.split(",") if part)
    if len(numbers) != len(kernel.args[name].shape):
        raise BadArgument(f"{name}={value} has {len(numbers)} strides", why=f"its axes are {kernel.args[name].shape}")
    return Argument(name, dtype, numbers, alignment != "a1")


def _words(text: str, option: str) -> list[tuple[str, str]]:
    words = []
    for word in text.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise BadArgument(f"{option}: {word!r} is not NAME=VALUE")
        words.append((name, value))
    return words


def _parsed(kind: Callable[[str], Any], value: str, option: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise BadArgument(f"{option}: {value!r} is no {getattr(kind, '__name__', kind)}") from error


def run_again(
    session: Session, kernel_text: str, candidate: str | None, config_text: str, case_text: str, device: int | None
) -> Refutation | None:
    """Run the one case that the words of a refutation's command name; gives what refutes the candidate, or None."""
    from kalign_core.verifier.ahead import compile_ahead
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.gate import open_gate

    path, _, rest = kernel_text.partition(" ")
    kernel = kernel_at(path)
    problem = problem_of_text(kernel, rest)
    case = case_of(case_text, kernel.dims)
    platform = session.platform
    where = platform.devices()[0] if device is None else device
    with platform.on(where):
        bench = Bench(platform, kernel, problem, where)
        gate = open_gate(session.plugins, bench, bench.bound(kernel.reference_config(problem)))
        other = kernel_at(candidate) if candidate else None
        bound = bench.bound(Config.parse(config_text), kernel=other)
        compile_ahead(session, gate, [bound], [case])
        return gate.run_case(bound, case)
