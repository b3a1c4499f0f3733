"""A digest of everything a kernel's text reaches: what has to stay the same for a stored decision to stay true.

Our own walk, because the compiler's hash covers line numbers and misses what the launch depends on: helpers at any
depth, module constants by value, functions picked by name, the reference, derived values, the grid, bucket rules, what
is usual where that is said. The knobs' lists are left out, since a decision is checked against them when it is used,
and so are comments, docstrings and line numbers. Modules that the toolchain's facts answer for (triton, torch, numpy,
the standard library) count by name.
Values with state of their own count by their fields, so a global that changes while the process runs gives misses.

Knows triton's objects by their shape (``.fn``, ``.value``) and imports neither triton nor torch.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from kalign_core.cache.source_text import (
    closure_names,
    definition_of,
    description_of,
    global_names,
    string_constants,
    text_of,
)
from kalign_core.declare import Kernel
from kalign_core.errors import KalignError
from kalign_core.records import Config

DIGEST_DIGITS = 16
ANSWERED_BY_TOOLCHAIN = frozenset({"triton", "torch", "numpy"}) | sys.stdlib_module_names
_PLAIN = (bool, int, str, bytes, complex, type(None), type(...), range, slice)
_MISSING = object()
_DECLARATIONS = Kernel.__module__
_VOCABULARY = (Config.__module__, KalignError.__module__)


def source_digest(kernel: Kernel) -> str:
    """Sixteen hexadecimal digits over all that ``kernel``'s text reaches, as it stands now.

    The same in every process, whatever ``PYTHONHASHSEED`` and whether the kernel is compiled or interpreted.
    """
    walk = _Walk()
    walk.say(kernel.contract, kernel.dims, kernel.rows, kernel.collective)
    for name in sorted(kernel.args):
        walk.say(name, dataclasses.astuple(kernel.args[name]))
    walk.visit(kernel.reference)
    if isinstance(kernel.reference, Config):
        walk.named(map(str, kernel.reference.values()), _function_of(kernel.fn).__globals__, ())
    for rules in (kernel.derived, kernel.bucket):
        for name in sorted(rules):
            walk.say(name)
            walk.visit(rules[name])
    walk.visit(kernel.grid)
    if kernel.usual is not None:  # what was timed on other inputs is no evidence for these
        walk.say("usual")
        walk.visit(kernel.usual)
    walk.visit(kernel.fn)
    return walk.digest()


class _Walk:
    """One traversal in a fixed order; what was met before is told by its number, so that cycles end."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._met: dict[int, tuple[int, Any]] = {}

    def digest(self) -> str:
        return self._hash.hexdigest()[:DIGEST_DIGITS]

    def say(self, *words: object) -> None:
        self._hash.update(repr(words).encode("utf-8", "backslashreplace") + b"\n")

    def visit(self, value: Any) -> None:
        """Add ``value`` and all that it reaches."""
        if type(value) in _PLAIN:
            self.say(type(value).__name__, repr(value))
        elif type(value) is float:
            self.say("float", value.hex())
        elif type(value) is tuple:
            # Not by identity: whether equal constants are one object is the compiler's choice.
            self._visit_parts("tuple", value)
        elif id(value) in self._met:
            self.say("again", self._met[id(value)][0])
        else:
            self._met[id(value)] = (len(self._met), value)
            self._visit_new(value)

    def _visit_new(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self.say("module", value.__name__)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, BuiltinFunctionType):
            self.say("builtin", value.__qualname__)
            self.visit(value.__self__)
        elif isinstance(value, MethodType):
            self._visit_parts("method", (value.__func__, value.__self__))
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, enum.Enum):
            self.say(type(value).__qualname__, value.name, repr(value.value))
        elif isinstance(value, (int, float, complex, str, bytes, Config)):
            self.say(type(value).__qualname__, str(value))
        elif isinstance(value, functools.partial):
            self._visit_parts("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, (property, functools.cached_property)):
            self._visit_parts("property", (value.fget if isinstance(value, property) else value.func,))
        elif isinstance(value, (tuple, list)):
            self._visit_parts(type(value).__name__, value)
        elif isinstance(value, Mapping):
            self._visit_parts("mapping", (part for pair in value.items() for part in pair))
        elif isinstance(value, (set, frozenset)):
            self.say("set", sorted(repr(item) for item in value))
        else:
            self._visit_object(value)

    def _visit_parts(self, kind: str, parts: Iterable[Any]) -> None:
        items = list(parts)
        self.say(kind, len(items))
        for item in items:
            self.visit(item)

    def _visit_object(self, value: Any) -> None:
        kind = type(value)
        wrapped = _attribute(value, "fn") if hasattr(value, "fn") else _attribute(value, "__wrapped__")
        if wrapped is not _MISSING:
            self._visit_parts("function", (wrapped,))
        elif kind.__name__ == "constexpr" and hasattr(value, "value"):
            self._visit_parts("constexpr", (value.value,))
        elif kind.__name__ == "dtype" or _is_answered(kind.__module__):
            self.say(kind.__qualname__, _literal(value))
        else:
            self.visit(kind)
            self._visit_parts("fields", (part for pair in _fields(value) for part in pair))

    def _visit_class(self, value: type) -> None:
        if value.__module__ in _VOCABULARY or _is_answered(value.__module__):
            self.say("class", value.__module__, value.__qualname__)
            return
        parts = {n: v for n, v in vars(value).items() if callable(v) or not n.startswith("__")}
        self.say("class", value.__qualname__, sorted(parts))
        self._visit_parts("bases", value.__bases__)
        for name in sorted(parts):
            self.visit(parts[name])

    def _visit_function(self, function: FunctionType) -> None:
        # A function made by exec without a module claims to be of builtins.
        if function.__module__ != "builtins" and _is_answered(function.__module__ or ""):
            self.say("function", function.__module__, function.__qualname__)
            return
        definition = definition_of(function)
        if definition is None:
            self.say("code", description_of(function.__code__))
        else:
            kept = [] if isinstance(definition, ast.Lambda) else _decorators(definition, function)
            self.say("text", text_of(definition, kept))
            for chain in sorted({chain for decorator in kept for chain in _dotted(decorator)}):
                self._visit_name(chain, function.__globals__)
        self.visit(function.__defaults__)
        self.visit(function.__kwdefaults__)
        self._visit_names(function)

    def _visit_names(self, function: FunctionType) -> None:
        """Add what ``function`` reads from outside itself, by name in alphabetical order."""
        code = function.__code__
        strings = string_constants(code)
        modules: list[ModuleType] = []
        closure = _closure(function)
        for namespace, chains in ((function.__globals__, global_names(code)), (closure, closure_names(code))):
            for chain in sorted(chains):
                value = self._visit_name(chain, namespace)
                if isinstance(value, ModuleType):
                    modules.append(value)
                text = getattr(value, "value", value)
                if isinstance(text, str):
                    strings.add(text)
        self.named(strings, function.__globals__, modules)

    def _visit_name(self, chain: tuple[str, ...], namespace: Mapping[str, Any]) -> Any:
        """Add the value that ``chain`` names, following attributes of modules; gives the first name's value."""
        name, *attributes = chain
        first = value = namespace.get(name, getattr(builtins, name, _MISSING))
        self.say("name", chain)
        while attributes and isinstance(value, ModuleType) and not _is_answered(value.__name__):
            value = getattr(value, attributes.pop(0), _MISSING)
        if value is _MISSING:
            self.say("unbound")
        else:
            self.visit(value)
        return first

    def named(self, strings: Iterable[str], namespace: Mapping[str, Any], modules: Iterable[ModuleType]) -> None:
        """Add the functions that any of ``strings`` names: a helper may be picked by a string."""
        spaces = [namespace, *(vars(m) for m in modules if not _is_answered(m.__name__))]
        for name in sorted(strings):
            for space in spaces:
                value = space.get(name)
                if isinstance(value, FunctionType) or hasattr(value, "fn"):
                    self.say("named", name)
                    self.visit(value)


def _is_answered(module: str) -> bool:
    return module.partition(".")[0] in ANSWERED_BY_TOOLCHAIN


def _function_of(value: Any) -> FunctionType:
    while not isinstance(value, FunctionType):
        value = value.fn
    return value


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name, _MISSING)


def _closure(function: FunctionType) -> dict[str, Any]:
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            values[name] = _MISSING  # a variable that its function has not assigned yet
    return values


def _decorators(definition: ast.FunctionDef | ast.AsyncFunctionDef, function: FunctionType) -> list[ast.expr]:
    """The decorators that count: kalign's own declaration is walked by value, with its knobs left out."""
    namespace = {**function.__globals__, **_closure(function)}
    kept = []
    for decorator in definition.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        chain = next(iter(_dotted(called)), ())
        value = namespace.get(chain[0], _MISSING) if chain else _MISSING
        for name in chain[1:]:
            value = _attribute(value, name)
        keywords = [k.arg for k in decorator.keywords] if isinstance(decorator, ast.Call) else []
        if getattr(value, "__module__", "") != _DECLARATIONS and not {"knobs", "reference", "contract"} <= {*keywords}:
            kept.append(decorator)
    return kept


def _dotted(tree: ast.expr) -> list[tuple[str, ...]]:
    """Every name in ``tree`` with the attributes taken from it, outermost first."""
    if isinstance(tree, ast.Name):
        return [(tree.id,)]
    if isinstance(tree, ast.Attribute):
        inner = _dotted(tree.value)
        return [(*inner[0], tree.attr), *inner[1:]] if inner else []
    return [chain for child in ast.iter_child_nodes(tree) for chain in _dotted_child(child)]


def _dotted_child(node: ast.AST) -> list[tuple[str, ...]]:
    if isinstance(node, ast.expr):
        return _dotted(node)
    return [chain for child in ast.iter_child_nodes(node) for chain in _dotted_child(child)]


def _literal(value: Any) -> str:
    """``repr`` of a value that has a literal form, its type's name where ``repr`` tells an address or a state."""
    text = str(value) if type(value).__name__ == "dtype" else repr(value)
    return type(value).__name__ if re.match(r"<|.* at 0x", text) else text


def _fields(value: Any) -> list[tuple[str, Any]]:
    names = set(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    return [(name, getattr(value, name, None)) for name in sorted(names - {"__dict__", "__weakref__"})]
