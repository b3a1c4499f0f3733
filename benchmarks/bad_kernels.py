"""Hold every deliberately bad kernel to its good reference on the device at hand; prints one JSON object.

``python benchmarks/bad_kernels.py [--only NAME]``. Each is examined by the quick and by the strict suite as it would be
while tuning: whether it was refuted, by which check, on which inputs. The store is that of the tests; what shows on a
GPU only is run here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

SUITES = ("quick", "strict")
ROOT = Path(__file__).resolve().parents[1]


def store() -> Any:
    """The store of bad kernels, from the tests of this checkout whatever else is called ``tests``."""
    sys.path.insert(0, str(ROOT))
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests
    from kalign_core import hal  # selects the platform, and asks for the interpreter where there is no other

    hal.platform.devices()
    import tests.bad_kernels

    return tests.bad_kernels


def examine(
    bad: Any, platform: Any, device: int, bad_kernels: Any, promised: set[Any], *, strict: bool
) -> dict[str, Any]:
    """One bad kernel before one suite; a reference not in ``promised`` is held to its promises first."""
    from kalign_core.errors import CandidateFailed, NotTunable
    from kalign_core.verifier.checks import CORE_CHECKS
    from kalign_core.verifier.gate import Gate

    stages = {check.name: check.stage for check in CORE_CHECKS}
    bench = bad_kernels.open_bench(bad, platform, device, strict=strict)
    gate = Gate(bench, bench.bound(bad.reference_config(bench)), CORE_CHECKS)
    started = time.monotonic()
    if (bad.reference, strict) not in promised:
        try:
            gate.check_reference()
        except NotTunable as error:
            # A reference that breaks its own promises is not tuned at all, which refuses its candidates too.
            return {"refuted": True, "by": "reference", "in_time": True, "reason": str(error)}
        promised.add((bad.reference, strict))
    try:
        verdict = gate.examine([bad.candidate(bench)])[0]
    except (NotTunable, CandidateFailed) as error:
        return {"refuted": False, "error": str(error)}
    except Exception as error:  # the next kernel is worth its time all the same
        return {"refuted": False, "error": f"{type(error).__name__}: {error}"}
    found = verdict.refutation
    return {
        "refuted": found is not None,
        "by": found.check if found else "",
        "in_time": found is not None and stages.get(found.check, 99) <= stages[bad.check],
        "family": found.family if found else "",
        "reason": found.reason if found else "",
        "cases": verdict.cases,
        "skipped": list(verdict.skipped),
        "seconds": round(time.monotonic() - started, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    bad_kernels = store()
    from kalign_core import hal

    platform = hal.platform
    device = platform.devices()[0]
    interpreted = platform.model(device).interpreted
    rows, promised = [], set()
    with platform.on(device):
        for bad in bad_kernels.BAD:
            if given.only not in ("", bad.name) or (interpreted and bad.where != "interpreter"):
                continue
            row = {
                "name": bad.name,
                "kind": bad.kind,
                "where": bad.where,
                "check": bad.check,
                "must_be_quick": bad.quick,
            }
            for suite in SUITES:
                row[suite] = examine(bad, platform, device, bad_kernels, promised, strict=suite == "strict")
            rows.append(row)
            told = {suite: (row[suite]["refuted"], row[suite].get("by"), row[suite].get("error")) for suite in SUITES}
            print(bad.name, told, file=sys.stderr, flush=True)
    print(json.dumps(summary(platform, device, rows), indent=1))


def summary(platform: Any, device: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, what was missed, and everything."""
    import torch
    import triton

    from kalign_core.verifier.checks import SUITE

    counts = {
        suite: {
            "refuted": sum(row[suite]["refuted"] for row in rows),
            "by_the_check_named_or_earlier": sum(row[suite].get("in_time", False) for row in rows),
            "of": len(rows),
            "missed": [row["name"] for row in rows if not row[suite]["refuted"]],
        }
        for suite in SUITES
    }
    return {
        "benchmark": "bad_kernels", "suite": SUITE, "device": platform.identity(device).name,
        "torch": torch.__version__, "triton": triton.__version__, "counts": counts, "kernels": rows,
    }  # fmt: skip


if __name__ == "__main__":
    main()
