"""What ``bit_classes.py`` found, counted; run by itself it prints a kept result as tables in Markdown.

``python benchmarks/bit_class_report.py RESULT.json [BAD_KERNELS.json ...]``
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
COLUMNS = (
    ("spaces", "spaces"), ("candidates", "configurations"), ("failed", "failed"), ("identical_code", "same code"),
    ("compared", "compared"), ("pairs_of_different_code", "pairs of different code"), ("refuted", "refuted"),
    ("not_refuted", "not refuted"), ("refuted_of_equal_digest", "refuted though of equal digest"),
    ("not_refuted_of_other_digest", "let pass though of another digest"),
)  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """By kind and by kernel: what was tried and what came of it. A pair counts once for each two codes of a kernel."""
    compared = [row for row in rows if "compared" in row]
    kinds = {row["kind"]: None for row in compared}
    kernels: dict[tuple[str, str], list[Row]] = {}
    for row in compared:
        kernels.setdefault((row["kernel"], row["kind"]), []).append(row)
    return {
        "kinds": {kind: totals([r for r in compared if r["kind"] == kind]) for kind in kinds},
        "kernels": [{"kernel": name, "kind": kind, **totals(own)} for (name, kind), own in kernels.items()],
        "knobs": knobs(compared),
        "inert_knobs": [
            f"{kernel}.{name}"
            for kernel, known in knobs(compared).items()
            for name, (_, changed) in known.items()
            if not changed
        ],
        "errors": [f"{row['kernel']} {row['problem']}: {row['error']}" for row in rows if "error" in row],
    }


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts over several spaces."""
    counted = ("candidates", "refused_by_limits", "identical_code", "compared", "refuted", "not_refuted")
    pairs = {(row["kernel"], row["codes"][0], code) for row in rows for code in row["codes"][1:]}
    return {
        "spaces": len(rows),
        **{name: sum(row[name] for row in rows) for name in counted},
        "failed": sum(count for row in rows for _, count in row["failed"]) + sum(len(r["unlaunchable"]) for r in rows),
        "pairs_of_different_code": len({pair for pair in pairs if pair[1] != pair[2]}),
        "classes": [row["classes"] for row in rows],
        "refuted_of_equal_digest": sum(len(row["refuted_of_equal_digest"]) for row in rows),
        "not_refuted_of_other_digest": sum(len(row["not_refuted_of_other_digest"]) for row in rows),
    }


def knobs(rows: Sequence[Row]) -> dict[str, dict[str, list[int]]]:
    """By kernel and knob: how many pairs of configurations differ in that knob alone, in how many the code differs."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        known = found.setdefault(row["kernel"], {})
        for name, counts in row["knobs"].items():
            known[name] = [before + now for before, now in zip(known.get(name, [0, 0]), counts, strict=True)]
    return found


def compared_with(rows: Sequence[Row], path: Path) -> dict[str, Any]:
    """Which references have the digests that an earlier run kept in ``path``, by kernel and problem."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    theirs = {(row["kernel"], row["problem"]): row["digests"] for row in kept["spaces"] if "digests" in row}
    ours = {(row["kernel"], row["problem"]): (row["kind"], row["digests"]) for row in rows if "digests" in row}
    both = [key for key in ours if key in theirs]
    alike = {key: ours[key][1] == theirs[key] for key in both}
    kinds = Counter((ours[key][0], "equal" if alike[key] else "different") for key in both)
    return {
        "triton": kept["machine"]["triton"], "suite": kept["suite"],
        "counts": {f"{kind}: {how}": count for (kind, how), count in sorted(kinds.items())},
        "problems": [{"kernel": kernel, "problem": text, "equal": alike[kernel, text]} for kernel, text in both],
        "only_here": len(ours) - len(both), "only_there": len(theirs) - len(both),
    }  # fmt: skip


# --- Markdown -----------------------------------------------------------------------------------------------------


def tables(result: Row) -> str:
    """Counts by kind of space, then by kernel with the bit classes of each of its spaces."""
    found = summary(result["spaces"])
    kinds = table(("spaces that are", *(title for _, title in COLUMNS)), (
        [kind, *(own[name] for name, _ in COLUMNS)] for kind, own in found["kinds"].items()
    ))  # fmt: skip
    kernels = table(("kernel", "spaces that are", *(title for _, title in COLUMNS[1:-2]), "bit classes by space"), (
        [f"`{own['kernel']}`", own["kind"], *(own[name] for name, _ in COLUMNS[1:-2]), spelled(own["classes"])]
        for own in found["kernels"]
    ))  # fmt: skip
    return f"{kinds}\n\n{kernels}"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def spelled(classes: Sequence[int]) -> str:
    """``1`` where every space has one class, else the number of each."""
    return "1" if set(classes) == {1} else ", ".join(map(str, classes))


def bad_table(results: Sequence[Row]) -> str:
    """Deliberately bad kernels refuted, by compiler and suite."""
    rows = [
        [each["triton"], suite, f"{count['refuted']} of {count['of']}", ", ".join(f"`{n}`" for n in count["missed"])]
        for each in results
        for suite, count in each["counts"].items()
    ]
    return table(("Triton", "suite", "refuted", "let pass"), rows)


def main() -> None:
    first, *others = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:])
    print(tables(first))
    if others:
        print(f"\n{bad_table(others)}")


if __name__ == "__main__":
    main()
