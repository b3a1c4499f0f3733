"""The core suite as a plugin of its own hookspecs; the one plugin that cannot be disabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kalign_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kalign_core.records import Check, InputFamily

KALIGN_API = 1


@hookimpl(any_platform=True)
def kalign_inputs() -> Iterable[InputFamily]:
    """The core input families."""
    from kalign_core.verifier.inputs import CORE_FAMILIES
    from kalign_core.verifier.probes import ORDER_PROBE

    return (*CORE_FAMILIES, ORDER_PROBE)


@hookimpl(any_platform=True)
def kalign_checks() -> Iterable[Check]:
    """The core checks."""
    from kalign_core.verifier.checks import CORE_CHECKS

    return CORE_CHECKS
