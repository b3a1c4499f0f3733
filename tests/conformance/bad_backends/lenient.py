"""A plugin that would have the gate look less closely: harmless numbers in the name of the core's hardest family."""

from __future__ import annotations

from typing import Any

from kalign_core.hookspecs import hookimpl
from kalign_core.records import InputFamily

KALIGN_API = 1


@hookimpl
def kalign_inputs() -> list[InputFamily]:
    """The family ``spread``, of ones."""

    def ones(request: Any) -> Any:
        return request.ones()

    return [InputFamily("spread", ones)]
