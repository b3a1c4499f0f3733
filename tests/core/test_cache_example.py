"""Problems made up for a key: of the key's own classes, or none at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kalign_core.api import recorded
from kalign_core.cache.example import example
from kalign_core.cache.key import INT32_END, entry_key
from kalign_core.records import Argument
from tests.core.cache_samples import TOOLCHAIN, scale_rows, scaled
from tests.core.scripted import ops, scripted

CALLS = {
    "dense": scaled(T=3000, H=80),
    "dense, odd": scaled(T=3000, H=81),
    "one row": scaled(T=1, H=80),
    "one column": scaled(T=7, H=1),
    "padded by 16": scaled(T=7, H=80, strides=(96, 1)),
    "padded by 1": scaled(T=7, H=80, strides=(81, 1)),
    "transposed": scaled(T=7, H=80, strides=(1, 7)),
    "transposed, padded": scaled(T=7, H=80, strides=(1, 16)),
    "expanded rows": scaled(T=7, H=80, strides=(0, 1)),
    "expanded columns": scaled(T=7, H=80, strides=(80, 0)),
    "expanded both ways": scaled(T=7, H=80, strides=(0, 0)),
    "every second element": scaled(T=7, H=80, strides=(160, 2)),
    "unaligned": scaled(x=dataclasses.replace(scaled().argument("x"), aligned=False)),
    "another dtype": scaled(weight=Argument("weight", "fp32", (1,))),
    "with a bias": scaled(bias=Argument("bias", "bf16", (1,))),
    "decode": scaled(phase="decode"),
    "wide offsets": scaled(T=2**20, H=4096),
    "wide offsets, said": dataclasses.replace(scaled(), index_bits=64),
    "a wide stride": scaled(T=4, H=4, strides=(INT32_END, 1)),
}


@pytest.mark.parametrize("problem", CALLS.values(), ids=CALLS)
def test_a_call_of_every_kind_can_be_made_up(problem):
    """For the key of any usual tensor there is a problem, and it has that key."""
    key = entry_key(scale_rows, problem, TOOLCHAIN, "2026.1")
    made = example(scale_rows, key)
    assert made is not None
    assert entry_key(scale_rows, made, TOOLCHAIN, "2026.1") == key


@pytest.mark.parametrize("op", ops.operators(), ids=lambda op: op.name)
def test_every_kernel_of_every_operator_has_one(op):
    """For each kernel call of the shared operators a problem with the same key can be made up."""
    with scripted().active() as session:
        for call in recorded(op, *op.inputs(op.small_shapes[0], op.dtypes[0], 0, torch.device("cpu"))):
            key = session.key(call.kernel, call.problem, call.device)
            made = example(call.kernel, key)
            assert made is not None, key
            assert session.key(call.kernel, made, call.device) == key


@pytest.mark.parametrize(
    "changes",
    [
        {"problem": "T<=4096"},
        {"problem": "T<=4095 H=80"},
        {"problem": "T=4096 H=80"},
        {"problem": ""},
        {"problem": "T<=x H=80"},
        {"args": ""},
        {"args": "x:bf16"},
        {"args": "nonsense"},
    ],
    ids=str,
)
def test_a_key_that_is_none_of_the_kernel_s_gives_nothing(changes):
    """What the kernel could not have asked for is no problem, and no error."""
    key = entry_key(scale_rows, scaled(H=80), TOOLCHAIN, "2026.1")
    assert example(scale_rows, dataclasses.replace(key, **changes)) is None


@pytest.mark.parametrize("before", ["x:bf16:row:a16", "x_stride_t:d16", "eps:float", "index:32"])
@pytest.mark.parametrize("after", ["", "x:bf16:heap:a16", "x:i1000:row:a16", "x_stride_t:d17", "eps:none", "index:8"])
def test_a_spoilt_key_never_gives_another_s_problem(before, after):
    """Whatever stands in a key, a problem that comes of it has that very key."""
    key = entry_key(scale_rows, scaled(H=80), TOOLCHAIN, "2026.1")
    spoilt = dataclasses.replace(key, args=key.args.replace(before, after))
    made = example(scale_rows, spoilt)
    assert made is None or entry_key(scale_rows, made, TOOLCHAIN, "2026.1") == dataclasses.replace(
        spoilt, source=key.source
    )
