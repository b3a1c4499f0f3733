"""What one bad kernel is, and how it is brought before the gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kalign_core.declare import Config, Kernel, kernel
from kalign_core.records import InputFamily
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Bound
from kalign_core.verifier.inputs import CORE_FAMILIES
from kalign_core.verifier.probes import ORDER_PROBE
from kalign_core.verifier.variants import dense_problem

# The faults that a verifier must refute; every one has to have a kernel here.
KINDS = (
    "atomic accumulation",
    "split of a sum chosen from the number of rows",
    "gradient tree sized by the batch",
    "block sized by the largest group",
    "a compiler's own reduction under other warps",
    "another tile in an online softmax",
    "masking by multiplication",
    "a flipped zero",
    "a changed NaN payload",
    "a read of the neighbour's row",
    "a store outside the row",
    "an output left half written",
    "right on the first run only",
    "wrong for one number of rows",
    "a library's routine",
    "another order of a sum",
    "another rounding",
    "a special value mishandled",
    "a layout mishandled",
    "an undeclared effect",
)


@dataclass(frozen=True)
class Bad:
    """One bad kernel: ``kernel`` under ``config``, or whatever ``bind`` makes of the bench, against ``reference``.

    ``kind`` is one of ``KINDS``. ``check`` is the last check that may catch it, ``quick`` says whether the quick suite
    must, ``where`` is ``interpreter`` or ``cuda``. ``home`` is the reference's configuration where it is not its own.
    """

    name: str
    kind: str
    reference: Kernel
    dims: Mapping[str, int]
    dtypes: Mapping[str, str]
    check: str
    kernel: Kernel | None = None
    config: Config | None = None
    bind: Callable[[Bench, Config], Bound] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    where: str = "interpreter"
    quick: bool = True
    home: Config | None = None

    def candidate(self, bench: Bench) -> Bound:
        """The bad kernel on ``bench``."""
        config = self.config or self.reference_config(bench)
        return self.bind(bench, config) if self.bind else bench.bound(config, kernel=self.kernel)

    def reference_config(self, bench: Bench) -> Config:
        return self.home or self.reference.reference_config(bench.problem)


def open_bench(bad: Bad, platform: Any, device: int, *, strict: bool) -> Bench:
    """A bench for ``bad``'s reference with the core families."""
    problem = dense_problem(bad.reference, bad.dims, bad.dtypes, bad.numbers)
    bench = Bench(platform, bad.reference, problem, device, strict=strict)
    families: tuple[InputFamily, ...] = (*CORE_FAMILIES, ORDER_PROBE)
    bench.families.update({family.name: family for family in families})
    return bench


def posing_as(reference: Kernel, **changes: Any) -> Callable[[Any], Kernel]:
    """Declare a function with ``reference``'s run-time parameters as a candidate of it."""

    def declare(fn: Any) -> Kernel:
        declared: dict[str, Any] = {
            "name": fn.fn.__name__, "family": reference.family, "contract": reference.contract,
            "dims": reference.dims, "args": reference.args, "reference": reference.reference,
            "knobs": reference.knobs, "derived": reference.derived, "grid": reference.grid,
            "bucket": reference.bucket, "rows": reference.rows,
        }  # fmt: skip
        made = kernel(**{**declared, **changes})(fn)
        assert made.parameters == reference.parameters
        return made

    return declare
