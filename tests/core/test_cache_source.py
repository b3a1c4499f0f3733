"""The source digest: everything a kernel's text reaches, and nothing that nobody executes."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import linecache
import sys
import types

import pytest

from kalign_core.cache.source import source_digest
from kalign_core.cache.source_text import definition_of
from kalign_core.declare import Config, Kernel, data, kernel, written
from tests.core.cache_samples import jit

HELPERS = '''
"""Helpers."""
OFFSET = 3


def shift(value):
    return value + OFFSET


def unused(value):
    return value
'''

SOURCE = '''
"""A kernel."""
import enum
import functools
import math

import helpers_of_the_test as helpers
from helpers_of_the_test import shift
from kalign_core.declare import Config, cdiv, data, kernel, powers_of_two, written
from tests.core.cache_samples import jit


class constexpr:
    def __init__(self, value):
        self.value = value


class Rounding(enum.Enum):
    NEAREST = 1
    ZERO = 2


class Shape:
    ROWS = 4

    @property
    def rows(self):
        return self.ROWS + 1


SCALE = 2
BLOCKS = {"small": 64, "large": 128}
ACTIVATION = constexpr("relu")
ROUNDING = Rounding.NEAREST
SHAPE = Shape()
PICKED = functools.partial(shift, 1)
NOTHING_READS_THIS = 1
KNOBS = {"num_warps": (1, 2, 4)}


@jit
def inner(value):
    return value * SCALE


@jit
def outer(value):
    """Calls another helper."""
    if value:
        return outer(value - 1)
    return inner(value) + shift(value) + helpers.OFFSET


@jit
def relu(value):
    return max(value, 0)


@jit
def gelu(value):
    return value


def edge(n):
    return powers_of_two(n)


def reference(problem):
    """The launch that defines the bits."""
    return Config(BLOCK=BLOCKS["small"], num_warps=4, enable_fp_fusion=False)


@kernel(
    name="k", family="f", contract="k/1", dims=("T",), bucket={"T": edge},
    args={"x": data("T"), "out": written("T")},
    reference=reference,
    knobs=KNOBS,
    derived={"LOG2": lambda p: math.log2(p.T), "PAD": lambda p: cdiv(p.T, 16)},
    grid=lambda p, c: (cdiv(p.T, c.BLOCK),),
)
@jit
def k(x, out, T, BLOCK: "constexpr", LOG2: "constexpr", PAD: "constexpr"):
    """What it computes."""
    # a comment
    value = outer(x)
    if ACTIVATION == "relu":
        value = globals()[ACTIVATION](value)
    return PICKED(value) + SHAPE.rows + ROUNDING.value + (lambda y: y + SCALE)(value)
'''

COUNTS = [
    ("SCALE = 2", "SCALE = 3"),
    ("SCALE = 2", "SCALE = 2.0"),
    ('"small": 64', '"small": 32'),
    ('constexpr("relu")', 'constexpr("gelu")'),
    ("Rounding.NEAREST\n", "Rounding.ZERO\n"),
    ("partial(shift, 1)", "partial(shift, 2)"),
    ("ROWS = 4", "ROWS = 8"),
    ("self.ROWS + 1", "self.ROWS + 2"),
    ("return value * SCALE", "return SCALE * value"),
    ("return max(value, 0)", "return max(0, value)"),
    ("return inner(value) +", "return inner(value) -"),
    ("BLOCK=BLOCKS", "BLOCK=2 * BLOCKS"),
    ("math.log2(p.T)", "math.ceil(p.T)"),
    ("cdiv(p.T, 16)", "cdiv(p.T, 32)"),
    ("(cdiv(p.T, c.BLOCK),)", "(cdiv(p.T, c.BLOCK), 1)"),
    ("return powers_of_two(n)", "return 2 * powers_of_two(n)"),
    ('contract="k/1"', 'contract="k/2"'),
    ('data("T")', 'data("T", strides=(2,))'),
    ("value = outer(x)", "value = outer(x + 0)"),
    ("lambda y: y + SCALE", "lambda y: y"),
    ("@jit\ndef inner", "@functools.partial(jit)\ndef inner"),
]
DOES_NOT_COUNT = [
    ("    # a comment\n", "    # another comment\n    # on two lines\n"),
    ('    """What it computes."""\n', '    """Something else."""\n'),
    ('    """What it computes."""\n', ""),
    ('    """Calls another helper."""\n', ""),
    ('    """The launch that defines the bits."""\n', ""),
    ('"""A kernel."""', '"""A kernel that moves down."""\n\n# by a few\n# lines\n'),
    ("value = outer(x)", "value  =  outer( x )"),
    ("NOTHING_READS_THIS = 1", "NOTHING_READS_THIS = 2"),
    ("(1, 2, 4)", "(1, 2, 4, 8)"),
    ("knobs=KNOBS", 'knobs={"num_warps": (1,)}'),
    ("return value\n\n\ndef edge", "return value + 1\n\n\ndef edge"),
]
IN_HELPERS = [("OFFSET = 3", "OFFSET = 4"), ("value + OFFSET", "value - OFFSET")]

_fresh = itertools.count()


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """``digest(source, helpers)`` imports both as a new process would and gives the digest of the kernel ``k``."""

    def load(name, text):
        path = tmp_path / f"{name}_{next(_fresh)}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def make(source=SOURCE, helpers=HELPERS):
        load("helpers_of_the_test", helpers)
        return source_digest(load("kernel_of_the_test", source).k)

    return make


def changed(text, before, after):
    assert text.count(before) == 1
    return text.replace(before, after)


def test_the_same_text_has_the_same_digest(digest):
    """Two imports of the same files have one digest of sixteen hexadecimal digits."""
    first = digest()
    assert (digest(), len(first), set(first) <= set("0123456789abcdef")) == (first, 16, True)


@pytest.mark.parametrize(("before", "after"), COUNTS)
def test_what_a_kernel_reaches_counts(digest, before, after):
    """A change in anything that the kernel or its launch depends on changes the digest."""
    assert digest(changed(SOURCE, before, after)) != digest()


@pytest.mark.parametrize(("before", "after"), IN_HELPERS)
def test_other_modules_count_as_far_as_they_are_reached(digest, before, after):
    """A helper's body and a constant in another module change the digest."""
    assert digest(helpers=changed(HELPERS, before, after)) != digest()


def test_what_is_not_reached_in_another_module_does_not_count(digest):
    """A function that the kernel never uses may change."""
    assert digest(helpers=HELPERS + "\n\ndef another():\n    return OFFSET\n") == digest()


@pytest.mark.parametrize(("before", "after"), DOES_NOT_COUNT)
def test_what_nobody_executes_does_not_count(digest, before, after):
    """Comments, docstrings, layout, positions, lists of knobs and unused names leave the digest alone."""
    assert digest(changed(SOURCE, before, after)) == digest()


def test_a_helper_picked_by_a_string_counts(digest):
    """The function that a string constant names counts only while that string is reached."""
    gelu = changed(SOURCE, 'constexpr("relu")', 'constexpr("gelu")').replace('== "relu"', '== "gelu"')
    edited = changed(gelu, "def gelu(value):\n    return value\n", "def gelu(value):\n    return value + 1\n")
    assert digest(gelu) != digest(edited)


def test_a_text_edited_after_import_is_not_taken_for_the_code(tmp_path):
    """Where the file no longer says what runs, the digest is that of the code that runs."""
    path = tmp_path / "edited.py"
    path.write_text("def grid(p, c):\n    return (1,)\n")
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text("def grid(p, c):\n    return (2,)\n")
    linecache.clearcache()
    assert definition_of(module.grid) is None


def test_a_notebook_cell_has_a_text():
    """Functions from a cell that only the line cache knows are described by their text, like any other."""
    grids = []
    cells = {"<cell 1>": "def grid(p, c):\n    # one\n    return (1,)\n", "<cell 2>": "def grid(p, c): return (1,)"}
    for name, text in cells.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), space)
        grids.append(with_grid(space["grid"]))
    assert source_digest(grids[0]) == source_digest(grids[1])


def made_by_exec(body):
    space = {}
    exec(f"def grid(p, c):\n    {body}", space)
    return space["grid"]


def with_grid(grid):
    def fn(x, out, T):
        return x + out + T

    declared = kernel(
        name="k", family="f", contract="k/1", dims=("T",), args={"x": data("T"), "out": written("T")},
        reference=Config(num_warps=4, enable_fp_fusion=False), knobs={}, grid=grid,
    )  # fmt: skip
    return declared(jit(fn))


def test_functions_without_text_count_by_their_code():
    """What ``exec`` made is told apart by its byte code."""
    one, same, other = (with_grid(made_by_exec(f"return ({n},)")) for n in (1, 1, 2))
    assert source_digest(one) == source_digest(same) != source_digest(other)


def test_a_set_in_byte_code_has_one_order(child):
    """A digest by byte code does not follow the hash seed."""
    code = (
        "from tests.core.test_cache_source import *\n"
        "print(source_digest(with_grid(made_by_exec(\"return p in {'a', 'b', 'c', 'd', 'e'}\"))))"
    )
    runs = [child(code, PYTHONHASHSEED=seed) for seed in ("1", "2", "3")]
    assert len({run.stdout for run in runs}) == 1, runs[0].stderr
    assert runs[0].stdout.strip()


def test_a_closure_counts_by_what_it_holds():
    """Variables of an enclosing function are part of what a kernel reaches."""

    def grid_of(size):
        return lambda p, c: (size,)

    one, same, other = (with_grid(grid_of(size)) for size in (1, 1, 2))
    assert source_digest(one) == source_digest(same) != source_digest(other)


def test_two_lambdas_on_a_line_are_two(digest):
    """Lambdas are found by column, so that one may change beside the other."""
    before = '"LOG2": lambda p: math.log2(p.T), "PAD": lambda p: cdiv(p.T, 16)'
    swapped = '"LOG2": lambda p: cdiv(p.T, 16), "PAD": lambda p: math.log2(p.T)'
    assert digest(changed(SOURCE, before, swapped)) != digest()


def test_cycles_end():
    """Values that reach themselves are walked once."""
    table = {"n": 1}
    table["self"] = table
    loop = types.SimpleNamespace(table=table)
    loop.loop = loop
    assert len(source_digest(with_grid(lambda p, c: (loop.table["n"],)))) == 16


def test_values_count_with_their_state():
    """Objects, classes, wrapped functions and bound methods count by what they hold."""

    class Tile:
        def __init__(self, rows):
            self.rows = rows

        def grid(self, p, c):
            return (self.rows,)

    def wrapped(rows):
        @functools.lru_cache
        def grid(p, c):
            return (rows,)

        return grid

    for make in (lambda n: Tile(n).grid, wrapped, lambda n: functools.partial(Tile.grid, Tile(n))):
        one, same, other = (source_digest(with_grid(make(n))) for n in (1, 1, 2))
        assert one == same != other


def test_the_digest_is_the_same_compiled_and_interpreted(child):
    """Neither the hash seed nor the interpreter's jit function nor the compiler's shows in a digest."""
    pytest.importorskip("triton", reason="the kernels need triton")
    code = (
        "from kalign_core.kernels import rms_norm\n"
        "from kalign_core.cache.source import source_digest\n"
        "print(type(rms_norm.rms_norm_kernel.fn).__name__, source_digest(rms_norm.rms_norm_kernel))"
    )
    compiled, interpreted = (
        child(code, PYTHONHASHSEED="1"),
        child(code, PYTHONHASHSEED="2", TRITON_INTERPRET="1"),
    )
    kinds, digests = zip(compiled.stdout.split(), interpreted.stdout.split(), strict=True)
    assert kinds[0] != kinds[1], compiled.stderr + interpreted.stderr
    assert digests[0] == digests[1]


def test_the_digest_needs_no_import_of_triton():
    """A kernel is walked by the shape of its objects."""
    assert isinstance(with_grid(lambda p, c: (1,)), Kernel)
    assert "triton" not in vars(sys.modules["kalign_core.cache.source"])
