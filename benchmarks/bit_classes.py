"""Does the gate refute what differs, and nothing that is equal? Two methods that must agree; prints one JSON object.

``python benchmarks/bit_classes.py [--small] [--only KERNELS] [--out FILE] [--seconds S] [--resume FILE]``, and
``--reference-only --against FILE`` under another compiler.

Every space of ``known_spaces.py`` is examined twice: the quick gate, as it stands before a candidate while tuning, says
``refuted`` or ``not refuted``; and candidates are grouped by digests of their widest output over the core cases, which
no verdict enters. Candidates that run the same instructions as another are compiled and then left out. ``--out`` is
rewritten after every space, so that a run that is cut leaves what it had; ``--resume`` goes on from there, kernels of
which too few candidates were compared first.
``--reference-only`` takes the references' digests alone, ``--against`` compares them with those of an earlier run under
another compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform as host
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
DEADLINE_S = 60.0
MOST_PAIRS = 110  # some run the same instructions as others, and 60 that differ are wanted
SHOWN = 5


@dataclass
class Stand:
    """One space with its gate, and what has to be compiled for it."""

    space: Any
    bench: Any
    gate: Any

    @property
    def reference(self) -> Any:
        return self.space.kernel.reference_config(self.space.problem)

    @functools.cached_property
    def problems(self) -> list[Any]:
        """The problems that are compiled apart: the space's own, then those of cases that only the gate runs."""
        from kalign_core.verifier.ahead import problems_apart

        return problems_apart(self.bench, self.space.kernel, self.reference, self.gate.all_cases())

    def lowered(self, config: Any) -> list[Any]:
        """What is compiled for ``config``."""
        from kalign_core.declare import lower

        return [lower(self.space.kernel, problem, config) for problem in self.problems]


@dataclass
class Ahead:
    """Compiles of all spaces, side by side and in order, while earlier spaces are examined."""

    jobs: Sequence[Any]
    results: Iterator[tuple[int, Any]]
    done: dict[Any, Any] = field(default_factory=dict)

    def failure(self, wanted: Sequence[Any], shared_bytes: int) -> str:
        """Wait for ``wanted``; gives why one of them cannot run on a device with ``shared_bytes``, or nothing."""
        if not self.jobs:
            return ""
        for lowered in wanted:
            while lowered not in self.done:
                position, compiled = next(self.results)
                self.done[self.jobs[position]] = compiled
            found = self.done[lowered]
            if found.failure or found.shared_bytes > shared_bytes:
                return found.failure or f"needs {found.shared_bytes} bytes of shared memory"
        return ""


@contextlib.contextmanager
def compiling(here: Any, device: int, jobs: Sequence[Any]) -> Iterator[Ahead]:
    """Compile ``jobs`` in the session's pool while the block runs; an interpreter compiles nothing."""
    target = here.platform.compile_target(device)
    if target is None:
        yield Ahead((), iter(()))
        return
    distinct = list(dict.fromkeys(jobs))
    with here.pool.start(distinct, target, DEADLINE_S) as batch:
        yield Ahead(distinct, batch.results())


def stand_for(here: Any, device: int, space: Any) -> Stand:
    """The gate around one space, as tuning opens it."""
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.gate import open_gate

    bench = Bench(here.platform, space.kernel, space.problem, device)
    reference = bench.bound(space.kernel.reference_config(space.problem))
    return Stand(space, bench, open_gate(here.plugins, bench, reference))


# --- one space ----------------------------------------------------------------------------------------------------


def examine(here: Any, stand: Stand, ahead: Ahead) -> dict[str, Any]:
    """Both methods on one space."""
    from kalign_core.verifier.repeat import problem_text

    started = time.monotonic()
    space, bench = stand.space, stand.bench
    row = {
        "kind": space.kind, "kernel": space.kernel.name, "problem": problem_text(space.problem),
        "reference": str(stand.reference), "candidates": len(space.configs), "refused_by_limits": space.refused,
    }  # fmt: skip
    shared = here.platform.model(bench.device).shared_bytes or sys.maxsize
    failures = {config: ahead.failure(stand.lowered(config), shared) for config in (stand.reference, *space.configs)}
    if failures[stand.reference]:
        return {**row, "error": f"the reference: {failures[stand.reference]}"}
    waited = time.monotonic()
    if space.configs:
        row |= compare(stand, [config for config, failure in failures.items() if not failure])
    row["digests"] = list(stand.gate.digests or stand.gate.reference.digests())
    row["failed"] = sorted(Counter(reason.partition(",")[0] for reason in failures.values() if reason).items())
    bench.renew_inputs()
    row["seconds"] = {"compiling": round(waited - started, 2), "running": round(time.monotonic() - waited, 2)}
    return row


def digests_of(bench: Any, bounds: Mapping[Any, Any]) -> dict[Any, tuple[str, ...]]:
    """Digests of every launch's widest output over the core cases, as ``Reference.digests`` takes them.

    The inputs of each case are made once for all of them, which is most of what digests cost.
    """
    from kalign_core.verifier.compare import digest
    from kalign_core.verifier.reference import digest_cases

    found: dict[Any, tuple[str, ...]] = dict.fromkeys(bounds, ())
    for case in digest_cases(bench):
        for config, bound in bounds.items():
            run = bench.run(bound.launch_for(bench, case), case)
            found[config] += (f"{case.family}={digest([buffer.view for buffer in run.outputs.values()])}",)
    return found


def code_of(launch: Any) -> str:
    """The instructions that ``launch`` runs, empty where nothing was compiled."""
    from kalign_core.hal.machine_code import instructions

    compiled = getattr(launch, "compiled", None)
    return "" if compiled is None else instructions(compiled.asm)


def compare(stand: Stand, configs: Sequence[Any]) -> dict[str, Any]:
    """Hold every configuration with code of its own to the reference, by the gate and by digest."""
    from kalign_core.tuner.inert import knob_changes

    bench, sample = stand.bench, stand.bench.sample_arguments()
    launches, failed = {}, {}
    for config in configs:
        try:
            launches[config] = bench.platform.launcher(stand.space.kernel, stand.space.problem, config, sample)
        except Exception as error:
            failed[str(config)] = str(error)
    codes = {config: code_of(launch) for config, launch in launches.items()}
    apart = distinct(codes, stand.reference)
    gate_s = time.monotonic()
    stand.gate.check_reference()
    bounds = {config: bench.bound(config, launches[config]) for config in (stand.reference, *apart)}
    verdicts = stand.gate.examine([bounds[config] for config in apart])
    digest_s = time.monotonic()
    digests = digests_of(bench, bounds)
    if digests[stand.reference] != stand.gate.digests[1:]:
        raise RuntimeError(f"digests here are not the gate's own: {digests[stand.reference]}, {stand.gate.digests[1:]}")
    found = {"gate": round(digest_s - gate_s, 2), "digests": round(time.monotonic() - digest_s, 2)}
    return {
        "unlaunchable": failed,
        "identical_code": len(codes) - 1 - len(apart),
        "codes": [codes[stand.reference], *(codes[config] for config in apart)],
        "knobs": {name: list(pairs) for name, pairs in knob_changes(codes).items()} if any(codes.values()) else {},
        "cases": max((verdict.cases for verdict in verdicts), default=0),
        "skipped_cases": sorted({case for verdict in verdicts for case in verdict.skipped}),
        **agreement(stand.reference, dict(zip(apart, verdicts, strict=True)), digests),
        "seconds_of": found,
    }


def distinct(codes: Mapping[Any, str], reference: Any) -> list[Any]:
    """The configurations beside ``reference`` whose instructions, on as many warps, no earlier one runs."""
    seen, apart = {(codes[reference], reference.get("num_warps"))}, []
    for config, code in codes.items():
        same = (code or str(config), config.get("num_warps"))
        if config != reference and same not in seen:
            seen.add(same)
            apart.append(config)
    return apart


def agreement(reference: Any, verdicts: Mapping[Any, Any], digests: Mapping[Any, Sequence[str]]) -> dict[str, Any]:
    """Verdicts beside bit classes: counts of each, and every candidate on which the two methods disagree."""
    home = tuple(digests[reference])
    classes = Counter(tuple(each) for each in digests.values())
    refuted = {config: verdict.refutation for config, verdict in verdicts.items() if verdict.refutation is not None}
    equal = [config for config in verdicts if tuple(digests[config]) == home]
    false = [f"{config}: {refuted[config]}" for config in equal if config in refuted]
    missed = [str(config) for config in verdicts if config not in refuted and config not in equal]
    return {
        "compared": len(verdicts),
        "refuted": len(refuted),
        "not_refuted": len(verdicts) - len(refuted),
        "classes": len(classes),
        "class_sizes": [classes.pop(home), *sorted(classes.values(), reverse=True)],
        "refuted_of_equal_digest": false,
        "not_refuted_of_other_digest": missed,
        "refuted_by": Counter(refutation.check for refutation in refuted.values()),
        "refutations": [f"{config}: {refutation}" for config, refutation in list(refuted.items())[:SHOWN]],
    }


# --- all of them --------------------------------------------------------------------------------------------------


def command(given: argparse.Namespace) -> str:
    """What was asked for, files by their names alone."""
    words = ["benchmarks/bit_classes.py"]
    for name, value in vars(given).items():
        if value not in (None, False, "", float("inf")):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [getattr(value, "name", str(value))])]
    return " ".join(words)


def machine(here: Any, device: int) -> dict[str, str]:
    import torch
    import triton

    return {
        "device": here.platform.identity(device).name, "python": host.python_version(),
        "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip


def told(row: Mapping[str, Any]) -> str:
    """One space in one line."""
    if "compared" not in row:
        return f"{row['kernel']} {row['kind']}: {row.get('error', 'digests')} {row.get('seconds', '')}"
    return (
        f"{row['kernel']} {row['kind']}: {row['compared']} compared, {row['identical_code']} identical, "
        f"{row['refuted']} refuted, {row['classes']} classes {row['seconds']} {row['seconds_of']}"
    )


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Examine every space until the time is up; rewrites ``--out`` as it goes."""
    from kalign_core import session
    from kalign_core.verifier.checks import SUITE
    from kalign_core.verifier.repeat import problem_text

    started = time.monotonic()
    here = session.current()
    device = here.platform.devices()[0]
    import known_spaces  # whose kernels are compiled or interpreted as the platform has settled
    from bit_class_report import compared_with, summary

    rows: list[dict[str, Any]] = []
    with here.platform.on(device):
        place = known_spaces.Place(here, device, given.small)
        spaces = known_spaces.plan(place, given.most_pairs)
        if given.only:
            spaces = [space for space in spaces if space.kernel.name in given.only.split(",")]
        asked = {space.kernel.name for space in spaces} if given.only else None
        short = [row for row in known_spaces.shortfalls(spaces) if asked is None or row["kernel"] in asked]
        if given.reference_only:
            spaces = [known_spaces.Space(s.kind, s.kernel, s.problem) for s in spaces]
        rows += examined_before(given.resume)
        known = {(row["kind"], row["kernel"], row["problem"]) for row in rows}
        spaces = [s for s in spaces if (s.kind, s.kernel.name, problem_text(s.problem)) not in known]
        spaces.sort(key=lambda space: compared_of(rows, space) >= known_spaces.LEAST_OF_ONE_KERNEL)
        stands = [stand_for(here, device, space) for space in spaces]
        jobs = [job for s in stands for config in (s.reference, *s.space.configs) for job in s.lowered(config)]
        print(f"{len(stands)} spaces, {len(set(jobs))} compiles, {time.monotonic() - started:.1f} s", file=sys.stderr)
        result = {
            "benchmark": "bit_classes", "command": command(given), "suite": SUITE,
            "machine": machine(here, device), "short_of_candidates": short, "spaces": rows, "not_run": [],
        }  # fmt: skip
        with compiling(here, device, jobs) as ahead:
            for number, stand in enumerate(stands):
                if time.monotonic() - started > given.seconds:
                    result["not_run"] = [f"{s.space.kernel} {s.space.problem.dims}" for s in stands[number:]]
                    break
                rows.append(examined(here, stand, ahead))
                print(f"{time.monotonic() - started:6.1f} s {told(rows[-1])}", file=sys.stderr, flush=True)
                keep({**result, "summary": summary(rows)}, given.out)
    here.close()
    if given.against:
        result["against"] = compared_with(rows, given.against)
    result |= {"summary": summary(rows), "seconds": round(time.monotonic() - started, 1)}
    keep(result, given.out)
    return result


def examined_before(path: Path | None) -> list[dict[str, Any]]:
    """The rows of the result in ``path``; none without one."""
    return [] if path is None else list(json.loads(path.read_text(encoding="utf-8"))["spaces"])


def compared_of(rows: Sequence[Mapping[str, Any]], space: Any) -> int:
    """How many candidates of the space's kernel were compared in such spaces; plenty where it has none to compare."""
    if not space.configs:
        return sys.maxsize
    return sum(
        row.get("compared", 0) for row in rows if (row["kind"], row["kernel"]) == (space.kind, space.kernel.name)
    )


def examined(here: Any, stand: Stand, ahead: Ahead) -> dict[str, Any]:
    """``examine``, with whatever it raises as the row's error: the next space is worth its time all the same."""
    try:
        return examine(here, stand, ahead)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        kind, problem = stand.space.kind, str(stand.space.problem.dims)
        return {"kind": kind, "kernel": stand.space.kernel.name, "problem": problem, "error": text}


def keep(result: Mapping[str, Any], path: Path | None) -> None:
    """Put ``result`` in the place of what ``path`` holds, whole or not at all."""
    if path is not None:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(result, indent=1), encoding="utf-8")
        os.replace(beside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes that an interpreter can bear")
    parser.add_argument("--only", default="", help="names of kernels, separated by commas")
    parser.add_argument("--out", type=Path, help="keep the result here as it grows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="examine no further space after these")
    parser.add_argument("--resume", type=Path, help="a result that was cut: its spaces are not examined again")
    parser.add_argument("--most-pairs", type=int, default=MOST_PAIRS, help="candidates of each operator kernel")
    parser.add_argument("--reference-only", action="store_true", help="digests of the references, no candidates")
    parser.add_argument("--against", type=Path, help="an earlier result to compare the references' digests with")
    result = run(parser.parse_args())
    print(json.dumps(result["summary"], indent=1), file=sys.stderr)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
