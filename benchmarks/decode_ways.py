"""The operators of a decode step, launched in five ways: by kalign, by Triton, by its autotune, and by torch itself.

Parts of ``decode_step.py``. The way of autotune gets kalign's own candidates for each problem, all of them and in the
order that kalign has them in, the likely ones first. So that a benchmark of twenty problems ends, it times each for a
twentieth of what ``do_bench`` takes by default, and each problem for so many seconds at most; ``Autotune.summary`` says
how many it timed, how many failed, and how many that left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Fire = Callable[..., None]
WARM_UP_MS, REPEAT_MS = 1, 5
NEVER = [math.inf] * 3  # a list, as `do_bench` gives: autotune compares readings with each other


class Ways(NamedTuple):
    """The operators a step is made of, launched one way."""

    norm: Callable[..., Any]
    turn: Callable[..., Any]
    gated: Callable[..., Any]
    product: Callable[..., Any]


def through_kalign() -> Ways:
    """kalign's operators, in whatever mode is in force."""
    from kalign_core import ops

    return Ways(ops.rms_norm, ops.rope, ops.swiglu, ops.matmul)


def through_torch() -> Ways:
    """torch's own operators, one after the other; roundings between them are torch's."""
    from torch.nn import functional

    def norm(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        out, c, s = torch.empty_like(x), cos.unsqueeze(1), sin.unsqueeze(1)
        (a, b), (first, second) = x.chunk(2, -1), out.chunk(2, -1)
        torch.mul(a, c, out=first).addcmul_(b, s, value=-1)
        torch.mul(b, c, out=second).addcmul_(a, s)
        return out

    def gated(gate: Any, up: Any) -> Any:
        return functional.silu(gate) * up

    return Ways(norm, turn, gated, torch.mm)


def through(fire: Fire) -> Ways:
    """The operators' kernels on outputs from ``torch.empty``, launched by ``fire(kernel, *arguments)``."""
    from kalign_core import ops

    norm_kernel, rope_kernel = ops.rms_norm.kernels[0], ops.rope.kernels[0]
    swiglu_kernel, matmul_kernel = ops.swiglu.kernels[0], ops.matmul.kernels[0]

    def norm(x: Any, weight: Any) -> Any:
        out, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        fire(norm_kernel, x, weight, out, rstd, *x.shape, x.stride(0), out.stride(0), 1e-6)
        return out

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        out = torch.empty_like(x)
        strides = (x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), out.stride(0), out.stride(1))
        fire(rope_kernel, x, cos, sin, out, *x.shape, *strides, 1.0, 0)
        return out

    def gated(gate: Any, up: Any) -> Any:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        fire(swiglu_kernel, gate, up, out, *gate.shape, gate.stride(0), up.stride(0), out.stride(0))
        return out

    def product(a: Any, b: Any) -> Any:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        sizes = (a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride(), *out.stride())
        fire(matmul_kernel, a, b, None, out, *sizes)
        return out

    return Ways(norm, turn, gated, product)


def looked_up(prepared: Callable[[Any, tuple[Any, ...]], tuple[Any, dict[str, Any]]]) -> Fire:
    """Launches what ``prepared(kernel, arguments)`` gives with its keywords: prepared once for the sizes of a call.

    What a caller would write down beside the launch (constants, options, grid) is looked up here instead.
    """
    known: dict[Any, Any] = {}

    def fire(kernel: Any, *args: Any) -> None:
        key = (kernel.name, *[arg for arg in args if isinstance(arg, int)])
        found = known.get(key)
        if found is None:
            found = known[key] = prepared(kernel, args)
        launch, words = found
        launch(*args, **words)

    return fire


def by_triton() -> Fire:
    """``kernel[grid](...)`` at the reference launch."""
    from kalign_core.problems import problem_of

    def prepared(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
        problem = problem_of(kernel, args, "decode")
        config = kernel.reference_config(problem)
        return kernel.fn[tuple(kernel.grid(problem, config))], {
            **kernel.constants_for(problem, config),
            **kernel.options_for(config),
        }

    return looked_up(prepared)


class Autotune:
    """``@triton.autotune`` over kalign's candidates, as many of a problem's as ``limit_s`` seconds take, or one."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._known: list[tuple[dict[str, Any], Any]] = []

    def fire(self) -> Fire:
        """Launches through autotune, which times its candidates at the first launch of a problem."""
        return looked_up(self._prepared)

    def summary(self) -> dict[str, Any]:
        """What it was given and what it did with it, over all problems; then each problem with its choice."""
        counts = ("candidates", "timed", "failed", "left_out", "seconds")
        totals = {name: sum(row[name] for row, _ in self._known) for name in counts}
        rows = [{**row, "chosen": str(tuned.best_config)} for row, tuned in self._known]
        return {"problems": len(rows), **totals, "rows": rows}

    def _prepared(self, kernel: Any, args: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
        import triton

        from kalign_core import session
        from kalign_core.problems import problem_of

        problem, here = problem_of(kernel, args, "decode"), session.current()
        candidates = here.space(kernel, problem, args[0].get_device()).candidates
        sizes = " ".join(f"{dim}={size}" for dim, size in problem.dims)
        row = {"kernel": kernel.name, "sizes": sizes, "candidates": len(candidates), "timed": 0, "failed": 0,
               "left_out": 0, "seconds": 0.0}  # fmt: skip
        made = [_config(kernel, problem, candidate) for candidate in candidates]
        grids = {_meta(kernel, config.kwargs): tuple(kernel.grid(problem, candidate))
                 for config, candidate in zip(made, candidates, strict=True)}  # fmt: skip
        tuned = triton.autotune(made, key=list(kernel.dims), do_bench=self._timing(row))(kernel.fn)
        self._known.append((row, tuned))
        return tuned[lambda meta: grids[_meta(kernel, meta)]], {}

    def _timing(self, row: dict[str, Any]) -> Callable[..., Sequence[float]]:
        def timed(call: Callable[[], Any], quantiles: Sequence[float]) -> Sequence[float]:
            if row["timed"] and row["seconds"] >= self.limit_s:
                row["left_out"] += 1
                return NEVER
            started = time.monotonic()
            try:
                found = _milliseconds(call, quantiles)
            except Exception as error:  # a candidate that does not compile or launch costs itself
                row["failed"] += 1
                row["failure"] = repr(error)[:200]
                return NEVER
            finally:
                row["seconds"] += time.monotonic() - started
            row["timed"] += 1
            return found

        return timed


def _config(kernel: Any, problem: Any, candidate: Any) -> Any:
    """``candidate`` as autotune takes it."""
    import triton

    options = kernel.options_for(candidate)
    own = {name: options.pop(name) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg") if name in options}
    return triton.Config({**kernel.constants_for(problem, candidate), **options}, **own)


def _meta(kernel: Any, meta: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(meta[name] for name in kernel.constants)


def _milliseconds(call: Callable[[], Any], quantiles: Sequence[float]) -> Sequence[float]:
    """Readings of ``call`` as autotune wants them; by the host's clock where there is no GPU."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        call()
        return [(time.perf_counter() - started) * 1e3] * len(quantiles)
    from triton.testing import do_bench

    found: Sequence[float] = do_bench(call, warmup=WARM_UP_MS, rep=REPEAT_MS, quantiles=quantiles)
    return found
