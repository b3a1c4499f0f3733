"""A plugin whose check looks at inputs on which no fault shows, and at other ones every time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from kalign_core.hookspecs import hookimpl
from kalign_core.records import Case, Check, InputFamily

KALIGN_API = 1
_seeds = itertools.count()


@hookimpl
def kalign_inputs() -> list[InputFamily]:
    """The family ``halves``."""

    def halves(request: Any) -> Any:
        return request.block().fill_(0.5)

    return [InputFamily("halves", halves)]


@hookimpl
def kalign_checks() -> list[Check]:
    """One short case of it."""

    def cases(bench: Any) -> Iterable[Case]:
        yield Case("halves", family="halves", seed=next(_seeds), dims=(("T", 2),))

    return [Check("halves", 8, cases)]
