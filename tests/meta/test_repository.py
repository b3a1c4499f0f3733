"""The repository keeps its own rules: short files, documented modules and hooks, a core that knows no vendor."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kalign_core
from kalign_core import hookspecs
from kalign_core.plugins import Plugins
from kalign_core.settings import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kalign_core", "kalign_cuda", "kalign_rocm")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
HOOKS: dict[str, Callable[..., Any]] = {
    name: function for spec in hookspecs.SPECS for name, function in vars(spec).items() if name.startswith("kalign_")
}
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
SHARE_OF_LONG_FUNCTIONS = 0.06


def named(path: Path) -> str:
    """A file as it stands in a test's name."""
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """The module that a file is."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(path: Path) -> list[ast.FunctionDef]:
    """Every function of a file, methods and inner ones included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


# --- files --------------------------------------------------------------------------------------------------------


def test_the_packages_are_found() -> None:
    """These tests look at every module of the three packages."""
    assert {module_name(path).split(".")[0] for path in SOURCES} == set(PACKAGES)
    assert len(SOURCES) > 60


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_files_are_short(path: Path) -> None:
    """A file is read in one sitting."""
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_modules_say_what_they_are_for(path: Path) -> None:
    """Each module begins with a docstring of at least one sentence."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text
    assert len(text.split()) >= 5


@pytest.mark.parametrize("path", [path for path in SOURCES if path.parent.name != "kernels"], ids=named)
def test_what_is_public_is_documented(path: Path) -> None:
    """Every public class and function at the top of a module has a docstring; kernels have theirs in their module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    assert [n.name for n in defined if not n.name.startswith("_") and not ast.get_docstring(n) and not _marked(n)] == []


def _marked(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether a definition is one of several for one name, of which the last has the docstring."""
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)


def test_few_functions_are_long() -> None:
    """A function fits a screen, with few exceptions."""
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for path in SOURCES for node in functions(path)]
    long = [length for length in lengths if length > LONGEST_FUNCTION]
    assert len(long) <= SHARE_OF_LONG_FUNCTIONS * len(lengths)
    assert sorted(lengths)[len(lengths) // 2] <= 15


@pytest.mark.parametrize("path", TESTS, ids=named)
def test_tests_state_their_rule(path: Path) -> None:
    """Every test's docstring is the sentence that it checks."""
    tests = [node for node in functions(path) if node.name.startswith("test_")]
    assert [node.name for node in tests if not (ast.get_docstring(node) or "").strip().endswith(".")] == []


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kalign_core.__all__)
def test_public_names_resolve(name: str) -> None:
    """Each name that the package lists is there, and is what its home calls by that name."""
    value = getattr(kalign_core, name)
    home = kalign_core._HOMES.get(name)
    assert home is None or value is getattr(importlib.import_module(home), name)


LISTING = [path for path in SOURCES if "__all__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", LISTING, ids=named)
def test_listed_names_resolve(path: Path) -> None:
    """What a module lists as its own it has."""
    module = importlib.import_module(module_name(path))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_type_checkers_see_what_is_there() -> None:
    """The names imported for type checkers are those that are loaded when asked for."""
    tree = ast.parse((ROOT / "kalign_core" / "__init__.py").read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname or alias.name for node in guarded.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen | {"__version__"} == set(kalign_core.__all__)


# --- hooks --------------------------------------------------------------------------------------------------------


def example_of(hook: str) -> str:
    """The plugin that stands in a hook's docstring."""
    text = inspect.getdoc(HOOKS[hook]) or ""
    blocks = text.split("::\n", 1)
    assert len(blocks) == 2, f"{hook} has no example"
    lines = []
    for line in blocks[1].splitlines():
        if line.strip() and not line.startswith("    "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines))


def plugin_of(hook: str) -> types.ModuleType:
    """The example as a module."""
    module = types.ModuleType(f"example_{hook}")
    exec(compile(example_of(hook), f"<example of {hook}>", "exec"), vars(module))
    return module


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_documented(hook: str) -> None:
    """A hook's docstring says in a sentence what it gives, shows a plugin, and says what comes of an exception."""
    text = inspect.getdoc(HOOKS[hook]) or ""
    assert text.splitlines()[0].startswith("Give ")
    assert "Returns " in text
    assert "exception" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_examples_have_the_hook_s_signature(hook: str) -> None:
    """The example's function takes exactly the arguments that the hook is called with, in their order."""
    expected = [name for name in inspect.signature(HOOKS[hook]).parameters if name != "self"]
    assert list(inspect.signature(getattr(plugin_of(hook), hook)).parameters) == expected


@pytest.mark.parametrize("hook", HOOKS)
def test_examples_are_plugins(hook: str) -> None:
    """The example is loaded as it stands, keeps to the contract, and its hook is asked."""
    plugins = Plugins(strict=True).with_module("example", plugin_of(hook))
    assert [(row.name, row.state, row.reason) for row in plugins.rows] == [("example", "active", "")]
    (answer,) = plugins.ask(hook, **arguments_for(hook))
    assert answer.error is None
    assert answer.plugin == "example"


def arguments_for(hook: str) -> dict[str, Any]:
    """Arguments that a hook is called with, for the kernel that other tests launch."""
    from kalign_core.hal.replay import MODEL
    from tests.core.scripted import SCALE_REFERENCE, scale_kernel, scale_problem

    known = {"kernel": scale_kernel, "problem": scale_problem(), "model": MODEL, "config": SCALE_REFERENCE}
    return {name: known[name] for name in inspect.signature(HOOKS[hook]).parameters if name != "self"}


# --- vendors and surroundings -------------------------------------------------------------------------------------

VENDOR_WORDS = re.compile(r"pynvml|nvidia_ml|amdsmi|libnvidia|librocm|kalign_cuda|kalign_rocm", re.IGNORECASE)


def test_the_core_knows_no_vendor() -> None:
    """No module of the core names a vendor's library or package, except where a checkout's two plugins are found."""
    core = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "kalign_core"]
    said = {named(path): VENDOR_WORDS.findall(path.read_text(encoding="utf-8")) for path in core}
    assert {path: words for path, words in said.items() if words} == {
        "kalign_core/plugins.py": ["kalign_cuda", "kalign_rocm"]
    }


@pytest.mark.parametrize("package", ["kalign_cuda", "kalign_rocm"])
def test_vendors_do_not_know_each_other(package: str) -> None:
    """Neither vendor's package imports the other, and each names nothing of the other in its code."""
    other = {"kalign_cuda": "kalign_rocm", "kalign_rocm": "kalign_cuda"}[package]
    ours = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == package]
    assert [named(path) for path in ours if other in _code(path)] == []


def _code(path: Path) -> str:
    """A file without its docstring and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if ast.get_docstring(tree):
        tree.body = tree.body[1:]
    return ast.unparse(tree)


def test_vendors_are_built_alike() -> None:
    """The two vendor packages have the same files, so that comparing them shows how vendors differ."""
    files = [{path.name for path in (ROOT / package).glob("*.py")} for package in ("kalign_cuda", "kalign_rocm")]
    assert files[0] == files[1] >= {"plugin.py", "platform.py", "identity.py", "limits.py", "spaces.py"}


def test_the_lock_follows_no_planted_link() -> None:
    """No version of filelock is allowed that opens a link under the lock's name (CVE-2025-68146, before 3.20.1)."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (floor,) = [line.removeprefix("filelock>=") for line in needed if line.startswith("filelock")]
    assert tuple(map(int, floor.split("."))) >= (3, 20, 1)


def test_every_variable_is_in_the_table() -> None:
    """No module reads or mentions a variable of kalign's that the table of settings does not explain."""
    mentioned = {word for path in SOURCES for word in re.findall(r"KALIGN_[A-Z_]+", path.read_text(encoding="utf-8"))}
    assert mentioned - {"KALIGN_API"} == {variable.name for variable in VARIABLES.values()}


def test_every_variable_is_documented() -> None:
    """The documentation's table of variables has those of the settings, with the same words and defaults."""
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(KALIGN_\w+)` \| (.*?)(?: \(\[.*?\]\(.*?\)\))? \| (.*?) \|$", text, re.MULTILINE)
    assert rows == [(variable.name, variable.purpose, variable.default) for variable in VARIABLES.values()]


def test_links_lead_somewhere() -> None:
    """Every link between pages names a file that is there and, behind #, a heading of it."""
    places = ("*.md", "docs/*.md", "examples/*/*.md", "benchmarks/**/*.md")
    pages = [page for place in places for page in ROOT.glob(place)]
    dead = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                dead.append((named(page), link))
    assert dead == []


def anchors(page: Path) -> set[str]:
    """What a link may name behind # on ``page``."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_nothing_prints_outside_the_command_line() -> None:
    """Only the command line writes to standard output."""
    talking = []
    for path in SOURCES:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls):
            talking.append(named(path))
    assert [path for path in talking if "/cli/" not in path] == []
