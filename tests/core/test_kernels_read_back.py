"""What a program reads back of its own results: nothing before all of its threads have stored it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kalign_core import hal, ops
from kalign_core.declare import lower
from kalign_core.kernels.rms_norm_long import rms_norm_long_residual_kernel
from kalign_core.tuner.targets import calls_of, session_for, space_on, target_named
from tests.core.test_kernels_compile import COMPILE, MODELS, TARGETS

KERNEL = rms_norm_long_residual_kernel
ASSIGNED = re.compile(r"\s*(%\w+) = tt\.(?:addptr|splat|broadcast) (.*)")
BARRIER = re.compile(r"\b(?:ttg|gpu)\.barrier\b")
LAYOUT = re.compile(r"!tt\.ptr<bf16>, (#\w+)>")


def _accesses(code: str, pointer: str) -> Iterator[tuple[str, str]]:
    """Loads and stores through the argument ``pointer``, and barriers: what it is, and the layout of its threads."""
    derived = {pointer}
    for line in code.splitlines():
        made = ASSIGNED.match(line)
        if made and derived & set(re.findall(r"%\w+", made.group(2))):
            derived.add(made.group(1))
        if BARRIER.search(line):
            yield "barrier", ""
        for what in ("tt.load", "tt.store"):
            if what in line and derived & set(re.findall(r"%\w+", line)):
                found = LAYOUT.search(line)
                assert found is not None, line
                yield what, found.group(1)


@pytest.mark.parametrize(("arch", "width"), [("sm_90", 151936), ("sm_90", 65537), ("gfx942", 151936)])
def test_the_sum_with_a_residual_is_read_back_behind_a_barrier(
    child: Callable[..., Any], tmp_path: Path, arch: str, width: int
) -> None:
    """Under every candidate a barrier lies between h's last store and its first load.

    With aligned rows the load has the layout of the store besides: a thread reads what it stored itself.
    """
    target = target_named(hal.plugins, MODELS[arch].target)
    calls = calls_of(session_for(target, hal.plugins), ops.rms_norm, {"T": 4, "H": width}, "bf16")
    (problem,) = {call.problem for call in calls if call.kernel is KERNEL}
    configs = space_on(target, hal.plugins, KERNEL, problem).candidates
    jobs = [dataclasses.asdict(lower(KERNEL, problem, config)) for config in configs]
    (tmp_path / "jobs.json").write_text(json.dumps([(job, TARGETS[arch]) for job in jobs]))
    code = COMPILE.format(path=str(tmp_path / "jobs.json")).replace('compiled.asm["ttir"]', 'compiled.asm["ttgir"]')
    done = child(code, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(configs) > 10
    for config, row in zip(configs, rows, strict=True):
        found = list(_accesses(row["ttir"], "%h"))
        order = [what for what, _ in found]
        last_store = max(place for place, what in enumerate(order) if what == "tt.store")
        between = order[last_store + 1 :]
        assert between[:1] == ["barrier"], config
        assert set(between[1:]) == {"tt.load"}, config
        assert "tt.load" not in order[:last_store], config
        if width % 16 == 0:
            assert len({layout for what, layout in found if what != "barrier"}) == 1, config
