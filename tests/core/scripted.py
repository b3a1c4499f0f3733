"""What tests of launching share: a user's kernel and operator, sessions on the scripted platform, things that count."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import kalign_core as kalign
from kalign_core import ops  # noqa: F401  # asks for the interpreter; other tests take it from here
from kalign_core.cache.base import MemoryStore
from kalign_core.declare import Config, Kernel, cdiv, data, kernel, next_power_of_2, powers_of_two, written
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.ops.base import random_tensor
from kalign_core.ops.noting import launch
from kalign_core.problems import problem_of
from kalign_core.records import Argument, Entry, EntryKey, Identity, Problem
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.tuner.report import Effort

import triton  # isort: skip  # after ops, which asks for the interpreter
import triton.language as tl  # isort: skip

SCALE_REFERENCE = Config(ROWS=4, num_warps=1, num_stages=1, enable_fp_fusion=False)
FASTER = SCALE_REFERENCE.replace(ROWS=8)


@kernel(
    name="scale",
    family="pointwise",
    contract="scale/1",
    dims=("T", "F"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "F", strides=("x_stride", 1)),
        "out": written("T", "F", strides=("out_stride", 1)),
    },
    reference=SCALE_REFERENCE,
    knobs={"ROWS": (4, 8)},
    derived={"BLOCK": lambda p: next_power_of_2(p.F)},
    grid=lambda p, c: (cdiv(p.T, c.ROWS),),
)
@triton.jit(do_not_specialize=["T"])
def scale_kernel(  # type: ignore[no-untyped-def]  # the kernel language is not Python
    x, out, T, F, x_stride, out_stride, factor, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < F)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside)
    tl.store(out + rows[:, None] * out_stride + columns[None, :], values * factor, mask=inside)


class Scale(kalign.Operator):
    """``scale(x, factor)``: x: ``(T F)`` times a number."""

    name: ClassVar[str] = "scale"
    kernels = (scale_kernel,)
    dims = ("T", "F")
    dtypes = ("fp32",)
    shapes = ({"T": 4, "F": 40},)
    small_shapes = shapes

    def __call__(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        out = torch.empty_like(x)
        launch(scale_kernel, x, out, *x.shape, x.stride(0), out.stride(0), factor)
        return out

    def inputs(self, sizes: Any, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        return (random_tensor((sizes["T"], sizes["F"]), dtype, seed, device),)

    def oracle(self, *args: Any) -> torch.Tensor:
        return args[0].double() * 2.0


scale = Scale()


class CountingStore(MemoryStore):
    """A store that counts its look-ups and decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups, self.puts = 0, 0

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        self.lookups += 1
        return super().lookup(identity, key)

    def put(self, identity: Identity, entry: Entry) -> bool:
        self.puts += 1
        return super().put(identity, entry)


class CountingPlatform(ReplayPlatform):
    """The scripted platform, counting every question it is asked."""

    def __init__(self, script: Script | None = None) -> None:
        super().__init__(script)
        self.asked = 0

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("asked", "script", "name", "device_type", "launch_options"):
            self.asked += 1
        return super().__getattribute__(name)


def scripted(script: Script | None = None, **settings: Any) -> Session:
    """A session of its own on the scripted platform, with a store that counts; it tunes with little effort."""
    made = Session(
        platform=ReplayPlatform(script), store=CountingStore(), configuration=Settings(**settings, sources={})
    )
    made.observer.effort = Effort("little", candidates=3, finalists=1, rounds=5)
    return made


def prefers(config: Config, faster_us: float = 50.0) -> Script:
    """A script on which ``config`` takes half the time of everything else."""
    return Script(time_us=lambda kernel, tried: faster_us if tried == config else 100.0)


def launched(session: Session) -> list[tuple[str, Config]]:
    """What the session's scripted platform launched, by kernel and configuration."""
    platform = session.platform
    assert isinstance(platform, ReplayPlatform)
    return platform.script.launched


def store_winner(
    session: Session, x: torch.Tensor, made: Kernel = scale_kernel, config: Config = FASTER, phase: str = "train"
) -> Entry:
    """Put a decision for ``scale`` of ``x`` into the session's store, as if it had been tuned."""
    out = torch.empty_like(x)
    posed = problem_of(made, (x, out, *x.shape, x.stride(0), out.stride(0), 2.0), phase)
    entry = Entry(session.key(made, posed, -1), config, decided="2026-01-01T00:00:00Z")
    session.store.put(session.facts(-1).identity, entry)
    return entry


def decide(session: Session, op: kalign.Operator, *args: Any) -> None:
    """Tune ``op`` for ``args`` in ``session`` and forget what that launched."""
    with session.active():
        kalign.tune(op, *args)
    launched(session).clear()


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of ``tensor``, row-major."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def problem(made: Kernel, dims: dict[str, int], phase: str = "train", **args: Any) -> Problem:
    """A problem of ``made``: tensors as dtype or (dtype, strides), numbers as they are, None for absent ones."""
    arguments = []
    for name in made.parameters:
        if name not in dims:
            arguments.append(argument(name, args[name]))
    return Problem(made.name, tuple(dims.items()), tuple(arguments), phase)


def argument(name: str, value: Any) -> Argument:
    """One argument: a dtype or (dtype, strides[, aligned]) for a tensor, an integer, a float or None."""
    if value is None:
        return Argument(name, "none")
    if isinstance(value, float):
        return Argument(name, "float", value=value)
    if isinstance(value, int):
        return Argument(name, "int", value=value)
    dtype, strides, *aligned = (value, (1,)) if isinstance(value, str) else value
    return Argument(name, dtype, tuple(strides), *aligned)


def scale_problem(t: int = 4, f: int = 40, dtype: str = "fp32", x_stride: int | None = None, **kwargs: Any) -> Problem:
    """A problem of ``scale_kernel``."""
    stride = x_stride or f
    return problem(
        scale_kernel, {"T": t, "F": f}, x=(dtype, (stride, 1)), out=(dtype, (f, 1)),
        x_stride=stride, out_stride=f, factor=2.0, **kwargs,
    )  # fmt: skip


def leaf(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normals that require a gradient."""
    return normals(*shape, dtype=dtype, seed=seed).requires_grad_()


def normals(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normals rounded to ``dtype``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: torch.Tensor, exact: torch.Tensor, *, steps: float = 8.0, magnitude: Any = None) -> None:
    """``got`` is ``exact`` (float64) rounded once to its dtype after ``steps`` float32 roundings of ``magnitude``.

    ``magnitude`` is the size of what was added up, that of ``exact`` by default.
    """
    assert (got.shape, exact.dtype) == (exact.shape, torch.float64)
    limits = torch.finfo(got.dtype)
    got, exact = got.detach(), exact.detach()
    size = exact.abs() if magnitude is None else magnitude.detach()
    allowed = 0.5 * limits.eps * exact.abs() + steps * torch.finfo(torch.float32).eps * size + limits.smallest_normal
    worst = ((got.double() - exact).abs() / allowed).max() if exact.numel() else torch.zeros(())
    assert float(worst) <= 1.0, f"{float(worst):.3g} times as far off as allowed"


def _among(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(rows: torch.Tensor) -> torch.Tensor:
        made = torch.full_like(rows, value)
        made[2] = rows[2]
        return made

    return spoil


def _padded(rows: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((rows.shape[0], rows.shape[1] + 24), torch.nan, dtype=rows.dtype)
    view = buffer[:, 8 : 8 + rows.shape[1]]
    view.copy_(rows)
    return view


def _unaligned(rows: torch.Tensor) -> torch.Tensor:
    view = torch.full((rows.numel() + 1,), torch.nan, dtype=rows.dtype)[1:].view(rows.shape)
    view.copy_(rows)
    return view


# Batches that hold rows of a batch of five: how each is made, and which of the five stands where (None: another row).
COMPANY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[int | None]]] = {
    "alone": (lambda rows: rows[3:4], [3]),
    "reversed": (lambda rows: rows.flip(0), [4, 3, 2, 1, 0]),
    "in more company": (
        lambda rows: torch.cat([rows[3:], rows.roll(1, 1), rows * 3, rows]),
        [3, 4, *[None] * 10, *range(5)],
    ),
    "beside NaN": (_among(torch.nan), [None, None, 2, None, None]),
    "beside infinities": (_among(torch.inf), [None, None, 2, None, None]),
    "between padding": (_padded, [*range(5)]),
    "unaligned": (_unaligned, [*range(5)]),
    "one row for all": (lambda rows: rows[1:2].expand(3, -1), [1, 1, 1]),
}
company = pytest.mark.parametrize("company", COMPANY)


def assert_rows_keep_their_bits(run: Callable[..., Any], name: str, *batches: torch.Tensor) -> None:
    """Every result of ``run`` on ``batches`` has, row by row, the same bytes in the company called ``name``."""
    make, where = COMPANY[name]
    expected, got = run(*batches), run(*(make(batch) for batch in batches))
    for before, after in zip(expected, got, strict=True):
        for position, row in enumerate(where):
            if row is not None:
                assert bits(after[position]) == bits(before[row]), f"row {row} at {position}"


# --- sessions -------------------------------------------------------------------------------------------------------

X = normals(3, 40)


def served(made: Session, mode: str, x: torch.Tensor = X, phase: str = "train") -> Config:
    """The configuration that answers ``scale(x)`` in ``mode``; its result is right."""
    with made.active(), kalign.using(mode=mode, phase=phase):
        assert torch.equal(scale(x), x * 2)
    return launched(made)[-1][1]


def counts(made: Session) -> tuple[int, int]:
    """Look-ups and decisions of the session's counting store."""
    assert isinstance(made.store, CountingStore)
    return made.store.lookups, made.store.puts


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kalign warned of."""
    return [r.getMessage() for r in caplog.records if r.name == "kalign" and r.levelno >= logging.WARNING]


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Results of ``work(i)`` on ``count`` threads that start together; a failure is raised here."""
    start = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
