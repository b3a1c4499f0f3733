"""What tests of the verifier share: kernels without a compiler, benches and gates for them, plugins in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from kalign_core.declare import Config, Kernel, accumulated, data, kernel, powers_of_two, side_output, written
from kalign_core.hal.base import Launch
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hookspecs import hookimpl
from kalign_core.plugins import Plugins, load
from kalign_core.records import Case, Check, InputFamily, Problem
from kalign_core.settings import Settings
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Bound, Fixed
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from kalign_core.verifier.inputs import CORE_FAMILIES
from kalign_core.verifier.probes import ORDER_PROBE
from kalign_core.verifier.variants import dense_problem

Tensor = torch.Tensor
FAMILIES = {family.name: family for family in (*CORE_FAMILIES, ORDER_PROBE)}


class Routine:
    """Stands where a jit function stands in a declaration; launches are given to the gate directly."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn


def _signature(x: Any, weight: Any, out: Any, total: Any, T: int, H: int, x_stride: int, out_stride: int) -> None:
    pass


def _adding(x: Any, out: Any, T: int, H: int) -> None:
    pass


sums: Kernel = kernel(
    name="sums", family="rowwise", contract="sums/1", dims=("T", "H"), bucket={"T": powers_of_two}, rows="T",
    args={
        "x": data("T", "H", strides=("x_stride", 1)), "weight": data("H"),
        "out": written("T", "H", strides=("out_stride", 1), observe="fp32"), "total": side_output("T"),
    },
    reference=Config(enable_fp_fusion=False), knobs={}, grid=lambda p, c: (p.T,),
)(Routine(_signature))  # fmt: skip

adds: Kernel = kernel(
    name="adds", family="fold", contract="adds/1", dims=("T", "H"), bucket={"T": powers_of_two},
    args={"x": data("T", "H", strides=("H", 1)), "out": accumulated("H")},
    reference=Config(enable_fp_fusion=False), knobs={}, grid=lambda p, c: (p.T,),
)(Routine(_adding))  # fmt: skip


def good(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
    """``out = x * weight`` and its row sums in ascending order."""
    product = x.float() * weight.float()
    out.copy_(product)
    total.copy_(ascending(product))


def ascending(product: Tensor) -> Tensor:
    first, *others = product.unbind(-1)
    for other in others:
        first = first + other
    return first


def sums_problem(t: int = 20, h: int = 24, dtype: str = "bf16") -> Problem:
    """A problem of ``sums`` with dense, aligned tensors."""
    return dense_problem(sums, {"T": t, "H": h}, {"x": dtype, "weight": dtype, "out": dtype, "total": "fp32"})


def sums_bench(
    problem: Problem | None = None, *, strict: bool = False, families: Mapping[str, InputFamily] = FAMILIES
) -> Bench:
    """A bench for ``sums`` on the host."""
    bench = Bench(CpuPlatform(), sums, problem or sums_problem(), -1, strict=strict)
    bench.families.update(families)
    return bench


def gate(bench: Bench, reference: Launch = good, checks: Sequence[Check] = CORE_CHECKS) -> Gate:
    """A gate whose reference is a plain function."""
    return Gate(bench, Fixed(reference), checks)


def refutation_of(launch: Launch, bench: Bench | None = None, reference: Launch = good) -> Any:
    """What refutes ``launch`` beside ``reference``, or None."""
    return gate(bench or sums_bench(), reference).examine([Fixed(launch)])[0].refutation


def with_plugin(name: str = "extra", **hooks: Callable[..., Any]) -> Plugins:
    """The built-in plugins and one more, made of ``hooks`` by name."""
    module = ModuleType(f"plugin_{name}")
    vars(module).update(
        KALIGN_API=1, **{hook: hookimpl(any_platform=True)(function) for hook, function in hooks.items()}
    )
    return load(Settings(), []).with_module(name, module)


def tensor_of(bench: Bench, case: Case, name: str) -> Tensor:
    """The input ``name`` of ``case``."""
    return bench.inputs(case)[name].view


def bound(bench: Bench, launch: Launch) -> Bound:
    """``launch`` as a candidate that has a kernel and a configuration, and so a command to repeat it."""
    return bench.bound(Config(enable_fp_fusion=False), launch)


def changed(change: Callable[..., None]) -> Callable[..., None]:
    """``good`` with ``change(x, weight, out, total, T)`` after it."""

    def launch(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, T: int, *rest: Any) -> None:
        good(x, weight, out, total, T, *rest)
        change(x, weight, out, total, T)

    return launch


def backwards(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, T: int) -> None:
    """Change ``total`` to the sum taken from the row's other end."""
    total.copy_(ascending((x.float() * weight.float()).flip(-1)))
