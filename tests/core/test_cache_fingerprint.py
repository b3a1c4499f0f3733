"""The toolchain's facts: what may change code or bits, and nothing that would only cost entries."""

from __future__ import annotations

import importlib.util
import sys
from collections import UserDict
from types import SimpleNamespace

import pytest

from kalign_core.cache import fingerprint
from kalign_core.cache.fingerprint import bit_flags, file_digest, versions
from kalign_core.records import Toolchain


@pytest.mark.parametrize(
    "name",
    ["TRITON_DEFAULT_FP_FUSION", "TRITON_F32_DEFAULT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "AMDGCN_USE_BUFFER_OPS",
     "TRITON_HIP_USE_BLOCK_PINGPONG", "DISABLE_LLVM_OPT", "TRITON_OVERRIDE_ARCH", "TRITON_OF_A_LATER_VERSION"],
)  # fmt: skip
def test_flags_that_may_change_code_count(name):
    """A flag of the compiler is a fact, one that nobody has heard of included."""
    assert bit_flags({name: "x", "HOME": "/root"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    ["TRITON_CACHE_DIR", "TRITON_INTERPRET", "TRITON_HOME", "TRITON_PRINT_AUTOTUNING", "TRITON_PROTON_DISABLE",
     "TRITON_REDIS_HOST", "PATH", "CUDA_VISIBLE_DEVICES", "LLVM_CONFIG"],
)  # fmt: skip
def test_what_reaches_no_code_does_not_count(name):
    """Where files lie and what is printed leaves the toolchain as it is."""
    assert bit_flags({name: "x"}) == {}


@pytest.mark.parametrize(("spellings", "value"), [(("1", "on", "True", "ON"), "1"), (("0", "off", "False"), "0")])
def test_spellings_of_a_switch_are_one_value(spellings, value):
    """On and off have one spelling each."""
    assert {bit_flags({"TRITON_DEFAULT_FP_FUSION": s})["TRITON_DEFAULT_FP_FUSION"] for s in spellings} == {value}


def test_a_flag_set_to_nothing_is_not_a_flag_unset():
    """An empty variable is a fact of its own."""
    assert Toolchain.of(**bit_flags({"PTXAS_OPTIONS": ""})) != Toolchain.of()


def test_long_and_odd_values_count_by_digest():
    """Any value makes a short printable fact, and different values different ones."""
    facts = [bit_flags({"PTXAS_OPTIONS": text})["PTXAS_OPTIONS"] for text in ("a" * 999, "a" * 998, "\n", "unknown")]
    assert len(set(facts)) == 4
    assert all(fact.startswith("sha256:") and len(fact) < 40 for fact in facts)


def test_a_tool_counts_by_its_content(tmp_path):
    """The same assembler under another path is the same, another one under the same path is not."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"x")
    two.write_bytes(b"x")
    facts = [bit_flags({"TRITON_PTXAS_PATH": str(path)}) for path in (one, two)]
    two.write_bytes(b"y")
    facts.append(bit_flags({"TRITON_PTXAS_PATH": str(two)}))
    assert facts[0] == facts[1] != facts[2]


@pytest.mark.parametrize("variables", [{"TRITON_PTXAS_PATH": "/nonexistent/ptxas"}, {"TRITON_KERNEL_OVERRIDE": "1"},
                                       {"TRITON_SWAP_MIR": "/tmp"}])  # fmt: skip
def test_what_cannot_be_told_makes_the_toolchain_unknown(variables):
    """Code overridden by hand and tools that cannot be read keep decisions off the disk."""
    assert not Toolchain.of(**bit_flags(variables)).known


def test_a_variable_unset_while_all_are_read_is_left_out():
    """Another thread may unset one between its name and its value, and no call fails for that."""

    class Vanishing(UserDict):
        def __getitem__(self, name):
            return {"PTXAS_OPTIONS": "-v"}[name]

    assert bit_flags(Vanishing(PTXAS_OPTIONS="", TRITON_F32_DEFAULT="ieee")) == {"PTXAS_OPTIONS": "-v"}


@pytest.mark.parametrize("text", ["0", "off", "false", ""])
def test_an_override_that_is_off_is_none(text):
    """An override switched off is no fact."""
    assert bit_flags({"TRITON_KERNEL_OVERRIDE": text}) == {}


def test_versions_need_no_import(child):
    """The versions of torch and triton are found without importing either."""
    done = child(
        "import sys; from kalign_core.cache.fingerprint import versions; facts = versions();"
        "print(sorted(facts), [name for name in ('torch', 'triton') if name in sys.modules])"
    )
    assert done.stdout.strip().endswith("[]"), done.stderr


def test_versions_are_those_of_the_installed_packages():
    """What is reported is what an import would give."""
    triton = pytest.importorskip("triton", reason="there is no version to compare with")
    assert versions()["triton"] == triton.__version__


@pytest.fixture
def build_of(tmp_path, monkeypatch):
    """``build_of(files)`` lays a triton out in a folder and gives the facts about it."""

    def make(files):
        for name, content in files.items():
            path = tmp_path / "triton" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "triton")])
        monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda name: spec if name == "triton" else None)
        return versions()

    return make


def test_another_compiler_under_one_version_is_another_build(build_of):
    """A triton built in place is told by its libraries."""
    files = {"__init__.py": b"__version__ = '3.6.0'\n", "_C/libtriton.so": b"one"}
    first = build_of(files)
    second = build_of({**files, "_C/libtriton.so": b"another"})
    assert (first["triton"], second["triton"]) == ("3.6.0", "3.6.0")
    assert first["triton_build"] != second["triton_build"]


def test_a_triton_that_tells_nothing_is_unknown(build_of):
    """A triton without version and compiler is unknown, not left out."""
    assert build_of({"__init__.py": b""}) == {"triton": "unknown", "triton_build": "unknown"}


def test_what_is_not_installed_is_left_out(monkeypatch):
    """Absent is not unknown: a package that is not there has no fact."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert versions() == {}


def test_a_file_that_cannot_be_read_is_unknown(tmp_path):
    """A folder, a missing file and an impossible name have no digest."""
    assert [file_digest(p) for p in (tmp_path, tmp_path / "x", "\0")] == ["unknown"] * 3


def test_the_module_imports_neither_torch_nor_triton():
    """Finding facts is not a reason to import what they are about."""
    assert not {"torch", "triton"} & set(vars(sys.modules["kalign_core.cache.fingerprint"]))
