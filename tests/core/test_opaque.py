"""Operators inside ``torch.compile``, ``torch.export`` and the rest of torch: one opaque node, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kalign_core as kalign
from kalign_core.errors import BadArgument, NoSecondDerivative
from kalign_core.ops.opaque import opaque
from tests.core.scripted import bits, leaf, normals, ops, scripted

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the compiler's own, about the tensors it looks at
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """What one test compiled is no help to another."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def block(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A few operators with torch's between them."""
    return ops.rms_norm(ops.swiglu(x, y) + x, w)


def product(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product with a bias."""
    return ops.matmul(x.half(), y.half().t(), w.half()[: y.shape[0]])


def operands(rows: int = 2, grad: bool = True) -> tuple[torch.Tensor, ...]:
    return tuple(t.requires_grad_(grad) for t in (normals(rows, 8), normals(rows, 8, seed=1), normals(8)))


def there_and_back(call: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[bytes]:
    """The bytes of a result and of every gradient."""
    result = call(*args)
    return [bits(t) for t in (result, *torch.autograd.grad(result, args, torch.ones_like(result)))]


# --- torch.compile ------------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("call", [block, product])
def test_a_compiled_call_has_the_eager_bits(backend: str, call: Callable[..., torch.Tensor]) -> None:
    """In one whole graph, forward and backward give the bytes of the eager call."""
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for rows in (2, 3):
        args = operands(rows)
        assert there_and_back(compiled, *args) == there_and_back(call, *args)


@backends
def test_one_graph_serves_every_number_of_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dynamic sizes nothing is compiled again, and each real size asks for the launch that serves it."""
    made, asked = scripted(), []
    resolve = made.resolve
    monkeypatch.setattr(made, "resolve", lambda site, call, args: asked.append(args[3]) or resolve(site, call, args))
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(ops.swiglu, fullgraph=True, dynamic=True, backend=counter)
    x, y = (normals(64, 8, seed=seed) for seed in range(2))
    expected = bits(ops.swiglu(x, y))
    with made.active(), kalign.using(mode="off"):
        for rows in (3, 5, 64, 5):
            result = compiled(x[:rows], y[:rows])
            assert bits(result) == expected[: rows * 8 * 4]
    assert counter.frame_count == 1
    assert asked == [3, 5, 64]


@backends
def test_mode_and_phase_are_those_of_the_run(backend: str) -> None:
    """Each node asks for the launch of the phase it runs in, whatever the graph was compiled in."""
    made = scripted()
    compiled = torch.compile(ops.swiglu, fullgraph=True, backend=backend)
    x = leaf(2, 8)
    with made.active():
        for phase in ("train", "decode"):
            with kalign.using(mode="off", phase=phase):
                result = compiled(x, x)
        with kalign.using(mode="off", phase="prefill"):
            result.sum().backward()
    phases = [{key[0].phase for key in made.site(kernel).memo} for kernel in ops.swiglu.kernels]
    assert phases == [{"train", "decode"}, {"prefill"}]


@backends
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_compiled_without_gradients(backend: str, grad: Callable[[], Any]) -> None:
    """Under ``no_grad`` and in inference mode the bytes are the same and nothing requires a gradient."""
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    args = operands()
    with grad():
        result = compiled(*args)
    assert not result.requires_grad
    assert bits(result) == bits(block(*args))


@backends
@pytest.mark.parametrize("in_place", [False, True])
def test_out_under_compile(backend: str, in_place: bool) -> None:
    """``out=`` is written, given back and counted as a write, also where it is the input."""
    compiled = torch.compile(lambda x, y, out: ops.swiglu(x, y, out=out), fullgraph=True, backend=backend)
    x, y = normals(2, 8), normals(2, 8, seed=1)
    expected, out = bits(ops.swiglu(x, y)), x if in_place else torch.empty(2, 8)
    before = out._version
    assert compiled(x, y, out) is out
    assert bits(out) == expected
    assert out._version > before


@backends
@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: ops.swiglu(x, x, out=out),
        lambda x, out: ops.rms_norm(x, x[0], out=out),
        lambda x, out: ops.matmul(x.half(), x.half().t(), out=out.half()[:, :2]),
    ],
)
def test_out_and_gradients_exclude_each_other_under_compile(backend: str, call: Callable[..., Any]) -> None:
    """A gradient that would be lost is an error when the graph is made; without gradients it is none."""
    with pytest.raises(Exception, match="out= with tensors that require gradients"):
        torch.compile(call, fullgraph=True, backend=backend)(leaf(2, 8), torch.empty(2, 8))
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(lambda x, out: ops.swiglu(x, x, out=out), fullgraph=True, backend=backend)(
            leaf(2, 8), torch.empty(2, 8)
        )


@pytest.mark.parametrize(
    ("backend", "says"), [("eager", "kalign::swiglu_backward has no derivative"), ("aot_eager", "double backward")]
)
def test_a_second_derivative_under_compile_is_an_error(backend: str, says: str) -> None:
    """Going back through a compiled gradient raises, by kalign or by the compiler."""
    compiled = torch.compile(ops.swiglu, fullgraph=True, backend=backend)
    x = leaf(2, 8)
    (grad,) = torch.autograd.grad(compiled(x, normals(2, 8)).square().sum(), x, create_graph=True)
    with pytest.raises((NoSecondDerivative, RuntimeError), match=says):
        grad.square().sum().backward()


@backends
def test_wrong_arguments_under_compile(backend: str) -> None:
    """What an operator cannot take is its own error when the graph runs."""
    compiled = torch.compile(ops.swiglu, fullgraph=True, backend=backend)
    with pytest.raises(BadArgument, match=r"swiglu: up is .* torch\.float16, gate is .* torch\.float32"):
        compiled(normals(2, 8), normals(2, 8).half())


def test_an_overlapping_out_under_compile() -> None:
    """Shared memory is refused where torch calls operators as they are, and kept apart where it takes writes apart."""

    def call(rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(rows[:2], y, out=rows[1:])

    rows, y = normals(3, 8), normals(2, 8, seed=1)
    expected = bits(ops.swiglu(rows[:2], y))
    with pytest.raises(BadArgument, match="out shares memory with gate"):
        torch.compile(call, fullgraph=True, backend="eager")(rows.clone(), y)
    torch.compiler.reset()
    assert bits(torch.compile(call, fullgraph=True, backend="aot_eager")(rows, y)) == expected


def test_vmap_under_compile() -> None:
    """Inside a compiled function torch maps an operator over samples by itself."""
    x, y = normals(3, 2, 8), normals(3, 2, 8, seed=1)
    compiled = torch.compile(torch.func.vmap(lambda a, b: ops.swiglu(a, b)), backend="eager")
    assert bits(compiled(x, y)) == bits(ops.swiglu(x, y))


@backends
def test_an_operator_that_is_not_opaque_breaks_the_graph(backend: str) -> None:
    """An operator of one's own that only launches runs between two graphs, with its bits."""
    from tests.core.scripted import scale

    compiled = torch.compile(lambda x: scale(x + 1) * 3, backend=backend)
    x = normals(2, 8)
    for _ in range(2):
        assert bits(compiled(x)) == bits((x + 1) * 2 * 3)


# --- torch.export -------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """``block`` with a weight of its own, or ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(normals(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return block(x, y, self.weight)


class Into(torch.nn.Module):
    """A call with ``out=``."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ops.swiglu(x, y, out=torch.empty_like(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("module", [Block, Into])
def test_an_exported_module_has_the_same_bits(strict: bool, module: type[torch.nn.Module]) -> None:
    """Both ways of exporting keep operators as opaque nodes, for any number of rows."""
    made, rows = module(), torch.export.Dim("rows", min=2, max=64)
    x, y, _ = operands(4, grad=False)
    exported = torch.export.export(made, (x, y), strict=strict, dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    assert "kalign.swiglu" in str(exported.graph)
    for count in (4, 3):
        assert bits(exported.module()(x[:count], y[:count])) == bits(made(x[:count], y[:count]))


def test_an_operator_that_is_not_opaque_cannot_be_exported() -> None:
    """A launch that no node stands for is an error, not a graph without it."""
    from tests.core.scripted import Scale

    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scale()(x)

    with pytest.raises(RuntimeError, match="opaque custom op"):
        torch.export.export(Plain(), (normals(2, 8),), strict=False)


# --- derivatives, checkpoints, autocast, transforms ------------------------------------------------------------------


def halves(*shape: int) -> torch.Tensor:
    return leaf(*shape, dtype=torch.float16)


def test_without_a_derivative_going_back_is_an_error() -> None:
    """An operator registered without a derivative says so when somebody asks for it."""
    made = opaque("test_plain(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x))
    with pytest.raises(NoSecondDerivative, match="kalign::test_plain has no derivative"):
        made(leaf(2)).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_the_same_bits(reentrant: bool) -> None:
    """Both kinds of activation checkpoint give the gradients of the plain call."""
    gradients = []
    for call in (block, lambda *args: checkpoint(block, *args, use_reentrant=reentrant)):
        args = operands()
        call(*args).sum().backward()
        gradients.append([bits(arg.grad) for arg in args])  # type: ignore[arg-type]  # there after backward
    assert gradients[0] == gradients[1]


@backends
def test_checkpoints_under_compile(backend: str) -> None:
    """A checkpoint inside a compiled function gives the same gradients too."""
    compiled = torch.compile(
        lambda *args: checkpoint(block, *args, use_reentrant=False), fullgraph=True, backend=backend
    )
    args = operands()
    assert there_and_back(compiled, *args) == there_and_back(block, *args)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_autocast_does_not_touch_operators(backend: str | None) -> None:
    """An operator computes in its inputs' dtype whatever autocast says, with the same bytes forward and backward."""

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.matmul(a, b)

    compiled = torch.compile(call, fullgraph=True, backend=backend) if backend else call
    args = halves(2, 8), halves(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        result = compiled(*args)
        assert there_and_back(compiled, *args) == there_and_back(call, *args)
        assert ops.swiglu(normals(2, 8), normals(2, 8)).dtype == torch.float32
        with pytest.raises(BadArgument, match=r"(?s)a is torch.float32.*a.to\(torch.bfloat16\)"):
            ops.matmul(normals(2, 8), normals(8, 4))
    assert (result.dtype, bits(result)) == (torch.float16, bits(call(*args)))


@pytest.mark.parametrize(
    "transform",
    [
        lambda call, x: torch.func.grad(lambda t: call(t, x).sum())(x),
        lambda call, x: torch.func.vmap(call)(x, x),
        lambda call, x: torch.func.jvp(call, (x, x), (x, x)),
        lambda call, x: torch.func.jacrev(call)(x, x),
        lambda call, x: torch.jit.trace(call, (x, x)),
    ],
    ids=["grad", "vmap", "jvp", "jacrev", "trace"],
)
@pytest.mark.parametrize(
    "op", [lambda a, b: ops.swiglu(a, b), lambda a, b: ops.rms_norm(a, b[0]), lambda a, b: ops.matmul(a, b.t())]
)
def test_transforms_say_what_to_call_instead(transform: Callable[..., Any], op: Callable[..., Any]) -> None:
    """``torch.func`` and ``torch.jit.trace`` are refused with what happened and what does the same."""
    with pytest.raises(BadArgument, match=r"(?s)(is inside torch.func|is being traced).*try: call torch\."):
        transform(op, normals(2, 8))
