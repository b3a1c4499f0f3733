"""Inputs of the verifier: the same numbers on every machine, by row, and of the kind that their names promise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kalign_core.verifier import inputs, probes
from kalign_core.verifier.inputs import INTEGERS, Request
from kalign_core.verifier.selftest import sees_order
from tests.core.verifier_samples import FAMILIES

DTYPES = ("bf16", "fp16", "fp32")

# Taken on x86-64 with torch 2.13; another machine, another torch or a GPU has to give the same bytes.
GOLDEN = {
    ("normals", "bf16"): "8dad8b234ce79a0f 8dad8b234ce79a0f dbf2ee7cf3bc5362 dbf2ee7cf3bc5362",
    ("normals", "fp16"): "67eb2987153b0117 67eb2987153b0117 efc4286d46366c51 efc4286d46366c51",
    ("normals", "fp32"): "e3a80baab1b7fd61 e3a80baab1b7fd61 cbec7b81a31d76a9 cbec7b81a31d76a9",
    ("spread", "bf16"): "501aa87b865825dd 501aa87b865825dd 7c9ab8eee4833812 7c9ab8eee4833812",
    ("spread", "fp16"): "44732d3128f64d89 44732d3128f64d89 2f76eb070e03d93f 2f76eb070e03d93f",
    ("spread", "fp32"): "489badd5ef48514b 489badd5ef48514b c324bc6ccef40564 c324bc6ccef40564",
    ("cancelling", "bf16"): "f5fca56844c3e868 f2fd5d0fdb6fd495 859ddba967d1cecc f7f7bf2c1eeb3d94",
    ("cancelling", "fp16"): "5c950e4cc378fee9 663c48b6c4b41036 ba131e1107eeeadc 3c0320c661c1abf1",
    ("cancelling", "fp32"): "4ad3a8015da76c36 df4f1dd4afeb9588 90681a7e3f6fdfd6 6ffd30bf49714694",
    ("swallowing", "bf16"): "68bdccece935fc65 16beb0bbe1228dfd 68bdccece935fc65 16beb0bbe1228dfd",
    ("swallowing", "fp16"): "912341a54fde36b9 cb286ea08935ee10 912341a54fde36b9 cb286ea08935ee10",
    ("swallowing", "fp32"): "52de69a7a1ebc229 230a649c29a1698d 52de69a7a1ebc229 230a649c29a1698d",
    ("signed_zeros", "bf16"): "412aaa81204f5958 412aaa81204f5958 e6fa620abd1615f1 e6fa620abd1615f1",
    ("signed_zeros", "fp16"): "9a5627de82ae0a2b 9a5627de82ae0a2b 38d774d5f36b6756 38d774d5f36b6756",
    ("signed_zeros", "fp32"): "551fb1abf64f21da 551fb1abf64f21da c31c3da9ca48b975 c31c3da9ca48b975",
    ("subnormals", "bf16"): "8d7c6d46fbd50e94 011c39aff6a48eb7 9f95c7abc7ac1f5a 227a07f7c5e88897",
    ("subnormals", "fp16"): "2592162d8ee5bdb3 7b79741449b729dc 3218b1e64db60a0b 7986a29c5691e099",
    ("subnormals", "fp32"): "a4e71ffc40499787 79fdb671e0484351 142c5942bf39db92 396baa7b69e49ca1",
    ("infinities", "bf16"): "4754685e4c941e9f 874bce7f2006b2a6 372264aceadeb320 e0f0cfbf5d2fb90e",
    ("infinities", "fp16"): "c828c90ced33c586 aef25cd2eb2590ec 8c4980b99bce1f2a fde0ec3625910e5c",
    ("infinities", "fp32"): "857907e5310171ef 2860e3388bb5caf8 93fd19bc43ed22bc b411a7ead466ad15",
    ("not_numbers", "bf16"): "2c987f11ae805dd3 2c987f11ae805dd3 6781fed09a899d5d 6781fed09a899d5d",
    ("not_numbers", "fp16"): "299a6ced8837ec91 299a6ced8837ec91 e6b643ff91e86fa4 e6b643ff91e86fa4",
    ("not_numbers", "fp32"): "55e0451ba158bff9 55e0451ba158bff9 91f647f226bcb9ae 91f647f226bcb9ae",
    ("order_probe", "bf16"): "75a36aa6354aeb2f 00f7f89749944154 02f27d877fd4ac71 e45c2ccc62bf891f",
    ("order_probe", "fp16"): "d465aa069a1ea4e8 53536614be899cf8 fd33efcdb1a2cc5d ef72651a5c7d2c38",
    ("order_probe", "fp32"): "dc5b0e2ad865d09d 2f6aac101b4339cb 81d1a0aa24ddf284 6d23a82427811b89",
}


def request(
    dtype: str = "bf16", rows: int = 14, columns: int = 48, seed: int = 1, operand: int = 0, first: int = 0
) -> Request:
    numbers = torch.arange(first, first + rows, dtype=torch.int32)
    return Request("x", dtype, numbers, columns, seed, columns, operand)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def content(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process whose programs set this default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_same_bytes_everywhere(family: str, dtype: str) -> None:
    """Every family's bytes are those written down here, whatever machine, library and program made them."""
    made = [
        content(FAMILIES[family].fill(request(dtype, seed=seed, operand=operand)))
        for seed in (1, 2)
        for operand in (0, 1)
    ]
    assert " ".join(made) == GOLDEN[family, dtype]


@pytest.mark.parametrize("family", FAMILIES)
@given(st.integers(0, 40), st.integers(1, 9))
def test_a_row_is_the_same_wherever_it_is_made(family: str, first: int, rows: int) -> None:
    """A row depends on its number alone: not on where a block begins, how long it is or what else is in it."""
    fill = FAMILIES[family].fill
    whole, part = fill(request(rows=50)), fill(request(rows=rows, first=first))
    assert torch.equal(raw(whole)[first : first + rows], raw(part))


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_and_names_give_other_numbers(family: str) -> None:
    """The seed enters every family, and so does the argument's name where it is random at all."""
    fill = FAMILIES[family].fill
    if family != "swallowing":  # a fixed pattern
        assert not torch.equal(raw(fill(request(seed=1))), raw(fill(request(seed=2))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_normals_have_mean_zero_and_variance_one(dtype: str) -> None:
    """Nearly normal: mean 0, variance 1, no value beyond 3.5."""
    values = inputs.normals(request(dtype, rows=64, columns=256)).double()
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.var()) - 1) < 0.05
    assert float(values.abs().max()) <= 3.5


@pytest.mark.parametrize(("dtype", "low", "high"), [("bf16", -20, 21), ("fp32", -20, 21), ("fp16", -10, 6)])
def test_spread_fills_the_range_of_exponents(dtype: str, low: int, high: int) -> None:
    """Exponents reach over the whole range of the family and never past it."""
    exponents = torch.frexp(inputs.spread(request(dtype, rows=64, columns=256)).float()).exponent - 1
    assert (int(exponents.min()), int(exponents.max())) in {(low, high - 1), (low, high)}  # rounding may carry


@pytest.mark.parametrize("operand", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cancelling_pairs_lose_nearly_everything(dtype: str, operand: int) -> None:
    """Neighbours agree but for their last bits; in operand 0 their signs are opposite, so that products cancel too."""
    pairs = inputs.cancelling(request(dtype, operand=operand)).double().unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    assert bool(((first.abs() - second.abs()).abs() <= first.abs() * 0.07).all())
    assert bool((first * second < 0).all()) is (operand == 0)


def test_signed_zeros_are_of_both_signs() -> None:
    """Both zeros occur, and so do rows of nothing else."""
    values = inputs.signed_zeros(request())
    zeros = values[values == 0]
    assert {bool(sign) for sign in torch.signbit(zeros)} == {False, True}
    assert bool((values == 0).all(-1).any())


@pytest.mark.parametrize(("dtype", "smallest_normal"), [("bf16", 2.0**-126), ("fp16", 2.0**-14), ("fp32", 2.0**-126)])
def test_subnormals_are_subnormal(dtype: str, smallest_normal: float) -> None:
    """Nothing of even rows is as large as the smallest normal number, and most of it is not zero."""
    values = inputs.subnormals(request(dtype)).double()
    small = values.abs() < smallest_normal
    assert bool(small[::2].all())
    assert bool(small[1::4, torch.arange(48) % 8 != 7].all())
    assert float((values != 0).double().mean()) > 0.9


@pytest.mark.parametrize("operands", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operand_has_subnormals_beside_normals(operands: int, dtype: str) -> None:
    """A kernel that takes any one operand's for zero loses a product that is none, and products stay small."""
    made = [inputs.subnormals(request(dtype, operand=operand)).double() for operand in range(operands)]
    small = torch.stack([values.abs() < torch.finfo(request(dtype).torch_dtype).smallest_normal for values in made])
    alone = small & (small.sum(0) == 1)
    assert bool(alone.flatten(1).any(-1).all())
    assert bool(small.any(0)[::2].all())


def test_infinities_come_alone_and_in_whole_rows() -> None:
    """Single infinities of either sign, some at an end of a row, and rows of nothing else."""
    values = inputs.infinities(request(rows=21)).float()
    whole = values.isinf().all(-1)
    assert whole.nonzero().flatten().tolist() == [1, 4, 8, 11, 15, 18]
    assert values.isinf()[[0, 7, 14], 0].all()
    assert values.isinf()[[6, 13, 20], -1].all()
    assert bool((values[~whole] == torch.inf).any())
    assert bool((values[~whole] == -torch.inf).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_and_zeros_stand_beside_infinities(dtype: str) -> None:
    """The largest of the dtype of both signs in one row of seven, zeros in another of operand 0 and of no other."""
    values, other = (inputs.infinities(request(dtype, operand=operand)) for operand in (0, 1))
    most = torch.finfo(values.dtype).max
    assert {most, -most} <= set(values[[3, 10]].flatten().tolist())
    assert not bool(values[[2, 9]].any())
    assert bool(other[[2, 9]].all())
    assert bool(other.isinf()[0, 0])


@pytest.mark.parametrize("family", inputs.ROW_KINDS)
def test_another_seed_moves_the_kinds_of_row(family: str) -> None:
    """As many seeds as there are kinds show all of them in a single row."""
    kinds = inputs.ROW_KINDS[family]
    alone = {int(request(rows=1, seed=seed).row_kind(family)) for seed in range(1, 1 + kinds)}
    assert alone == set(request(rows=kinds).row_kind(family).flatten().tolist()) == set(range(kinds))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [1, 2])
def test_nan_has_one_payload_per_case(dtype: str, seed: int) -> None:
    """All NaN of a case are one bit pattern, not the usual one, negative for odd seeds; two rows of three have none."""
    values = inputs.not_numbers(request(dtype, seed=seed))
    patterns = raw(values)[values.isnan()]
    usual = raw(torch.tensor([torch.nan], dtype=values.dtype))[0]
    assert len(set(patterns.tolist())) == 1
    assert int(patterns[0]) not in (int(usual), int(usual) + 1)
    assert (int(patterns[0]) < 0) is (seed == 1)
    assert set(values.isnan().any(-1).nonzero().flatten().remainder(3).tolist()) == {0}
    assert values.isnan()[[0, 9], 0].all()
    assert values.isnan()[[3, 12], -1].all()


def test_index_arguments_stay_below_their_bound() -> None:
    """Whole numbers from 0 to the bound, both ends reached however far apart they are."""
    ids = Request("ids", "i32", torch.arange(64, dtype=torch.int32), 32, 1)
    assert sorted(set(inputs.integers(ids, 7).flatten().tolist())) == list(range(7))
    far = inputs.integers(ids, 1 << 30)
    assert (int(far.min()), int(far.max())) == (0, (1 << 30) - 1)


def test_choices_are_mixed_none_or_all() -> None:
    """A row of four keeps nothing, another one everything, and the first is mixed."""
    made = inputs.choices(Request("keep", "i32", torch.arange(8, dtype=torch.int32), 64, 1)).float()
    assert set(made.flatten().tolist()) == {0, 1}
    shares = made.mean(-1).tolist()
    assert [share for share in shares if share in (0, 1)] == [0, 1, 0, 1]
    assert 0 < shares[0] < 1


# --- order probes -------------------------------------------------------------------------------------------------

SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cancel": lambda x: x,
    "sparse": lambda x: x,
    "square": lambda x: x * x,
    "exp": lambda x: torch.exp(x),
    "ladder": lambda x: x,
    "product": lambda x: x,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", probes.PROBES)
def test_every_kind_of_probe_shows_the_order_it_is_for(kind: str, dtype: str) -> None:
    """Rows of one kind alone tell three orders of its kind of sum apart."""
    asked = request(dtype, columns=512)
    values = probes.PROBES[kind](asked).to(asked.torch_dtype).float()
    assert sees_order(SUMS[kind](values))


def test_a_probe_counts_the_terms_outside_the_common_ancestor() -> None:
    """Added from left to right, +M at i and -M at j leave the ones that come after both."""
    asked = request("fp32", rows=24, columns=64)
    first, second = probes.anchors(asked)
    values, total = probes.cancel(asked), torch.zeros(24)
    for column in values.unbind(-1):
        total = total + column
    assert total.tolist() == (63 - torch.maximum(first, second).flatten()).tolist()


def test_a_sparse_probe_has_no_more_ones_than_a_16_bit_result_counts() -> None:
    """About 254 ones and never many more, whatever the length."""
    made = probes.sparse(request("bf16", rows=16, columns=8192))
    assert 200 < int((made == 1).sum(-1).max()) < 310


@given(st.integers(2, 300))
def test_anchors_are_two_places(length: int) -> None:
    """i and j lie inside the row and never coincide."""
    first, second = probes.anchors(Request("x", "fp32", torch.arange(96, dtype=torch.int32), length, 3, length))
    assert bool((first != second).all())
    assert int(torch.minimum(first, second).min()) >= 0
    assert int(torch.maximum(first, second).max()) < length


def test_order_probes_mix_all_kinds_by_row() -> None:
    """Six neighbouring rows are six kinds, and another seed gives a row another kind."""
    asked = request("fp32", rows=6)
    mixed = probes.order_probe(asked)
    for row, kind in enumerate(probes.PROBES):
        number = (row - asked.seed) % len(probes.PROBES)
        alone = probes.PROBES[kind](request("fp32", rows=1, first=number))
        assert torch.equal(mixed[number], alone[0])
