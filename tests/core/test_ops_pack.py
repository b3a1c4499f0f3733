"""ops.pack and ops.unpack: copies there and back, padding on either side, sizes from the caller, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices, UnknownName
from tests.core.scripted import bits, leaf, normals, ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32]
LENGTHS = ([2, 5, 1], [5, 5, 5], [0, 3, 0], [4, 0, 0], [0, 0, 0])
every_side = pytest.mark.parametrize("side", ["right", "left"])
every_length = pytest.mark.parametrize("lengths", LENGTHS, ids=str)


def ends_of(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Where sequences of ``lengths`` begin and the last one ends."""
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(dtype)


# --- copies -------------------------------------------------------------------------------------------------------


@every_side
@every_length
@pytest.mark.parametrize("shape", [(), (3,), (2, 20)], ids=str)
def test_sequences_are_put_side_by_side(shape: tuple[int, ...], lengths: list[int], side: str) -> None:
    """Packing and unpacking are those of the oracle, whatever is behind the axis of tokens."""
    padded, ends = normals(3, 5, *shape), ends_of(lengths)
    packed = ops.pack(padded, ends, sum(lengths), side)
    assert torch.equal(packed.double(), ops.pack.oracle(padded, ends, sum(lengths), side))
    assert torch.equal(ops.unpack(packed, ends, 5, side).double(), ops.unpack.oracle(packed, ends, 5, side))


@every_side
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_bits_are_copied(dtype: torch.dtype, kind: torch.dtype, side: str) -> None:
    """There and back, every kept element has its bits and every other one is +0."""
    padded, ends = (normals(3, 5, 7) * 100).to(dtype), ends_of(LENGTHS[0], kind)
    place = torch.arange(5) if side == "right" else torch.arange(5).flip(0)
    kept = (place < torch.tensor(LENGTHS[0])[:, None])[..., None]
    back = ops.unpack(ops.pack(padded, ends, 8, side), ends, 5, side)
    assert bits(back) == bits(torch.where(kept, padded, torch.zeros((), dtype=dtype)))


def test_garbage_in_the_padding_stays_there() -> None:
    """What stands where no sequence does is never read into a result."""
    padded, ends = normals(3, 5, 7), ends_of([2, 5, 1])
    expected = bits(ops.pack(padded, ends, 8))
    padded[0, 2:], padded[2, 1:] = torch.nan, torch.inf
    assert bits(ops.pack(padded, ends, 8)) == expected


# --- sizes --------------------------------------------------------------------------------------------------------


@every_side
def test_rows_that_no_sequence_fills_are_zero(side: str) -> None:
    """A total that is larger than what there is gives +0 behind it; a smaller one leaves the last rows out."""
    padded, ends = normals(2, 5, 7), ends_of([3, 2])
    exact = ops.pack(padded, ends, 5, side)
    assert bits(ops.pack(padded, ends, 9, side)) == bits(exact) + bytes(4 * 4 * 7)
    assert bits(ops.pack(padded, ends, 4, side)) == bits(exact[:4])
    assert ops.pack(padded, ends, 0, side).shape == (0, 7)


@every_side
def test_sequences_that_do_not_fit_are_cut(side: str) -> None:
    """Unpacking into fewer rows keeps the tokens nearest to the side they stand at; packing back leaves the rest 0."""
    packed, ends = normals(5, 7), ends_of([4, 1])
    short = ops.unpack(packed, ends, 2, side)
    assert torch.equal(short.double(), ops.unpack.oracle(packed, ends, 2, side))
    kept = [0, 1] if side == "right" else [2, 3]
    back = ops.pack(short, ends, 5, side)
    assert bits(back[[*kept, 4]]) == bits(packed[[*kept, 4]])
    assert not back[[i for i in range(4) if i not in kept]].any()


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7), (3, 5, 0)])
def test_empty_batches(shape: tuple[int, int, int]) -> None:
    """No sequence, no row and no element are batches like any other."""
    padded, ends = torch.empty(shape, requires_grad=True), torch.zeros(shape[0] + 1, dtype=torch.int32)
    packed = ops.pack(padded, ends, 2)
    packed.sum().backward()
    assert (packed.shape, bool(packed.any())) == ((2, shape[2]), False)
    assert padded.grad is not None
    assert padded.grad.shape == shape
    assert ops.unpack(packed.detach(), ends, shape[1]).shape == shape


@every_side
def test_many_sequences_are_found(side: str) -> None:
    """Every row finds its sequence among many, also where some are empty."""
    lengths = [i * 7 % 5 for i in range(67)]
    padded, ends = normals(67, 4, 3), ends_of(lengths)
    packed = ops.pack(padded, ends, sum(lengths), side)
    assert torch.equal(packed.double(), ops.pack.oracle(padded, ends, sum(lengths), side))


@pytest.mark.parametrize("view", [lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
                                  lambda t: torch.nn.functional.pad(t, (3, 2))[..., 3:10],
                                  lambda t: t.repeat_interleave(2, 2)[..., ::2]])  # fmt: skip
def test_layouts_do_not_matter(view: Any) -> None:
    """Time first, gaps and unaligned rows are taken as they are, or copied where the last axis is not dense."""
    padded, ends = normals(3, 5, 7), ends_of([2, 5, 1])
    assert bits(ops.pack(view(padded), ends, 8)) == bits(ops.pack(padded, ends, 8))


@every_side
def test_ends_may_have_gaps(side: str) -> None:
    """Where sequences begin and end may be said by a column of something else, or by one number for all."""
    padded, ends = normals(3, 5, 7), ends_of([2, 5, 1])
    column, packed = torch.stack((ends, -ends), 1)[:, 0], ops.pack(padded, ends, 8, side)
    assert bits(ops.pack(padded, column, 8, side)) == bits(packed)
    assert bits(ops.unpack(packed, column, 5, side)) == bits(ops.unpack(packed, ends, 5, side))
    assert not ops.pack(padded, ends[:1].expand(4), 8, side).any()


@every_side
@pytest.mark.parametrize(
    "ends", [[0, 9, 1, 2], [-3, 2, 4, 8], [0, 100, 200, 300], [2**31 - 1, -(2**31), 5, 0]], ids=str
)
def test_ends_that_make_no_sense_read_nothing_else(ends: list[int], side: str) -> None:
    """Ends that fall, are negative or lie behind everything give rows of the input or +0, never other memory."""
    buffer = torch.full((3 * 5 * 7 + 2048,), torch.nan)
    padded, wrong = buffer[1024 : 1024 + 105].view(3, 5, 7).fill_(1), torch.tensor(ends, dtype=torch.int32)
    assert ops.pack(padded, wrong, 8, side).isfinite().all()
    assert ops.unpack(padded[0], wrong, 5, side).isfinite().all()


# --- gradients ----------------------------------------------------------------------------------------------------


@every_side
@every_length
def test_gradients_go_the_other_way(lengths: list[int], side: str) -> None:
    """The gradient of packing is unpacking, and the other way round, for any upstream gradient."""
    padded, ends, total = leaf(3, 5, 7), ends_of(lengths), sum(lengths)
    d_packed, d_padded = normals(total, 7, seed=1), normals(3, 5, 7, seed=2)
    packed = ops.pack(padded, ends, total, side)
    (got,) = torch.autograd.grad(packed, padded, d_packed)
    assert bits(got) == bits(ops.unpack(d_packed, ends, 5, side))
    wide = padded.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(ops.pack.oracle(wide, ends, total, side), wide, d_packed.double())
    assert torch.equal(got.double(), exact)
    flat = packed.detach().requires_grad_()
    (got,) = torch.autograd.grad(ops.unpack(flat, ends, 5, side), flat, d_padded)
    assert bits(got) == bits(ops.pack(d_padded, ends, total, side))


@pytest.mark.parametrize("op", [ops.pack, ops.unpack], ids=lambda op: op.name)
def test_a_second_derivative_is_an_error(op: Any) -> None:
    """Going back through a gradient raises."""
    x, *rest = op.inputs({"B": 2, "S": 4, "F": 8}, "fp32", 0, torch.device("cpu"))
    (d,) = torch.autograd.grad(op(x, *rest).square().sum(), x, create_graph=True)
    with pytest.raises(KalignError, match=f"{op.name} cannot be differentiated twice"):
        d.sum().backward()


# --- what they refuse ---------------------------------------------------------------------------------------------

X, E = normals(2, 3, 4), ends_of([1, 2])


@pytest.mark.parametrize(
    ("op", "args", "says"),
    [
        (ops.pack, (X, E[:2], 3), r"padded is \(2, 3, 4\), cu_seqlens \(2,\)"),
        (ops.pack, (X[0, 0], E, 3), r"padded is \(4,\)"),
        (ops.pack, (X, E.float(), 3), r"cu_seqlens is torch.float32\n.*\n.*cu_seqlens.long\(\)"),
        (ops.pack, (X, E, -1), "-1 is no number of rows"),
        (ops.pack, (X, E, E[-1]), "is no number of rows\n.*stop the host"),
        (ops.pack, (X.double(), E, 3), "padded is torch.float64"),
        (ops.pack, (X, [0, 1, 3], 3), "cu_seqlens is list, not a tensor"),
        (ops.unpack, (X[0], E[None], 3), r"cu_seqlens is \(1, 3\)"),
        (ops.unpack, (X[0], E[:0], 3), r"cu_seqlens is \(0,\)"),
        (ops.unpack, (X[0, 0, 0], E, 3), r"packed is a scalar\n.*\n.*packed.reshape\(1\)"),
        (ops.unpack, (X[0], E, True), "True is no number of rows"),
    ],
)
def test_what_they_cannot_take_is_refused(op: Any, args: Any, says: str) -> None:
    """Wrong kinds, shapes, dtypes and sizes name the argument and the remedy."""
    with pytest.raises(BadArgument, match=f"(?s){op.name}: .*{says}"):
        op(*args)


def test_another_side_is_unknown() -> None:
    """A side that is none lists those that are."""
    with pytest.raises(UnknownName, match=r"(?s)unknown side 'both'.*right, left"):
        ops.pack(X, E, 3, "both")


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both."""
    with pytest.raises(MixedDevices, match="cu_seqlens on meta"):
        ops.pack(X, E.to("meta"), 3)
