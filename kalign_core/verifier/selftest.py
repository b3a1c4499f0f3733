"""A suite that would pass a known bad kernel is no evidence: here the suite itself is tried before it is believed.

Two things are tried, once per suite and process, on the host and on a model small enough to cost milliseconds. Every
input family that claims to see the order of a sum must change a byte when the order changes, for a row sum and for a
dot product. And every fault of a panel, planted into a model kernel, must be refuted by the assembled checks, while the
model itself is not. Inputs are the same on every machine, so what holds on the host holds for a device's cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kalign_core.declare import Config, Kernel, data, kernel, powers_of_two, side_output, written
from kalign_core.hal.base import Launch, Platform, Timer
from kalign_core.isolate import attempt
from kalign_core.records import Case, Check, DeviceModel, Identity, InputFamily, Toolchain
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from kalign_core.verifier.variants import dense_problem

if TYPE_CHECKING:
    from kalign_core.records import Problem

Tensor = torch.Tensor
SEEING_DTYPES = ("bf16", "fp16", "fp32")  # sums of 8-bit numbers are exact in float32, in whatever order
_ROWS, _COLUMNS, _TERMS, _LANES = 12, 4, 512, 16
_PANEL = {"T": 20, "H": 32}
_found: dict[object, str] = {}


def blind_spot(checks: Sequence[Check], families: Mapping[str, InputFamily], dtypes: Sequence[str]) -> str:
    """Why the suite is no evidence for inputs of ``dtypes``, in words; empty where it is."""
    core = {check.name for check in CORE_CHECKS}
    tried = [check for check in checks if check.name in core]
    key = (*(check.cases for check in tried), *(f.fill for f in families.values()), *dtypes)
    if key not in _found:
        reasons = (*_order_blind(families, dtypes), *_passes(tried, families))
        _found[key] = next(iter(reasons), "")
    return _found[key]


# --- families that claim to see order -----------------------------------------------------------------------------


def _order_blind(families: Mapping[str, InputFamily], dtypes: Sequence[str]) -> Iterator[str]:
    for dtype in (d for d in dtypes if d in SEEING_DTYPES):
        for family in (f for f in families.values() if f.sees_order):
            for model, terms in (("row sum", _row_terms), ("dot product", _dot_terms)):
                made = attempt(terms, family, dtype)
                if made.error is not None:
                    yield f"input family {family.name!r} raised {made.reason}"
                elif not sees_order(made.value):
                    yield f"input family {family.name!r} claims to see order and does not, in a {model} of {dtype}"


def sees_order(terms: Tensor) -> bool:
    """Whether sums of ``terms: (... n)`` along the last axis in float32 differ in a byte between orders."""
    forward, *others = (order(terms).view(torch.int32) for order in (_lanes, _lanes_reversed, _pairs))
    return all(not torch.equal(forward, other) for other in others)


def _lanes(terms: Tensor) -> Tensor:
    """Every 16th term added in turn, then the 16 sums."""
    lanes = _in_turn(terms.view(*terms.shape[:-1], -1, _LANES).unbind(-2))
    return _in_turn(lanes.unbind(-1))


def _in_turn(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _lanes_reversed(terms: Tensor) -> Tensor:
    return _lanes(terms.flip(-1))


def _pairs(terms: Tensor) -> Tensor:
    """Adjacent pairs, again and again."""
    while terms.shape[-1] > 1:
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms[..., 0]


def _row_terms(family: InputFamily, dtype: str) -> Tensor:
    bench = _bench({"T": _ROWS, "H": _TERMS}, dtype, {family.name: family})
    return bench.inputs(Case("", family=family.name, seed=1))["x"].view.float()


def _dot_terms(family: InputFamily, dtype: str) -> Tensor:
    sizes = {"M": _ROWS, "N": _COLUMNS, "K": _TERMS}
    bench = Bench(_HOST, _product, dense_problem(_product, sizes, dict.fromkeys("abc", dtype)), -1)
    bench.families[family.name] = family
    made = bench.inputs(Case("", family=family.name, seed=1))
    return made["a"].view.float()[:, None, :] * made["b"].view.float().t()[None, :, :]


# --- the panel of known bad kernels -------------------------------------------------------------------------------


def _passes(checks: Sequence[Check], families: Mapping[str, InputFamily]) -> Iterator[str]:
    """Faults of the panel that the checks let pass, and whether they let the faultless model pass."""
    gate = Gate(panel_bench(families), Fixed(faultless), checks)
    names = ["none", *PANEL]
    launches = [faultless, *(make() for make in PANEL.values())]
    for name, verdict in zip(names, gate.examine([Fixed(launch) for launch in launches]), strict=True):
        if name == "none" and verdict.refutation is not None:
            yield f"the suite refutes a kernel that equals its reference: {verdict.refutation}"
        elif name != "none" and verdict.refutation is None:
            yield f"the suite lets a known bad kernel pass, one that {name}"


def faultless(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    """The reference of the panel: ``out = x`` and ``total = sum(x * weight)`` in ascending order."""
    out.copy_(x)
    total.copy_(_ascending(x, weight))


def _ascending(x: Tensor, weight: Tensor, step: int = 1) -> Tensor:
    return _in_turn((x.float() * weight.float()).unbind(-1)[::step])


def _reverses(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    out.copy_(x)
    total.copy_(_ascending(x, weight, -1))


def _flips_zero(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    faultless(x, weight, out, total)
    out.masked_fill_(out == 0, 0.0)


def _changes_nan(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    faultless(x, weight, out, total)
    out.masked_fill_(out.isnan(), torch.nan)


def _reads_neighbour(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    faultless(x, weight, out, total)
    total += 0.0 * x.roll(1, 0).float().sum(-1)


def _leaves_unwritten(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    out[:, :-1].copy_(x[:, :-1])
    total.copy_(_ascending(x, weight))


def _writes_outside(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    faultless(x, weight, out, total)
    total.as_strided((1,), (1,), total.storage_offset() + len(total)).zero_()


def _writes_input(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    faultless(x, weight, out, total)
    x[0, 0] = 0.5


def _fails_at_17(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    (_reverses if len(x) == 17 else faultless)(x, weight, out, total)


def _fails_later() -> Launch:
    runs = 0

    def launch(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
        nonlocal runs
        runs += 1
        (faultless if runs == 1 else _reverses)(x, weight, out, total)

    return launch


PANEL: dict[str, Callable[[], Launch]] = {
    "reverses the order of a sum": lambda: _reverses,
    "loses the sign of zero": lambda: _flips_zero,
    "changes the payload of NaN": lambda: _changes_nan,
    "reads a neighbour's row": lambda: _reads_neighbour,
    "leaves elements unwritten": lambda: _leaves_unwritten,
    "writes outside its output": lambda: _writes_outside,
    "writes to its input": lambda: _writes_input,
    "is wrong for 17 rows": lambda: _fails_at_17,
    "is wrong on its second run": _fails_later,
}


# --- the models' declarations -------------------------------------------------------------------------------------


class _Routine:
    """What a declaration takes for a jit function: something with a signature. It is never compiled."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn


def _sum_signature(x: Any, weight: Any, out: Any, total: Any, T: int, H: int, x_stride: int, out_stride: int) -> None:
    """``x: (T H)``, ``weight: (H)`` -> ``out: (T H)``, ``total: (T)``."""


def _product_signature(a: Any, b: Any, c: Any, M: int, N: int, K: int) -> None:
    """``a: (M K)``, ``b: (K N)`` -> ``c: (M N)``."""


_sum: Kernel = kernel(
    name="selftest_sum", family="selftest", contract="selftest/1", dims=("T", "H"), rows="T",
    bucket={"T": powers_of_two},
    args={
        "x": data("T", "H", strides=("x_stride", 1)), "weight": data("H"),
        "out": written("T", "H", strides=("out_stride", 1)), "total": side_output("T"),
    },
    reference=Config(enable_fp_fusion=False), knobs={}, grid=lambda p, c: (1,),
)(_Routine(_sum_signature))  # fmt: skip

_product: Kernel = kernel(
    name="selftest_product", family="selftest", contract="selftest/1", dims=("M", "N", "K"), rows="M",
    args={
        "a": data("M", "K", strides=("K", 1)), "b": data("K", "N", strides=("N", 1)),
        "c": written("M", "N", strides=("N", 1)),
    },
    reference=Config(enable_fp_fusion=False), knobs={}, grid=lambda p, c: (1,),
)(_Routine(_product_signature))  # fmt: skip


class _Host(Platform):
    """The host without any compiler: where the models run."""

    name: ClassVar[str] = "selftest"
    device_type: ClassVar[str] = "cpu"
    launch_options: ClassVar[frozenset[str]] = frozenset()

    def devices(self) -> tuple[int, ...]:
        return (-1,)

    def identity(self, device: int) -> Identity:
        return Identity("selftest", "host", "")

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain(())

    def model(self, device: int) -> DeviceModel:
        return DeviceModel("interpreter", "host", 1, 1, 0)

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        raise NotImplementedError("models are launches already")

    def timer(self, device: int) -> Timer:
        raise NotImplementedError("nothing is timed here")

    def synchronize(self, device: int) -> None:
        return None


_HOST = _Host()


def panel_bench(families: Mapping[str, InputFamily]) -> Bench:
    """The bench on which ``faultless`` and the kernels of ``PANEL`` run: a few short rows of bf16, on the host."""
    return _bench(_PANEL, "bf16", families)


def _bench(dims: Mapping[str, int], dtype: str, families: Mapping[str, InputFamily]) -> Bench:
    dtypes = {"x": dtype, "weight": dtype, "out": dtype, "total": "fp32"}
    bench = Bench(_HOST, _sum, dense_problem(_sum, dims, dtypes), -1)
    bench.families.update(families)
    return bench
