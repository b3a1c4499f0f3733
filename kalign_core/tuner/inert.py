"""Knobs that change nothing: whose values, all others being equal, compile to the same code on the same grid.

A space that holds one is larger than it looks, and a launch that differs in one alone is no other launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from kalign_core.records import Config


def inert_knobs(codes: Mapping[Config, Hashable]) -> tuple[str, ...]:
    """The knobs that never change the code, which ``codes`` gives for each configuration, where they vary alone."""
    return tuple(name for name, (pairs, differing) in knob_changes(codes).items() if pairs and not differing)


def knob_changes(codes: Mapping[Config, Hashable]) -> dict[str, tuple[int, int]]:
    """By knob, how many pairs of configurations differ in that knob alone, and in how many of them the code differs."""
    found = {}
    for name in dict.fromkeys(name for config in codes for name in config):
        alike: dict[Hashable, list[Hashable]] = {}
        for config, code in codes.items():
            if name in config:
                alike.setdefault(tuple(sorted((k, v) for k, v in config.items() if k != name)), []).append(code)
        pairs = sum(len(group) * (len(group) - 1) // 2 for group in alike.values())
        same = sum(group.count(code) - 1 for group in alike.values() for code in group) // 2
        if pairs:
            found[name] = (pairs, pairs - same)
    return found
