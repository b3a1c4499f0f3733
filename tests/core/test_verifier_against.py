"""Digests of one device beside another's: equal, differing, or not comparable, and never a guess."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from kalign_core import ops
from kalign_core.api import recorded
from kalign_core.cache.base import MemoryStore
from kalign_core.cache.key import at_edge
from kalign_core.cache.toml_store import TomlStore
from kalign_core.cli.main import main
from kalign_core.errors import BadArgument, NotTunable
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Config, Entry, EntryKey, Identity, Toolchain
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.verifier.against import Comparison, compare, load, matching, overall
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.checks import SUITE
from kalign_core.verifier.gate import open_gate
from kalign_core.verifier.reference import Reference

KEY = EntryKey(
    "rms_norm", "rms_norm/1", "T<=4 H=64", "x:bf16:row:a16", "train", Toolchain.of(triton="3.9"), "9c1e", SUITE
)
DIGESTS = ("inputs=01", "normals=aa", "spread=bb")


def entry(*digests: str, **changes: Any) -> Entry:
    return Entry(replace(KEY, **changes), Config(ROWS=2), tuned_at="T=4", digests=digests or DIGESTS)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (entry(), Comparison("equal", "in normals, spread")),
        (
            entry(toolchain=Toolchain.of(triton="3.6"), phase="decode", source="other"),
            Comparison("equal", "in normals, spread"),
        ),
        (entry("inputs=01", "normals=aa", "spread=cc"), Comparison("differs", "in spread")),
        (entry("inputs=01", "normals=aa", "later=dd"), Comparison("equal", "in normals")),
        (entry("inputs=02", "normals=aa"), Comparison("not comparable", "taken on other sizes or numbers")),
        (entry("inputs=01", "later=dd"), Comparison("not comparable", "no case in common")),
        (entry(suite="2020.1"), Comparison("not comparable", f"suite 2020.1 there, {SUITE} here")),
        (entry(contract="rms_norm/2"), Comparison("not comparable", "contract rms_norm/2 there, rms_norm/1 here")),
        (replace(entry(), digests=()), Comparison("not comparable", "no digests there")),
    ],
)
def test_digests_are_compared_over_the_cases_both_ran(theirs: Entry, expected: Comparison) -> None:
    """One suite, one contract, the same inputs, and the cases in common; everything else is no answer."""
    assert compare(KEY, DIGESTS, theirs) == expected


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["equal", "differs", "not comparable"], "differs"), (["equal", "not comparable"], "equal"),
        (["not comparable"], "not comparable"), ([], "not comparable"),
    ],
)  # fmt: skip
def test_one_difference_decides_an_operator(states: list[str], expected: str) -> None:
    """And what cannot be compared decides nothing."""
    assert overall(states) == expected


@pytest.mark.parametrize("content", [None, b"", b"schema = 1\n", b"\xff\x00", b"schema = 99\n[device]\nname='x'\n"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """The error says where such files come from."""
    path = tmp_path / "theirs.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadArgument, match="kalign cache path"):
        load(path)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def here() -> Iterator[Session]:
    """A session on the interpreter that knows no decisions."""
    made = Session(platform=CpuPlatform(), store=MemoryStore())
    with made.active():
        yield made


@pytest.fixture
def theirs(here: Session, tmp_path: Path) -> Callable[..., Path]:
    """``theirs(change)`` gives a file with decisions for swiglu as tuned at T=4, each digest changed."""

    def make(change: Callable[[str], str] = lambda text: text) -> Path:
        device = Identity("scripted", "Scripted One", "scripted-0001", "0000:0001")
        store = TomlStore(Settings(cache_dir=tmp_path / "other"))
        for call in recorded(ops.swiglu, *ops.swiglu.inputs({"T": 3, "F": 64}, "bf16", 0, torch.device("cpu"))):
            problem = at_edge(call.kernel, call.problem)
            assert problem is not None
            bench = Bench(here.platform, call.kernel, problem, -1)
            gate = open_gate(here.plugins, bench, bench.bound(call.kernel.reference_config(problem)))
            gate.check_reference()
            known = Toolchain.of(triton="3.6.0", driver="580")
            found = Entry(
                replace(here.key(call.kernel, call.problem, -1), toolchain=known), Config(BLOCK=256), tuned_at="T=4",
                digests=tuple(map(change, gate.digests)), decided="2026-01-01T00:00:00Z",
            )  # fmt: skip
            assert store.put(device, found)
        path = store.path(device)
        assert path is not None
        return path

    return make


def against(path: Path, *more: str) -> Result:
    return CliRunner().invoke(
        main, ["verify", "swiglu", "--shape", "T=3,F=64", "--against", str(path), "--json", *more]
    )


def test_a_device_computes_what_it_computed(here: Session, theirs: Callable[..., Path]) -> None:
    """Digests taken again, at the size the entry was tuned at, equal those that tuning stored."""
    result = against(theirs())
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["operators"] == {"swiglu": "equal"}
    assert {row["kernel"] for row in told["comparisons"]} == {"swiglu", "swiglu_backward"}


@pytest.mark.parametrize(("more", "states"), [((), {"equal"}), (("--strict",), {"not comparable"})])
def test_strict_compares_what_keeps_its_bits_under_every_layout(
    here: Session, theirs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], states: set[str]
) -> None:
    """A reference that breaks a promise which the strict suite alone asks for is compared without it only."""
    path = theirs()
    monkeypatch.setattr(Reference, "_check_layouts", _breaks)
    result = against(path, *more)
    assert result.exit_code == 0, result.output
    assert {row["state"] for row in json.loads(result.stdout)["comparisons"]} == states


def _breaks(reference: Reference) -> None:
    raise NotTunable("out depends on the layout")


def test_another_byte_there_is_a_difference_here(here: Session, theirs: Callable[..., Path]) -> None:
    """Exit code 1, and the cases that differ are named."""
    result = against(theirs(lambda text: "spread=0123456789abcdef" if "spread" in text else text))
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["operators"] == {"swiglu": "differs"}
    assert {row["detail"] for row in told["comparisons"]} == {"in spread"}


def test_what_is_not_there_cannot_be_compared(here: Session, theirs: Callable[..., Path]) -> None:
    """An operator without entries in the file is neither equal nor different; the exit code is 0."""
    path = str(theirs())
    result = CliRunner().invoke(main, ["verify", "matmul", "--shape", "M=4,N=16,K=16", "--against", path, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["operators"] == {"matmul": "not comparable"}


def test_entries_are_matched_by_kernel_problem_and_arguments(here: Session, theirs: Callable[..., Path]) -> None:
    """Whatever toolchain and phase they were decided under."""
    found = load(theirs())
    first = found.entries[0].key
    assert (
        matching(found, replace(first, toolchain=Toolchain.of(triton="0"), phase="decode", source=""))
        == found.entries[:1]
    )
    assert matching(found, replace(first, problem="T<=9 F=64")) == ()
