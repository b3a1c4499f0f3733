"""What only a device can show of isolation: real faults, real hangs, memory that is really short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S, LIMIT_S = 4, 150
REASONS = {
    "stores out of bounds": "illegal memory access",
    "never ends": f"timeout at {DEADLINE_S} s on the device",
    "exhausts memory": "out of memory",
    "aborts its compiler": "died of SIGABRT",
}


@pytest.fixture(scope="module")
def found():
    """What ``benchmarks/hostile_candidates.py`` prints: tuning two sizes, and both again."""
    command = [sys.executable, str(ROOT / "benchmarks" / "hostile_candidates.py"),
               "--deadline", str(DEADLINE_S), "--seconds", str(LIMIT_S)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("deed", REASONS)
def test_a_deed_costs_one_candidate(found, deed):
    """A candidate that faults the device, hangs, exhausts memory or aborts its compiler fails for that reason."""
    assert REASONS[deed] in found["fates"][deed]


def test_the_others_are_decided_on(found):
    """The best of the remaining launches is stored, faster than the reference, with the host's time beside it."""
    row = found["first"]["row"]
    assert (row["how"], row["failed"]) == ("tuned", len(REASONS))
    assert row["gain"] > 1.02
    assert row["host_us"] > 0


def test_what_was_decided_is_a_hit(found):
    """Both sizes are hits afterwards."""
    assert found["again"] == ["hit", "hit"]


def test_no_process_meets_the_same_fault_again(found):
    """The second size loses no worker to what the first one learned."""
    assert found["other_size"]["workers_lost"] == []
