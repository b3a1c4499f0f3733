"""Why an entry is not used: each field that differs from the nearest one, and what can never match here."""

from __future__ import annotations

import pytest

from kalign_core.cache.base import MemoryStore
from kalign_core.cache.device_table import Difference
from kalign_core.cache.inspect import explain, stale
from kalign_core.records import Toolchain
from tests.core.cache_samples import DEVICE, TOOLCHAIN, entry, key


@pytest.fixture
def store():
    """A store with three decisions for one kernel and one for another."""
    made = MemoryStore()
    for number in (1, 2, 3):
        made.put(DEVICE, entry(number))
    made.put(DEVICE, entry(4, key=key(4, kernel="other")))
    return made


def test_a_hit_differs_in_nothing(store):
    """For a key that is stored there is nothing to explain."""
    assert explain(store, DEVICE, key(2)) == ()


def test_the_parts_of_a_field_are_told_by_name(store):
    """Dimensions, arguments and facts are compared one by one, wanted beside found."""
    wanted = key(2, args=key(2).args.replace("x:bf16:row:a16", "x:fp32:row:a16"), phase="decode")
    assert explain(store, DEVICE, wanted) == (
        Difference("phase", "decode", "train"),
        Difference("args.x", "fp32:row:a16", "bf16:row:a16"),
    )


def test_facts_that_only_one_side_has_are_told(store):
    """A fact that is missing on one side differs."""
    facts = {name: value for name, value in TOOLCHAIN.facts if name != "cuda"}
    wanted = key(2, toolchain=Toolchain.of(**facts, numpy="2"))
    assert explain(store, DEVICE, wanted) == (
        Difference("toolchain.cuda", "(none)", "13.0"),
        Difference("toolchain.numpy", "2", "(none)"),
    )


def test_an_unknown_fact_differs_from_itself():
    """What is unknown on both sides is the reason for a miss."""
    made = MemoryStore()
    unknown = key(1, toolchain=Toolchain.of(driver="unknown"))
    made.put(DEVICE, entry(1, key=unknown))
    assert explain(made, DEVICE, unknown) == (Difference("toolchain.driver", "unknown", "unknown"),)


def test_the_nearest_entry_is_compared(store):
    """Of several entries the one that differs in the fewest kinds of field is shown."""
    assert explain(store, DEVICE, key(9)) == (Difference("problem.H", "9", "1"),)


def test_a_kernel_without_entries_says_so(store):
    """Entries of other kernels are not near."""
    assert explain(store, DEVICE, key(1, kernel="none")) == (Difference("kernel", "none", "(none)"),)


def test_stale_entries_are_told_with_their_reasons(store):
    """An entry that no call can match is listed with each field that rules it out; others are not."""
    sources = {"scale_rows": ("scale_rows/1", key(1).source)}
    found = stale(store, DEVICE, TOOLCHAIN, sources, "2026.1")
    assert [(s.entry.key.kernel, [r.field for r in s.reasons]) for s in found] == [
        ("other", ["kernel", "contract", "source"])
    ]
    newer = stale(store, DEVICE, TOOLCHAIN, sources, "2026.2")
    assert len(newer) == 4
    assert newer[0].reasons == (Difference("suite", "2026.2", "2026.1"),)
