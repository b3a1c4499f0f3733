"""What measuring and the gate conclude: times, refutations, verdicts, and the entries that decisions are kept as.

Part of ``kalign_core.records``, which gives these names again and is where others import them from; apart from it only
so that either file can be read in one sitting. Imports neither torch nor triton, nor anything of kalign.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kalign_core.records import Config, Toolchain


@dataclass(frozen=True, slots=True)
class Timing:
    """Device time of one launch: median and median absolute deviation over ``samples`` readings, microseconds."""

    median_us: float
    mad_us: float
    samples: int


@dataclass(frozen=True, slots=True)
class Refutation:
    """Where a candidate's bytes first differ, and how to see it again.

    ``check`` names the check, ``family`` and ``seed`` the inputs, ``argument`` and ``coordinate`` the element;
    ``reference`` and ``candidate`` are its bytes as hexadecimal text and ``reference_value`` and
    ``candidate_value`` the same as numbers, ``ulps`` their distance in units of the last place, None where one is no
    number; ``differing`` counts the elements that differ out of ``compared``. ``repeat`` is the command that runs just
    this case again, empty where no other process can find the kernel.
    """

    check: str
    reason: str
    family: str = ""
    seed: int = 0
    argument: str = ""
    coordinate: tuple[int, ...] = ()
    reference: str = ""
    candidate: str = ""
    reference_value: float = math.nan
    candidate_value: float = math.nan
    differing: int = 0
    compared: int = 0
    ulps: int | None = None
    repeat: str = ""

    def __str__(self) -> str:
        if not self.argument:
            return f"{self.check}: {self.reason}"
        if not self.differing:
            return f"{self.check}: {self.argument}: {self.reason}"
        apart = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return (
            f"{self.check}: {self.argument}{list(self.coordinate)} is {self.candidate_value!r} (0x{self.candidate}), "
            f"the reference's is {self.reference_value!r} (0x{self.reference}){apart}; {self.differing} of "
            f"{self.compared} elements differ; {self.reason}; inputs {self.family or 'given'}, seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says of one candidate: ``refuted``, ``not refuted`` or ``not tunable``; never ``proven``.

    ``cases`` counts the input cases compared, ``observable`` names the widest dtype compared, ``digests`` are the
    core cases' ``name=hex``, ``skipped`` the variants of the layout that could not be launched and so say nothing.
    """

    state: Literal["refuted", "not refuted", "not tunable"]
    suite: str
    cases: int
    observable: str
    digests: tuple[str, ...] = ()
    refutation: Refutation | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tally:
    """How the candidates of one tuning fared."""

    refused: int = 0
    failed: int = 0
    refuted: int = 0
    timed: int = 0

    def __str__(self) -> str:
        return f"refused={self.refused} failed={self.failed} refuted={self.refuted} timed={self.timed}"


@dataclass(frozen=True, slots=True)
class EntryKey:
    """What has to match for a stored decision to be used, device identity apart.

    ``problem`` is the bucketed dimensions (``T<=4096 H=4096``), ``args`` dtype, layout and specialisation class of
    every argument by parameter name, ``source`` the digest of everything the kernel's text reaches, ``suite`` the
    verifier's suite id.
    """

    kernel: str
    contract: str
    problem: str
    args: str
    phase: str
    toolchain: Toolchain
    source: str
    suite: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision with its evidence, as it stands in a device's file. Times are microseconds of device time.

    ``host_us`` and ``reference_host_us`` are the host's microseconds for one launch, where they were measured.
    ``tuned_at`` gives the exact bucketed dimensions that were measured, ``decided`` a UTC time in ISO 8601,
    ``extra`` fields of the file that this version does not know and keeps.
    """

    key: EntryKey
    config: Config
    tuned_at: str = ""
    cold_us: float | None = None
    warm_us: float | None = None
    reference_cold_us: float | None = None
    reference_warm_us: float | None = None
    mad_us: float | None = None
    host_us: float | None = None
    reference_host_us: float | None = None
    tried: str = ""
    digests: tuple[str, ...] = ()
    decided: str = ""
    extra: tuple[tuple[str, Any], ...] = ()


def join_facts(pairs: Iterable[tuple[str, object]]) -> str:
    """``a=1 b=2``: how small tables are written in one line of a file."""
    return " ".join(f"{name}={value}" for name, value in pairs)
