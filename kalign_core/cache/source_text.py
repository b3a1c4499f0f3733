"""What a Python function says, without what nobody executes: comments, docstrings, line numbers, layout.

The text is taken from the function's file only where that file, compiled again, still gives the code that runs; a file
edited since it was imported would otherwise put today's text beside yesterday's code. Functions without such a text
(made by ``exec``, rewritten by a test runner, edited since) are described by their byte code instead. That is as exact,
but it follows the Python version and, where comments moved lines, it differs from the description by text: the price
is a miss, never a wrong hit.
"""

from __future__ import annotations
import __future__

import ast
import copy
import dis
import functools
import linecache
import operator
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_FEATURES = [getattr(__future__, name) for name in __future__.all_feature_names]
_FUTURE_FLAGS = functools.reduce(operator.or_, (feature.compiler_flag for feature in _FEATURES))
_GLOBAL_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_CLOSURE_LOADS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def definition_of(function: FunctionType) -> Definition | None:
    """The syntax tree that ``function`` was compiled from, or None where it cannot be had for certain."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    parsed = _parse("".join(lines), code.co_flags & _FUTURE_FLAGS) if lines else None
    if parsed is None or code not in parsed.codes.get(code.co_firstlineno, ()):
        return None
    found = [node for node in parsed.definitions.get(code.co_firstlineno, ()) if _is_from(node, code)]
    return found[0] if len(found) == 1 else None


def text_of(definition: Definition, decorators: list[ast.expr]) -> str:
    """``definition`` under ``decorators``, written out in one way: no comments, no docstrings, no positions."""
    shallow = copy.copy(definition)
    if not isinstance(shallow, ast.Lambda):
        shallow.decorator_list = decorators
    return ast.unparse(shallow)


def description_of(code: CodeType) -> tuple[Any, ...]:
    """The byte code of ``code`` and everything nested in it as plain values, without line numbers and docstring."""
    constants = code.co_consts
    if constants and isinstance(constants[0], str):
        constants = constants[1:]
    return (
        code.co_name, code.co_code.hex(), code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount,
        code.co_names, code.co_varnames, code.co_freevars, tuple(_constant(value) for value in constants),
    )  # fmt: skip


def global_names(code: CodeType) -> set[tuple[str, ...]]:
    """Globals and builtins that ``code`` reads, each with the attributes taken from it: ``("tl", "load")``."""
    return {chain for nested in _nested(code) for chain in _chains(nested, _GLOBAL_LOADS)}


def closure_names(code: CodeType) -> set[tuple[str, ...]]:
    """Variables of enclosing functions that ``code`` reads, each with the attributes taken from it."""
    chains = {chain for nested in _nested(code) for chain in _chains(nested, _CLOSURE_LOADS)}
    return {chain for chain in chains if chain[0] in code.co_freevars}


def string_constants(code: CodeType) -> set[str]:
    """The strings that ``code`` mentions, docstrings included."""
    return {value for nested in _nested(code) for value in nested.co_consts if isinstance(value, str)}


class _Parsed(NamedTuple):
    """One file: its functions' syntax trees without docstrings, and the code they compile to, by first line."""

    definitions: dict[int, list[Definition]]
    codes: dict[int, list[CodeType]]


@functools.lru_cache(maxsize=64)
def _parse(text: str, flags: int) -> _Parsed | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the importer has shown them
            tree = ast.parse(text)
            module = compile(tree, "<source>", "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return None
    parsed = _Parsed({}, {})
    for code in _nested(module):
        parsed.codes.setdefault(code.co_firstlineno, []).append(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            node.body = node.body[ast.get_docstring(node) is not None :] or [ast.Pass()]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            parsed.definitions.setdefault(_first_line(node), []).append(node)
    return parsed


def _first_line(node: Definition) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _is_from(node: Definition, code: CodeType) -> bool:
    if not isinstance(node, ast.Lambda):
        return node.name == code.co_name
    # Several lambdas may start on a line; columns tell them apart.
    body = (node.body.lineno, node.body.end_lineno, node.body.col_offset, node.body.end_col_offset)
    return code.co_name == "<lambda>" and body in code.co_positions()


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested(value)


def _chains(code: CodeType, loads: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    chain: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if chain and instruction.opname in _ATTRIBUTE_LOADS:
            chain = (*chain, instruction.argval)
            continue
        if chain:
            yield chain
        chain = (instruction.argval,) if instruction.opname in loads else ()
    if chain:
        yield chain


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return description_of(value)
    if isinstance(value, frozenset):
        return ("frozenset", *sorted(map(repr, value)))
    if isinstance(value, tuple):
        return tuple(_constant(item) for item in value)
    return repr(value)
