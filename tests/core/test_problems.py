"""From arguments to the problem they pose; what makes no sense is refused before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kalign_core.errors import BadArgument, MixedDevices
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.problems import one_device, problem_of
from kalign_core.records import Argument
from tests.core.scripted import normals, scale_kernel


def call(x: Any, out: Any = None, t: Any = None, f: Any = None, x_stride: Any = None, factor: Any = 2.0) -> list[Any]:
    """Arguments of ``scale_kernel`` for ``x``, with any of them replaced."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    sizes = (x.shape[0] if t is None else t, x.shape[1] if f is None else f)
    return [x, out, *sizes, x.stride(0) if x_stride is None else x_stride, out.stride(0), factor]


def posed(*args: Any, phase: str = "train", **changes: Any) -> Any:
    """The problem of one call of ``scale_kernel``."""
    return problem_of(scale_kernel, call(*args, **changes), phase)


def test_a_call_poses_its_problem() -> None:
    """Sizes, dtypes, strides, alignment, numbers and phase are the call's."""
    problem = posed(normals(4, 48)[:, :40], phase="decode")
    assert (problem.kernel, problem.dims, problem.phase) == ("scale", (("T", 4), ("F", 40)), "decode")
    assert problem.args == (
        Argument("x", "fp32", (48, 1)),
        Argument("out", "fp32", (40, 1)),
        Argument("x_stride", "int", value=48),
        Argument("out_stride", "int", value=40),
        Argument("factor", "float", value=2.0),
    )


@pytest.mark.parametrize(
    ("dtype", "short"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32"), (torch.float8_e4m3fn, "fp8e4nv")],
)
def test_dtypes_have_short_names(dtype: torch.dtype, short: str) -> None:
    """The dtype of every tensor is part of the problem."""
    assert posed(torch.zeros(2, 4).to(dtype)).dtype("out") == short


@pytest.mark.parametrize(("start", "aligned"), [(0, True), (1, False), (4, True)])
def test_alignment_is_sixteen_bytes(start: int, aligned: bool) -> None:
    """A view that starts between two multiples of 16 bytes is another problem."""
    assert posed(torch.zeros(64)[start : start + 40].view(4, 10)).argument("x").aligned is aligned


def test_absent_tensors_have_no_dtype() -> None:
    """None in the place of a tensor is an argument of its own kind."""
    a = torch.zeros(2, 4)
    args = (a, a.t(), None, torch.zeros(2, 2), 2, 2, 4, *a.stride(), *a.t().stride(), 2, 1)
    assert problem_of(matmul_kernel, args, "train").dtype("bias") == "none"


@pytest.mark.parametrize(("stride", "bits"), [(2**28, 32), (2**29, 64)])
def test_offsets_past_2_31_need_64_bits(stride: int, bits: int) -> None:
    """Where the last element of any tensor lies past 2**31 its offset does not fit 32 bits."""
    x = torch.empty_strided((5, 1), (stride, 1), device="meta")
    assert problem_of(scale_kernel, call(x), "train").index_bits == bits


def test_offsets_are_wide_for_the_whole_bucket() -> None:
    """One launch serves a bucket, so offsets are as wide as its largest size needs, not only the call's."""
    stride = 2**31 // 7 + 1
    for t in (5, 8):  # both fall in the bucket of 8, whose last row lies past 2**31
        x = torch.empty_strided((t, 1), (stride, 1), device="meta")
        assert problem_of(scale_kernel, call(x), "train").index_bits == 64


def test_unused_strides_are_not_compared() -> None:
    """An axis of size one is never stepped along, so any stride will do."""
    assert posed(normals(4, 40)[:1], x_stride=99).argument("x").strides == (99, 1)


def test_empty_tensors_pose_a_problem() -> None:
    """No rows is a size like any other."""
    assert posed(torch.empty(0, 40)).T == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"f": 39}, "x has shape"),
        ({"x_stride": 41}, "x has strides"),
        ({"t": 2.0}, "T is 2.0, which is no integer"),
        ({"t": True}, "T is True, which is no integer"),
        ({"t": torch.tensor(4)}, "T is Tensor, which is no integer"),
        ({"factor": torch.tensor(2.0)}, "factor is a tensor"),
        ({"factor": "2"}, "factor is '2', which is no integer"),
        ({"out": [1.0]}, "out is list, not a tensor"),
        ({"x": normals(4, 40).to(torch.complex64)}, "x is torch.complex64"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], says: str) -> None:
    """A value, shape, stride or dtype that contradicts the declaration names the kernel and the argument."""
    x = normals(4, 40)
    args = dict(zip(scale_kernel.parameters, call(x), strict=True))
    args.update({{"t": "T", "f": "F"}.get(name, name): value for name, value in changes.items()})
    with pytest.raises(BadArgument, match="scale: ") as caught:
        problem_of(scale_kernel, list(args.values()), "train")
    assert says in str(caught.value)


def test_the_number_of_arguments_is_checked() -> None:
    """Too few arguments are refused with the names of the parameters."""
    with pytest.raises(BadArgument, match="got 2 arguments for 7 parameters") as caught:
        problem_of(scale_kernel, call(normals(4, 40))[:2], "train")
    assert "x, out, T, F, x_stride, out_stride, factor" in caught.value.why


def test_strides_say_what_to_do() -> None:
    """A tensor whose rows lie elsewhere than the call says comes with a remedy."""
    with pytest.raises(BadArgument, match=r"pass x.contiguous\(\)"):
        posed(normals(40, 4).t(), x_stride=40)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices are an error that names each and says how to move one."""
    with pytest.raises(MixedDevices, match="op: x on cpu, weight on meta") as caught:
        one_device("op", {"x": torch.zeros(1), "weight": torch.zeros(1, device="meta")})
    assert ".to(" in caught.value.fix


def test_an_integer_of_another_library_is_refused() -> None:
    """What the compiler would not take is refused with what to type."""
    numpy = pytest.importorskip("numpy")
    with pytest.raises(BadArgument, match=r"int\(T\)"):
        posed(normals(4, 40), t=numpy.int64(4))
