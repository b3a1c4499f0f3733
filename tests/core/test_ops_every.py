"""What holds for every shared operator: recalled calls, calls inside ``torch.compile``, gradients in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kalign_core as kalign
from kalign_core import hal
from kalign_core.errors import BadArgument
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.tuner.targets import calls_of, session_for, target_named
from tests.core.scripted import bits, normals, ops
from tests.there_and_back import there_and_back

OPERATORS = ops.operators()
by_name = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
HOST = torch.device("cpu")
TARGET = target_named(hal.plugins, "cuda:sm_90")
REFERENCES = ["rope", "ratio_kl", "grpo_loss", "group_advantage", "embedding", "pack", "selected_logprob"]


def given(op: Any, seed: int = 0) -> tuple[Any, ...]:
    return tuple(op.inputs(op.small_shapes[0], op.dtypes[0], seed, HOST))


def tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def both_ways(call: Any, args: tuple[Any, ...]) -> list[bytes]:
    """The bytes of every result of a call and of every gradient, for upstream gradients of ones and more."""
    args = tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)
    results = tensors(call(*args))
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    upstream = [torch.linspace(1, 2, r.numel()).view(r.shape).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, wanted, upstream) if wanted else ()
    return [bits(t) for t in (*results, *gradients)]


@by_name
def test_a_recalled_call_has_the_bits_of_a_first_one(op: Any) -> None:
    """A call like one before gives what it would have given as the first of its session, into memory of its own."""
    first, second = given(op), given(op, seed=10)
    with Session(configuration=Settings()).active():
        expected = both_ways(op, second)
    with Session(configuration=Settings()).active() as session:
        both_ways(op, first)
        both_ways(op, first)
        assert both_ways(op, second) == expected
        known = len(session.calls)
        both_ways(op, second)
        assert len(session.calls) == known
        one, two = (tensors(op(*second)) for _ in range(2))
        assert len({t.data_ptr() for t in (*one, *two)}) == 2 * len(one)


X = normals(4, 40)
HEADS = X.view(4, 2, 20)
IDS = torch.arange(4)
ANGLES = torch.zeros(4, 10)
REFUSED: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "rms_norm": (lambda eps: ops.rms_norm(X, X[0], eps), 1.0, True),
    "rms_norm residual": (lambda eps: ops.rms_norm(X, X[0], eps, residual=X), 1.0, torch.tensor(1.0)),
    "softmax": (lambda temperature: ops.softmax(X, temperature), 1.0, True),
    "softmax(out=)": (lambda temperature: ops.softmax(X, temperature, out=torch.empty_like(X)), 1.0, True),
    "rope": (lambda interleaved: ops.rope(HEADS, ANGLES, ANGLES, interleaved), True, 1),
    "rope, a tensor": (lambda interleaved: ops.rope(HEADS, ANGLES, ANGLES, interleaved), True, torch.ones(())),
    "group_advantage": (lambda size: ops.group_advantage(X[0], size), 1, True),
    "group_advantage, normalise": (lambda normalise: ops.group_advantage(X, 8, normalise), True, 1),
    "selected_logprob": (lambda index: ops.selected_logprob(X, IDS, 1.0, index), 1, True),
    "selected_logprob, entropy": (lambda entropy: ops.selected_logprob(X, IDS, 1.0, -100, entropy), True, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_however_well_the_call_is_known(session: Session, name: str) -> None:
    """A value that equals one that was taken, and is no such value itself, is told from it in every later call."""
    call, taken, refused = REFUSED[name]
    for _ in range(4):
        call(taken)
        with pytest.raises(BadArgument):
            call(refused)
    for _ in range(4):
        call(taken)
    with pytest.raises(BadArgument):
        call(refused)


@by_name
def test_arguments_are_never_written(op: Any) -> None:
    """A call and its gradient leave every argument as it was."""
    args = given(op)
    before = [bits(a) for a in args if isinstance(a, torch.Tensor)]
    both_ways(op, args)
    assert [bits(a) for a in args if isinstance(a, torch.Tensor)] == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about the tensors it looks at
@by_name
def test_a_compiled_call_is_one_node_with_the_same_bits(op: Any) -> None:
    """Inside ``torch.compile`` an operator breaks no graph, and gives the bits it gives outside, gradients included."""
    args = given(op)
    try:
        compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
        assert both_ways(compiled, args) == both_ways(op, args)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize(
    "name", ["rope", "ratio_kl", "grpo_loss", "group_advantage", "embedding", "pack", "selected_logprob"]
)
def test_the_gate_passes_every_reference(name: str) -> None:
    """Each kernel's reference keeps what it promises: outputs written, rows for themselves, the same bytes again."""
    op = ops.named(name)
    with Session(configuration=Settings()).active():
        verdicts = kalign.verify(op, *given(op))
    assert {v.kernel for v in verdicts} == {kernel.name for kernel in op.kernels}
    assert {v.kernel: str(v.verdict.refutation) for v in verdicts if v.verdict.state != "not refuted"} == {}


# --- what no call may depend on, and what none may do ---------------------------------------------------------------


@by_name
def test_a_phase_changes_no_bit(op: Any) -> None:
    """Training, prefill and decode compute the same bytes, there and back."""
    made = []
    for phase in ("train", "prefill", "decode"):
        with Session(configuration=Settings()).active(), kalign.using(phase=phase):
            made.append(both_ways(op, given(op)))
    assert made[0] == made[1] == made[2]


@by_name
def test_references_depend_on_no_number_of_rows(op: Any) -> None:
    """What is launched when nothing is tuned is the same for one row and for a million, in every phase."""
    rows = {"T": (1, 16, 2**20), "B": (1, 16, 2**20), "M": (1, 16, 2**20)}
    found = set()
    for i, phase in ((0, "train"), (1, "decode"), (2, "prefill"), (2, "train")):
        sizes = {dim: rows[dim][i] if dim in rows else 64 for dim in op.dims}
        here = session_for(TARGET, hal.plugins)
        with here.active(), kalign.using(phase=phase):
            calls = calls_of(here, op, sizes, op.dtypes[0])
        found.add(tuple((c.kernel.name, str(c.kernel.reference_config(c.problem))) for c in calls))
    assert len(found) == 1


class NoWaiting(TorchDispatchMode):
    """Raises where torch would have to wait for a device: to read a number, or to learn the size of a result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"):
            raise AssertionError(f"{name} would stop the host")
        return func(*args, **(kwargs or {}))


@by_name
def test_the_host_waits_for_nothing(op: Any) -> None:
    """No call or gradient asks a tensor what it holds: streams are not waited for, and graphs can be captured."""
    args = given(op)
    with Session(configuration=Settings()).active(), NoWaiting():
        made = there_and_back(op, args)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    assert len(made) == len(tensors(op(*args))) + len(wanted)


def test_a_call_that_asks_would_be_noticed() -> None:
    """Reading one number of a tensor is what the test above refuses."""
    with NoWaiting(), pytest.raises(AssertionError, match="_local_scalar_dense would stop the host"):
        torch.ones(1).item()


LONG_ROWS: dict[str, tuple[Any, ...]] = {
    "swiglu": (normals(1, 262143), normals(1, 262143, seed=1)),
    "rms_norm": (normals(1, 262143), normals(262143, seed=1)),
    "softmax": (normals(1, 262143),),
    "log_softmax": (normals(1, 262143),),
    "selected_logprob": (normals(1, 262143), torch.tensor([262142])),
    "ratio_kl": tuple(normals(1, 262143, seed=i) / 8 for i in range(3)),
    "grpo_loss": (*(normals(1, 262143, seed=i) / 8 for i in range(3)), torch.ones(1)),
    "group_advantage": (normals(1, 4095), 4095),
    "embedding": (torch.tensor([1]), normals(2, 262143)),
    "pack": (normals(1, 1, 262143), torch.tensor([0, 1]), 1),
    "unpack": (normals(1, 262143), torch.tensor([0, 1]), 1),
}


@pytest.mark.parametrize("name", LONG_ROWS)
def test_the_longest_rows_are_no_power_of_two(name: str) -> None:
    """Rows of 262,143 elements, of as many as are held where that is less, are computed to the end."""
    op = ops.named(name)
    got, exact = op(*LONG_ROWS[name]), op.oracle(*LONG_ROWS[name])
    whole = torch.stack(got) if isinstance(got, tuple) else got
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-5)
