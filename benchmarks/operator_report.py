"""What the operator table says of its readings: aims with what came of them, ratios, where a peer wins, bit classes.

Nothing here measures; ``operators.py`` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Nowhere slower than the fastest peer by more than this.
MARGIN = 0.03
Times = Mapping[str, Mapping[str, Mapping[str, float]]]


def figures(case: Any, times: Times, rivals: Sequence[str]) -> dict[str, Any]:
    """A case's ratios by kind of reading and its aims; ``times`` are of ``reference``, ``tuned`` and the ``rivals``.

    Where nothing was tuned the reference stands for it. Above 1 the second named is slower.
    """
    found: dict[str, Any] = {"ratios": {}, "peer_wins": []}
    for kind, timed in times.items():
        ours = timed.get("tuned", timed["reference"])["us"]
        ratios: dict[str, Any] = {"reference_over_tuned": _ratio(timed["reference"]["us"], ours)}
        if rivals:
            best = min(rivals, key=lambda name: timed[name]["us"])
            peer = timed[best]["us"]
            ratios |= {"best_peer": best, "best_peer_over_tuned": _ratio(peer, ours),
                       "best_peer_over_reference": _ratio(peer, timed["reference"]["us"])}  # fmt: skip
            if ours > (1 + MARGIN) * peer:
                found["peer_wins"].append({"kind": kind, "peer": best, "ours_over_peer": _ratio(ours, peer)})
        found["ratios"][kind] = ratios
    return found | {"aims": [_reached(aim, times) for aim in case.aims if aim.kind in times]}


def _ratio(a: float, b: float) -> float:
    return round(a / b, 3)


def _reached(aim: Any, times: Times) -> dict[str, Any]:
    timed = times[aim.kind]
    ours = timed.get("tuned", timed["reference"])
    if aim.over:
        value = _ratio(timed[aim.over]["us"], ours["us"]) if aim.over in timed else None
        met = None if value is None else value >= aim.ratio
    elif aim.share:
        value = ours["share"]
        met = value >= aim.share
    else:
        value = ours["us"]
        met = value <= aim.us
    return {"ask": aim.ask, "value": value, "met": met}


def bit_classes(tuning: Iterable[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """By kernel: how many launches were held against the reference's bytes, and whether all had them.

    The tuner compares candidates with the reference, not with each other: those that differ are one class at least.
    """
    found = {}
    for row in tuning:
        counts = dict(re.findall(r"(\w+)=(\d+)", row["tried"]))
        if counts:
            other, same = int(counts["refuted"]), int(counts["timed"])
            found[row["kernel"]] = {
                "launches": same + other,
                "classes": 1 if not other else f"2 or more ({other} differ)",
            }
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the whole table comes to: aims met and missed, where a peer wins, what did not run."""
    aims = [(row["name"], aim) for row in rows for aim in row.get("aims", ())]
    return {
        "aims": len(aims),
        "met": sum(aim["met"] is True for _, aim in aims),
        "missed": [f"{name}: {aim['ask']}, is {aim['value']}" for name, aim in aims if aim["met"] is False],
        "without_their_peer": [f"{name}: {aim['ask']}" for name, aim in aims if aim["met"] is None],
        "peer_wins": [
            f"{row['name']}, {win['kind']}: {win['peer']} by {win['ours_over_peer']}"
            for row in rows for win in row.get("peer_wins", ())
        ],
        "bits_differ": [row["name"] for row in rows if row.get("bits_equal") is False],
        "failed": [row["name"] for row in rows if "error" in row],
        "not_run": [row["name"] for row in rows if "not_run" in row],
    }  # fmt: skip
