"""What operators share: names, sizes, dtypes, the checks of their arguments, and where to find them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kalign_core import context
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_dweight_fold_kernel, rms_norm_kernel
from kalign_core.ops import base
from kalign_core.ops.base import check_number, check_out, output_like, random_tensor, rows_of
from tests.core.scripted import Scale, bits, normals, ops, problem, scale, scale_kernel, scale_problem, scripted

OPERATORS = ops.operators()
by_name = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)


def tensors(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments; further ones are numbers."""
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


# --- names --------------------------------------------------------------------------------------------------------


def test_the_shared_operators() -> None:
    """The operators that training and serving share are known, by their names and as attributes."""
    names = [op.name for op in OPERATORS]
    assert names[:2] == ["swiglu", "rms_norm"]
    assert {"matmul", "rope", "ratio_kl", "grpo_loss", "group_advantage", "embedding", "pack", "unpack"} <= {*names}
    assert {"softmax", "log_softmax", "selected_logprob"} <= {*names}
    assert all(ops.named(op.name) is op is getattr(ops, op.name) for op in OPERATORS)
    assert repr(ops.matmul) == "<operator matmul>"


@pytest.mark.parametrize(("name", "says"), [("rmsnorm", "rms_norm"), ("gelu", "swiglu, rms_norm, ")])
def test_an_unknown_operator_says_which_are_known(name: str, says: str) -> None:
    """A name that is no operator's lists those that are and the command that shows them."""
    with pytest.raises(UnknownName, match=f"(?s)unknown operator {name!r}.*{says}") as caught:
        ops.named(name)
    assert caught.value.fix.endswith("kalign ops lists them")


def test_an_operator_of_one_s_own_is_registered(registry: None) -> None:
    """A registered operator is known by its name, last, and registering its class again replaces it."""
    assert ops.register(scale) is scale
    assert (ops.named("scale"), ops.operators()[-1]) == (scale, scale)
    again = Scale()
    ops.register(again)
    assert ops.named("scale") is again


@pytest.mark.parametrize("what", [Scale, scale_kernel, None])
def test_only_operators_are_registered(registry: None, what: Any) -> None:
    """A class, a kernel or nothing is refused with an example."""
    with pytest.raises(BadArgument, match="is no operator") as caught:
        ops.register(what)
    assert "ops.register(Scale())" in caught.value.fix


def test_a_name_is_not_taken_twice(registry: None) -> None:
    """Another class under the name of a known operator is refused."""

    class Mine(Scale):
        name = "swiglu"

    with pytest.raises(BadArgument, match="'swiglu' is taken by SwiGLU"):
        ops.register(Mine())


def test_importing_operators_touches_no_device(child: Any) -> None:
    """Importing, declaring and asking what would run initialises no device, and leaves the choice of devices open."""
    code = """
import torch

def touched(*args):
    raise SystemExit("a device was initialised, or looked for, which settles for good which ones are visible")

for module, names in (
    (torch.cuda, ("_lazy_init", "device_count", "is_available", "get_device_properties", "current_device")),
    (torch._C, ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getDevice")),
):
    for name in names:
        setattr(module, name, touched)
import kalign_core as kalign
from kalign_core import ops
from tests.core.scripted import normals, ops, scale, scripted
with scripted().active():
    kalign.explain(ops.rms_norm, normals(2, 8), normals(8))
    scale(normals(2, 8))
print(torch.cuda.is_initialized())
"""
    done = child(code, TRITON_INTERPRET="1")
    assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


# --- sizes and dtypes ---------------------------------------------------------------------------------------------


@by_name
def test_default_sizes_are_complete(op: Any) -> None:
    """The sizes that are tuned by default give every dimension, on a GPU and under the interpreter."""
    for sizes in (*op.shapes, *op.small_shapes):
        assert op.sizes(sizes) == sizes
        assert tuple(sizes) == op.dims


@by_name
def test_inputs_are_arguments(op: Any) -> None:
    """The inputs an operator makes for a size and a dtype are arguments of that size and dtype, which it takes."""
    sizes = dict.fromkeys(op.dims, 8)
    for dtype in op.dtypes:
        args = op.inputs(sizes, dtype, 0, torch.device("cpu"))
        assert {arg.dtype for arg in tensors(args) if arg.is_floating_point()} == {base.TORCH_BY_SHORT[dtype]}
        result, exact = op(*args), op.oracle(*args)
        assert (torch.stack(result) if isinstance(result, tuple) else result).shape == exact.shape
        assert exact.dtype == torch.float64


@by_name
def test_inputs_follow_their_seed(op: Any) -> None:
    """The same seed gives the same bytes, another seed others, and no two arguments are alike."""
    sizes = dict.fromkeys(op.dims, 8)
    one, same, other = (tensors(op.inputs(sizes, "bf16", seed, torch.device("cpu"))) for seed in (0, 0, 2))
    assert [bits(t) for t in one] == [bits(t) for t in same]
    assert all(bits(a) != bits(b) for a, b in zip(one, other, strict=True))
    assert len({bits(t) for t in one}) == len(one)


@by_name
def test_the_forms_of_an_operator_run_its_kernels(op: Any) -> None:
    """Going through the forms of an operator runs every kernel that it declares, but those for long rows."""
    from kalign_core.api import recorded_forms

    with scripted().active():
        calls = recorded_forms(op, dict.fromkeys(op.dims, 8), "bf16", torch.device("cpu"))
    short = {"softmax": 2, "log_softmax": 2, "rms_norm": 4}.get(op.name)
    assert list(dict.fromkeys(call.kernel for call in calls)) == list(op.kernels[:short])


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"T": 8, "M": 8}, UnknownName, "unknown dimension of rms_norm 'M'"),
        ({"T": 8}, BadArgument, "rms_norm needs H as well"),
        ({}, BadArgument, "rms_norm needs T, H as well"),
        ({"T": 0, "H": 8}, BadArgument, "T=0 is no size to tune for"),
        ({"T": 8, "H": -1}, BadArgument, "H=-1 is no size to tune for"),
        ({"T": 8, "H": "64"}, BadArgument, "H='64' is no size to tune for"),
        ({"T": True, "H": 8}, BadArgument, "T=True is no size to tune for"),
    ],
)
def test_wrong_sizes_say_what_to_type(given: dict[str, Any], error: type[Exception], says: str) -> None:
    """A dimension that is unknown, missing or no size is an error with an option that would do."""
    with pytest.raises(error, match=says) as caught:
        ops.rms_norm.sizes(given)
    assert caught.value.fix == "--shape T=4096,H=4096"  # type: ignore[attr-defined]


def test_sizes_come_in_the_operator_s_order() -> None:
    """However they were given, sizes come in the order of the dimensions."""
    assert list(ops.matmul.sizes({"K": 3, "M": 1, "N": 2}).items()) == [("M", 1), ("N", 2), ("K", 3)]


@pytest.mark.parametrize(("name", "short"), [("bf16", "bf16"), ("bfloat16", "bf16"), ("float32", "fp32")])
def test_dtypes_have_two_names(name: str, short: str) -> None:
    """torch's names and the short ones are understood."""
    assert ops.swiglu.dtype_named(name) == short


@pytest.mark.parametrize("name", ["fp64", "float64", "int8", "half"])
def test_a_dtype_that_it_does_not_take_is_refused(name: str) -> None:
    """A dtype the operator is not made for lists those it is."""
    with pytest.raises(UnknownName, match=r"(?s)dtype of matmul.*bf16, fp16") as caught:
        ops.matmul.dtype_named(name)
    assert caught.value.fix.endswith("--dtype bf16")


# --- the command that tunes ---------------------------------------------------------------------------------------


def test_the_command_names_operator_size_dtype_and_phase() -> None:
    """What to type to tune a problem is complete where the kernel's sizes are its operator's."""
    made = problem(
        rms_norm_kernel, {"T": 3, "H": 8}, phase="decode", x=("fp16", (8, 1)), weight="fp16", out=("fp16", (8, 1)),
        rstd="fp32", x_stride=8, out_stride=8, eps=1e-6,
    )  # fmt: skip
    assert ops.tune_command(rms_norm_kernel, made) == (
        "kalign tune rms_norm --shape T=3,H=8 --dtype fp16 --phase decode"
    )


def test_the_command_leaves_sizes_away_that_are_not_the_operator_s() -> None:
    """A kernel inside an operator has sizes that nobody can type."""
    made = problem(rms_norm_dweight_fold_kernel, {"B": 2, "H": 8}, partial=("fp32", (8, 1)), d_weight="bf16")
    command = ops.tune_command(rms_norm_dweight_fold_kernel, made)
    assert command.startswith("kalign tune rms_norm --dtype ")
    assert "--shape" not in command


def test_an_unregistered_operator_is_tuned_from_python() -> None:
    """For a kernel of no registered operator the call is named instead."""
    assert ops.tune_command(scale_kernel, scale_problem()) == "kalign.tune(operator, *args) in phase train"


# --- argument checks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [normals(3, 8), normals(3, 16)[:, :8], normals(2, 3, 8), normals(8), normals(4, 2, 8)[::2], normals(5, 3, 1)],
)
def test_rows_are_views_where_they_can_be(tensor: torch.Tensor) -> None:
    """A tensor whose rows are dense and evenly spaced is not copied."""
    rows = rows_of("op", "x", tensor)
    assert rows.dim() == 2
    assert rows.shape[1] == tensor.shape[-1]
    if tensor.is_contiguous() or tensor.dim() == 2:
        assert rows.data_ptr() == tensor.data_ptr()
    assert torch.equal(rows, tensor.reshape(-1, tensor.shape[-1]))


@pytest.mark.parametrize("tensor", [normals(8, 3).t(), normals(3, 16)[:, ::2], normals(3, 1).expand(3, 8)])
def test_rows_that_are_not_dense_are_copied(tensor: torch.Tensor) -> None:
    """A row with gaps, or one element for all, becomes a dense one."""
    rows = rows_of("op", "x", tensor)
    assert (rows.stride(1), torch.equal(rows, tensor)) == (1, True)


def test_results_are_dense() -> None:
    """Without ``out`` a result is new and dense, whatever its model's layout."""
    out = output_like("op", None, (3, 8), normals(8, 3).t())
    assert (out.shape, out.is_contiguous(), out.dtype) == ((3, 8), True, torch.float32)


@pytest.mark.parametrize("start", [8, 16, 24, 40])
def test_slices_beside_each_other_do_not_overlap(start: int) -> None:
    """Column slices of one buffer share no element unless their columns do."""
    buffer = torch.zeros(3, 64)
    x, out = buffer[:, 16:24], buffer[:, start : start + 8]
    check_out("op", out, in_place=True, x=x)
    if start != 16:
        check_out("op", out, in_place=False, x=x)


@pytest.mark.parametrize("start", [9, 15, 17, 23])
def test_slices_that_share_columns_overlap(start: int) -> None:
    """One shared column is an overlap."""
    buffer = torch.zeros(3, 64)
    with pytest.raises(BadArgument, match="op: out shares memory with x"):
        check_out("op", buffer[:, start : start + 8], in_place=True, x=buffer[:, 16:24])


@pytest.mark.parametrize("out", [normals(1, 8).expand(3, 8), normals(40).as_strided((3, 8), (4, 1))])
def test_rows_of_a_result_may_not_overlap(out: torch.Tensor) -> None:
    """A result whose rows share elements would hold whichever program came last."""
    with pytest.raises(BadArgument, match=r"op: rows of out share memory, 8 elements are [04] apart\n.*\n.*contiguous"):
        check_out("op", out, in_place=True, x=normals(3, 8))


def test_one_row_may_have_any_stride() -> None:
    """A stride that is never stepped along says nothing."""
    check_out("op", normals(1, 8).as_strided((1, 8), (0, 1)), in_place=True, x=normals(1, 8))


@pytest.mark.parametrize("value", [0.0, 0.5, 1, 2])
def test_numbers_within_their_bounds_are_taken(value: float) -> None:
    """Integers and floats from the least to the most are numbers."""
    check_number("op", "share", value, 0.0, 2.0, example=0.5)


@pytest.mark.parametrize("value", [-1e-9, 2.1, torch.nan, torch.inf, True, None, "1", 10**400, torch.tensor(1.0)])
def test_what_is_no_number_within_its_bounds_is_refused(value: Any) -> None:
    """Others say what is taken and what to type."""
    with pytest.raises(BadArgument, match=r"op: share is .*\n.*a number from 0 to 2\n.*share=0.5"):
        check_number("op", "share", value, 0.0, 2.0, example=0.5)


def test_numbers_follow_their_seed_alone() -> None:
    """Random inputs do not touch or read torch's global generator."""
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = random_tensor((2, 8), "fp16", 5, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert bits(random_tensor((2, 8), "fp16", 5, torch.device("cpu"))) == bits(one)


# --- arguments that change while they are remembered --------------------------------------------------------------


def test_a_remembered_call_still_looks_at_its_tensors() -> None:
    """A call that differs from a remembered one in any tensor's shape, dtype or layout is checked anew."""
    x, weight = normals(3, 8), normals(8)
    ops.rms_norm(x, weight)
    for wrong in (weight[:4], weight.double(), weight.view(1, 8), normals(16)[::2]):
        with pytest.raises(BadArgument):
            ops.rms_norm(x, wrong)


def test_a_remembered_call_gives_new_memory() -> None:
    """Results of equal calls do not share memory."""
    x = normals(3, 8)
    one, two, three = (ops.swiglu(x, x) for _ in range(3))
    assert len({t.data_ptr() for t in (one, two, three)}) == 3
    assert bits(one) == bits(two) == bits(three)


def test_modes_do_not_share_remembered_calls() -> None:
    """A call remembered in one mode is not remembered in another."""
    made = scripted()
    x = normals(3, 8)
    with made.active():
        ops.swiglu(x, x)
        with context.restored(context.Call("read", "train")):
            ops.swiglu(x, x)
    assert len(made.calls) == 2


def test_calls_under_inference_mode_and_without_are_alike() -> None:
    """What is remembered under inference mode serves ordinary calls, gradients included."""
    x = normals(3, 8)
    with torch.inference_mode():
        ops.swiglu(x, x)
        inferred = ops.swiglu(x, x)
    out = ops.swiglu(x.requires_grad_(), x)
    out.sum().backward()
    assert not out.is_inference()
    assert bits(out) == bits(inferred)


def test_the_product_s_kernel_is_its_only_one() -> None:
    """Gradients of a product are products: one kernel, three problems."""
    from kalign_core.api import recorded

    a, b = normals(4, 8).bfloat16().requires_grad_(), normals(8, 2).bfloat16().requires_grad_()
    with scripted().active():
        calls = recorded(ops.matmul, a, b)
    assert [(call.kernel, dict(call.problem.dims)) for call in calls] == [
        (matmul_kernel, {"M": 4, "N": 2, "K": 8}),
        (matmul_kernel, {"M": 4, "N": 8, "K": 2}),
        (matmul_kernel, {"M": 8, "N": 2, "K": 4}),
    ]
