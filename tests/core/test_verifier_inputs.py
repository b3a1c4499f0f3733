"""Inputs of the verifier: the same numbers on every machine, by row, and of the kind that their names promise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

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
    ("normals", "bf16"): "6416ccd4d32d0a4d 6416ccd4d32d0a4d 773242496746a4da 773242496746a4da",
    ("normals", "fp16"): "a2ed512f84af034b a2ed512f84af034b 4ef696278864fc6c 4ef696278864fc6c",
    ("normals", "fp32"): "3193c0d4a99e393e 3193c0d4a99e393e 43f58937ade213b7 43f58937ade213b7",
    ("spread", "bf16"): "6f981258281fff63 6f981258281fff63 38d26a46b352fd0e 38d26a46b352fd0e",
    ("spread", "fp16"): "813169e9f6de3d89 813169e9f6de3d89 c535d516571750e4 c535d516571750e4",
    ("spread", "fp32"): "c3f9717e3635909f c3f9717e3635909f 4b3fb65fa907ec38 4b3fb65fa907ec38",
    ("cancelling", "bf16"): "450f362074ee9207 e2892fcaed8d40b0 d277c18667e5270c 152b0dc2cd6c08eb",
    ("cancelling", "fp16"): "6031721dfccb0698 baef310f75e10ece 11f564d3f5621412 3a6b699a2207d3da",
    ("cancelling", "fp32"): "9122ef782bc56b11 32253b20ed112c3e 7b425f62e0073819 36791235a6409739",
    ("swallowing", "bf16"): "68bdccece935fc65 16beb0bbe1228dfd 68bdccece935fc65 16beb0bbe1228dfd",
    ("swallowing", "fp16"): "912341a54fde36b9 cb286ea08935ee10 912341a54fde36b9 cb286ea08935ee10",
    ("swallowing", "fp32"): "52de69a7a1ebc229 230a649c29a1698d 52de69a7a1ebc229 230a649c29a1698d",
    ("signed_zeros", "bf16"): "fe01569a546d6193 fe01569a546d6193 d3779e5b196e3a9d d3779e5b196e3a9d",
    ("signed_zeros", "fp16"): "2ff68132fb3aad9d 2ff68132fb3aad9d 01c0f8b86df9c488 01c0f8b86df9c488",
    ("signed_zeros", "fp32"): "c609ed607ecbccc0 c609ed607ecbccc0 f23ec18d2a1f8d06 f23ec18d2a1f8d06",
    ("subnormals", "bf16"): "98a6af667eb1390d 6416ccd4d32d0a4d 7eb5ee45f9b8aa70 773242496746a4da",
    ("subnormals", "fp16"): "aa28d1fe7195d9af a2ed512f84af034b 5629c63c75690151 4ef696278864fc6c",
    ("subnormals", "fp32"): "285a284f04e72de7 3193c0d4a99e393e 60bd4752e059065a 43f58937ade213b7",
    ("infinities", "bf16"): "5132359fbd00df19 5132359fbd00df19 ee9067a873bcc355 ee9067a873bcc355",
    ("infinities", "fp16"): "2ffb7e014776f065 2ffb7e014776f065 7fdc4e1979efdbfb 7fdc4e1979efdbfb",
    ("infinities", "fp32"): "a2e92214ca1929e5 a2e92214ca1929e5 3630558287e54e93 3630558287e54e93",
    ("not_numbers", "bf16"): "daa70726988597b9 daa70726988597b9 ebcffaec89d82576 ebcffaec89d82576",
    ("not_numbers", "fp16"): "421e4cad0f264ed6 421e4cad0f264ed6 03b7af523a4b508b 03b7af523a4b508b",
    ("not_numbers", "fp32"): "6306f8fbf8ef74b4 6306f8fbf8ef74b4 cd10dc640f2a4317 cd10dc640f2a4317",
    ("order_probe", "bf16"): "e15c3cdd6a966dca df4bf18498485a9c e8da06e58758995f da4d4ef1720a0814",
    ("order_probe", "fp16"): "cc13dd55f4e187ab c6fdc44f119910b4 2cb85dc559f8399e 374059e436ff694c",
    ("order_probe", "fp32"): "5ae619b6746bbfa9 3e566e65442c62f4 b7bf2d5f5ae52d2f 2d5ec75eeaca89fd",
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_same_bytes_everywhere(family: str, dtype: str) -> None:
    """Every family's bytes are those written down here, whatever machine and library made them."""
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
    """Nothing of it is as large as the smallest normal number, and most of it is not zero."""
    values = inputs.subnormals(request(dtype)).double()
    assert float(values.abs().max()) < smallest_normal
    assert float((values != 0).double().mean()) > 0.9


def test_infinities_come_alone_and_in_whole_rows() -> None:
    """Single infinities of either sign, rows of nothing else, and rows without any."""
    values = inputs.infinities(request(rows=21)).float()
    whole = values.isinf().all(-1)
    assert whole.nonzero().flatten().tolist() == [3, 5, 10, 12, 17, 19]
    assert bool((values[~whole] == torch.inf).any())
    assert bool((values[~whole] == -torch.inf).any())


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


def test_index_arguments_stay_below_their_bound() -> None:
    """Whole numbers from 0 to the bound, both ends reached."""
    made = inputs.integers(Request("ids", "i32", torch.arange(64, dtype=torch.int32), 32, 1), 7)
    assert sorted(set(made.flatten().tolist())) == list(range(7))


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
