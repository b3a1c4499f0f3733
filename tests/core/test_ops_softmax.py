"""ops.softmax and ops.log_softmax: accuracy, the bits their contract promises, what they take and what they refuse."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import kalign_core as kalign
from kalign_core import hal
from kalign_core.api import recorded
from kalign_core.errors import BadArgument, KalignError
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.row_parts import CHUNK, LANES, LOG2_E
from kalign_core.kernels.softmax import LONGEST_HELD
from kalign_core.ops import softmax as softmax_operator
from kalign_core.ops.softmax import FEW_ROWS, LOG_SOFTMAX, SOFTMAX, backward, forward
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.gate import open_gate
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops, scripted

BOTH = {"softmax": ops.softmax, "log_softmax": ops.log_softmax}
both = pytest.mark.parametrize("op", BOTH.values(), ids=BOTH)
LONG = LONGEST_HELD + 8
cases = pytest.mark.parametrize(
    ("dtype", "width"),
    [
        *((dtype, 24) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        *((torch.float32, width) for width in (1, 5000, 3 * CHUNK // 2)),
        (torch.bfloat16, LONG),
        (torch.bfloat16, 262143),
    ],
)


def both_ways(op: Any, x: torch.Tensor, d_out: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Result and gradient for an upstream gradient."""
    x = x.detach().requires_grad_()
    out = op(x, temperature)
    return (out.detach(), *torch.autograd.grad(out, x, d_out))


def pair_sum(values: Any) -> Any:
    """Adjacent pairs added over the last axis, a power of two."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def chunk_sum(values: Any) -> Any:
    """The contract's sum of chunks, the last axis: over lines of LANES first, then over lanes."""
    lanes = min(values.shape[-1], LANES)
    lines = values.reshape(*values.shape[:-1], -1, lanes)
    return pair_sum(pair_sum(np.moveaxis(lines, -2, -1)))


def chunks_of(x: Any, padding: float) -> Any:
    """``x: (t v)`` as float32 ``(t chunks chunk)``."""
    size = min(CHUNK, 1 << (x.shape[1] - 1).bit_length())
    count = -(-x.shape[1] // size)
    made = np.full((len(x), count * size), padding, np.float32)
    made[:, : x.shape[1]] = x
    return made.reshape(len(x), count, size)


def over_chunks(parts: Any, padding: float, fold: Any) -> Any:
    """``parts: (t chunks)`` padded to a power of two and folded."""
    made = np.full((len(parts), 1 << (parts.shape[1] - 1).bit_length()), padding, np.float32)
    made[:, : parts.shape[1]] = parts
    return fold(made)


def fma(x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` of float32 rounded once, by way of float80 or wider."""
    wide = np.longdouble
    return (x.astype(wide) * np.asarray(y).astype(wide) + z.astype(wide)).astype(np.float32)


def known_of(x: Any, temperature: float) -> tuple[Any, Any, Any]:
    """The contract's t and s of every row and b of every element."""
    k = np.float32(LOG2_E / temperature)
    chunks = chunks_of(x, -np.inf)
    tops = chunks.max(-1) * k
    sums = chunk_sum(np.exp2(fma(chunks, k, -tops[..., None])))
    top = over_chunks(tops, -np.inf, lambda t: t.max(-1))
    total = over_chunks(sums * np.exp2(tops - top[:, None]), 0.0, pair_sum)
    return top, total, fma(x, k, -top[:, None])


# --- accuracy -----------------------------------------------------------------------------------------------------


@both
@cases
def test_they_are_accurate(op: Any, dtype: torch.dtype, width: int) -> None:
    """The results are those of float64, rounded once, from the shortest rows to those that are read twice."""
    x = normals(2, width, dtype=dtype) * 4
    exact = op.oracle(x, 0.7)
    # An exponent is rounded where it is as large as the logarithm of the result.
    size = exact.abs() + 20 if op is ops.log_softmax else exact * (1 - exact.log())
    assert_near(op(x, 0.7), exact, magnitude=size)


@both
@cases
def test_their_gradients_are_accurate(op: Any, dtype: torch.dtype, width: int) -> None:
    """The gradients are those of float64, rounded once, for any upstream gradient."""
    x, d_out = normals(2, width, dtype=dtype) * 4, normals(2, width, dtype=dtype, seed=1)
    wide = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(op.oracle(wide, 0.7), wide, d_out.double())
    p = torch.softmax(x.double() / 0.7, -1)
    d = d_out.double().abs()
    added = d if op is ops.log_softmax else d * p
    size = (d if op is ops.log_softmax else d * p) + p * added.sum(-1, keepdim=True)
    _, d_x = both_ways(op, x, d_out, 0.7)
    assert_near(d_x, exact, magnitude=size / 0.7, steps=40)


@both
def test_the_temperature_is_the_call_s(op: Any) -> None:
    """Every call is computed with its own temperature, also right after one that differs in nothing else."""
    x = normals(2, 24)
    for temperature in (1.0, 0.25, 7.0, 2):
        assert_near(op(x, temperature), op.oracle(x, temperature), magnitude=10.0 * torch.ones(2, 24))


# --- what is no number ----------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("width", [24, LONG])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_is_nan(op: Any, value: float, width: int) -> None:
    """One NaN or +inf makes its whole row NaN, and no other."""
    x = normals(3, width)
    x[1, width - 2] = value
    out = op(x)
    assert out[1].isnan().all()
    assert bits(out[0::2]) == bits(op(x[0::2]))


@both
@pytest.mark.parametrize("width", [24, LONG])
def test_masked_elements_weigh_nothing(op: Any, width: int) -> None:
    """-inf gives a probability of 0, whole chunks of it too, and the rest has the bits it has with nothing there."""
    x = normals(2, width)
    x[:, 3] = -torch.inf
    x[:, width // 2 :] = -torch.inf
    out = op(x)
    expected = -torch.inf if op is ops.log_softmax else 0.0
    assert (out[:, 3] == expected).all()
    assert (out[:, width // 2 :] == expected).all()
    assert_near(out[:, :3], op.oracle(x)[:, :3], magnitude=20 * torch.ones(2, 3))


@both
@pytest.mark.parametrize("width", [2 * CHUNK + 5, LONG])
@pytest.mark.parametrize("value", [-1e10, -1e20, -1e30])
def test_whole_chunks_that_are_far_below_weigh_nothing(op: Any, value: float, width: int) -> None:
    """What was masked with a large number instead of -inf leaves the rest the bits it has beside -inf."""
    x, d_out = normals(2, width), normals(2, width, seed=1)
    x[:, CHUNK:] = -torch.inf
    d_out[:, CHUNK:] = 0
    out, d_x = both_ways(op, x, d_out)
    far, d_far = both_ways(op, torch.where(x.isinf(), value, x), d_out)
    assert [bits(far[:, :CHUNK]), bits(d_far[:, :CHUNK])] == [bits(out[:, :CHUNK]), bits(d_x[:, :CHUNK])]
    assert_near(far[:, CHUNK:], op.oracle(torch.where(x.isinf(), value, x))[:, CHUNK:])
    assert not d_far[:, CHUNK:].any()


@both
@pytest.mark.parametrize("width", [24, LONG])
def test_a_row_of_nothing_is_nan(op: Any, width: int) -> None:
    """A row of nothing but -inf has no distribution: it is NaN, as torch's."""
    assert op(torch.full((2, width), -torch.inf)).isnan().all()


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 24, 5000, CHUNK, 3 * CHUNK // 2, LONG])
def test_their_bits_are_the_contract_s(width: int) -> None:
    """Forward and backward compute, step by step in float32, the formulas that stand in the kernels' files."""
    tensors = normals(2, width) * 4, normals(2, width, seed=1)
    x, g = (tensor.numpy() for tensor in tensors)
    temperature, inverse, one, ln_2 = 0.7, np.float32(1 / 0.7), np.float32(1), np.float32(np.log(2))
    top, total, b = known_of(x, temperature)
    p = np.exp2(b) * (one / total)[:, None]
    for op, out, terms in (
        (ops.softmax, p, g * p),
        (ops.log_softmax, fma(b, ln_2, np.broadcast_to(-np.log(total)[:, None], b.shape)), g),
    ):
        c = over_chunks(chunk_sum(chunks_of(terms, 0.0)), 0.0, pair_sum)[:, None]
        d_x = (p * (g - c)) * inverse if op is ops.softmax else (g - p * c) * inverse
        assert [bits(t) for t in both_ways(op, *tensors, temperature)] == [out.tobytes(), d_x.tobytes()], op
    kernels = {"softmax": SOFTMAX, "log_softmax": LOG_SOFTMAX}
    for made in kernels.values():
        _, *known = forward(made, tensors[0], temperature)
        assert [bits(t) for t in known] == [top.tobytes(), total.tobytes()]


@both
@company
def test_a_row_keeps_its_bits(op: Any, company: str) -> None:
    """A row's bits depend on nothing but the row, forward and backward."""
    x, d_out = normals(5, 24), normals(5, 24, seed=1)
    assert_rows_keep_their_bits(lambda x, d: both_ways(op, x, d, 0.7), company, x, d_out)


@both
@pytest.mark.parametrize("company", ["alone", "beside NaN", "unaligned"])
def test_a_long_row_keeps_its_bits(op: Any, company: str) -> None:
    """The same holds for rows that are cut into chunks and read twice."""
    x, d_out = normals(5, LONG), normals(5, LONG, seed=1)
    assert_rows_keep_their_bits(lambda x, d: both_ways(op, x, d, 0.7), company, x, d_out)


@both
def test_few_rows_have_the_bits_of_many(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows that are cut among programs have the bits of those that a program reads whole."""
    x, out = (normals(2, LONG, dtype=torch.bfloat16) for _ in range(2))
    few = forward(op.ours, x, 0.7)
    monkeypatch.setattr(importlib.import_module("kalign_core.ops.softmax"), "FEW_ROWS", 0)
    with scripted().active():
        assert [call.kernel for call in recorded(op, x)] == [op.ours.long]
    many = forward(op.ours, x, 0.7, out)
    assert [bits(t) for t in many] == [bits(t) for t in few]


@both
def test_every_kernel_is_reached(op: Any) -> None:
    """Short rows, few long ones and many long ones run all kernels that the operator declares, in its order."""
    reached = []
    for rows, width in ((3, 40), (2, LONG), (FEW_ROWS + 1, LONG)):
        x = torch.zeros(1, width).expand(rows, width).requires_grad_()
        with scripted().active():
            reached += [call.kernel for call in recorded(op, x)]
    assert tuple(dict.fromkeys(reached)) == op.kernels


@both
@pytest.mark.parametrize("width", [24, LONG])
def test_masked_elements_behind_a_row_change_nothing(op: Any, width: int) -> None:
    """A vocabulary padded with -inf within its last chunk has the bits of the one that is not."""
    x = normals(2, width)
    padded = torch.cat([x, torch.full((2, 5), -torch.inf)], 1)
    assert bits(op(padded)[:, :width]) == bits(op(x))


@both
def test_the_gate_passes_its_references(op: Any) -> None:
    """The kernels of short rows keep what they promise: outputs written, rows for themselves, the same bytes again."""
    with Session(configuration=Settings()).active():
        verdicts = kalign.verify(op, leaf(3, 40))
    assert {v.kernel: v.verdict.state for v in verdicts} == dict.fromkeys(
        (op.name, f"{op.name}_backward"), "not refuted"
    )


@both
@pytest.mark.parametrize("width", [40, 9000])
def test_what_is_read_anew_has_the_bits_of_what_was_held(op: Any, width: int) -> None:
    """Going back, the gate does not refute the other way to the second pass over a row, whichever the reference is."""
    with scripted().active():
        (call,) = [c for c in recorded(op, leaf(3, width)) if c.kernel is op.kernels[1]]
    home = call.kernel.reference_config(call.problem)
    assert bool(home.REREAD) is (width > CHUNK and op is ops.softmax)
    bench = Bench(CpuPlatform(), call.kernel, call.problem, -1)
    gate = open_gate(hal.plugins, bench, bench.bound(home))
    gate.check_reference()
    (verdict,) = gate.examine([bench.bound(home.replace(REREAD=1 - home.REREAD))])
    assert str(verdict.refutation or "") == ""
    assert verdict.cases > 10


# --- shapes -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (2, 1, 3, 8)])
def test_leading_dimensions_are_rows(op: Any, shape: tuple[int, ...]) -> None:
    """Any number of leading dimensions is taken, and result and gradient have the same."""
    x, d_out = normals(*shape), normals(*shape, seed=1)
    got = both_ways(op, x, d_out)
    flat = both_ways(op, x.reshape(-1, shape[-1]), d_out.reshape(-1, shape[-1]))
    assert [t.shape for t in got] == [x.shape, x.shape]
    assert [bits(t) for t in got] == [bits(t) for t in flat]


@both
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (2, 0, 8), (0, LONG)])
def test_empty_tensors_give_empty_ones(op: Any, shape: tuple[int, ...]) -> None:
    """No rows or no columns give an empty result and an empty gradient."""
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    out = op(x)
    out.sum().backward()
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_which_rows_are_cut_is_no_matter_of_the_device() -> None:
    """Rows are cut where they are long and few, by numbers that stand in the code."""
    assert (LONGEST_HELD, FEW_ROWS) == (32768, 128)


# --- gradients and out= ---------------------------------------------------------------------------------------------


@both
def test_an_expanded_upstream_gradient_is_taken(op: Any) -> None:
    """The gradient of a sum comes with strides of zero, and counts as the ones it stands for."""
    x = leaf(3, 24)
    op(x).sum().backward()
    assert bits(x.grad) == bits(both_ways(op, x, torch.ones(3, 24))[1])  # type: ignore[arg-type]


@both
def test_a_second_derivative_is_an_error(op: Any) -> None:
    """Going back through a gradient raises."""
    x = leaf(2, 8)
    (d_x,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    with pytest.raises(KalignError, match="softmax cannot be differentiated twice"):
        d_x.square().sum().backward()


@both
@pytest.mark.parametrize("width", [24, LONG])
def test_out_takes_the_result_and_may_be_x(op: Any, width: int) -> None:
    """``out=`` is written and given back; computing in place gives the same bits."""
    x = normals(2, width)
    expected = bits(op(x))
    for _ in range(2):  # a first call and one like it
        out = torch.empty_like(x)
        assert op(x, out=out) is out
        assert bits(out) == expected
    assert bits(op(x, out=x)) == expected


def test_out_and_gradients_exclude_each_other() -> None:
    """A gradient that would be lost in silence is an error that says what to leave away."""
    with pytest.raises(BadArgument, match=r"torch.no_grad\(\)"):
        ops.softmax(leaf(2, 8), out=torch.empty(2, 8))


@both
def test_backward_needs_no_autograd(op: Any) -> None:
    """The module's functions give what autograd gives."""
    x, d_out = normals(3, 24), normals(3, 24, seed=1)
    out, top, total = forward(op.ours, x, 0.7)
    got = out, backward(op.ours, x, top, total, d_out, 0.7)
    assert [bits(t) for t in got] == [bits(t) for t in both_ways(op, x, d_out, 0.7)]


# --- what they refuse -----------------------------------------------------------------------------------------------

X = normals(3, 24)


@both
@pytest.mark.parametrize(
    ("x", "options", "says"),
    [
        (X.double(), {}, r"x is torch.float64\n.*x.to\(torch.bfloat16\)"),
        (X[0, 0], {}, r"x is a scalar"),
        (X, {"temperature": 0}, r"temperature is 0\n.*a number from 1.17549e-38"),
        (X, {"temperature": 1e-40}, "temperature is 1e-40"),
        (X, {"temperature": 10**400}, "temperature is 10000"),
        (X, {"temperature": torch.tensor(1.0)}, r"temperature is a Tensor\n.*\n.*temperature=1.0"),
        (X, {"temperature": -1.0}, "temperature is -1.0"),
        (X, {"temperature": torch.inf}, "temperature is inf"),
        (X, {"temperature": torch.nan}, "temperature is nan"),
        (X, {"out": torch.empty(1, 24).expand(3, 24)}, "rows of out share memory"),
        (X, {"temperature": "hot"}, "temperature is 'hot'"),
        (X, {"out": torch.empty(3, 8)}, r"out is \(3, 8\)"),
        ([1.0], {}, "x is list, not a tensor"),
    ],
)
def test_what_they_cannot_take_is_refused(op: Any, x: Any, options: dict[str, Any], says: str) -> None:
    """Wrong kinds, dtypes, temperatures and outputs name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s){op.name}: .*{says}"):
        op(x, **options)


def test_they_are_operators() -> None:
    """Both are known by their names."""
    assert softmax_operator is ops.named("softmax")
    assert ops.log_softmax is ops.named("log_softmax")
