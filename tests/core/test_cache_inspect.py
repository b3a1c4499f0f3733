"""Why an entry is not used: each field that differs from the nearest one, and what can never match here."""

from __future__ import annotations

import pytest

from kalign_core.cache.device_table import Difference
from kalign_core.cache.inspect import nearest, outside, stale
from kalign_core.records import Config, Toolchain
from kalign_core.tuner.space import Space
from tests.core.cache_samples import TOOLCHAIN, entry, key

SOURCES = {"scale_rows": ("scale_rows/1", key(1).source)}


@pytest.fixture
def entries():
    """Three decisions for one kernel and one for another."""
    return [*(entry(number) for number in (1, 2, 3)), entry(4, key=key(4, kernel="other"))]


def differing(entries, wanted):
    """How the entry nearest to ``wanted`` differs."""
    return nearest(entries, wanted).differences


def test_a_hit_differs_in_nothing(entries):
    """For a key that is stored its own entry is the nearest, and there is nothing to explain."""
    assert nearest(entries, key(2)) == (entry(2), ())


def test_the_parts_of_a_field_are_told_by_name(entries):
    """Dimensions, arguments and facts are compared one by one, wanted beside found."""
    wanted = key(2, args=key(2).args.replace("x:bf16:row:a16", "x:fp32:row:a16"), phase="decode")
    assert differing(entries, wanted) == (
        Difference("phase", "decode", "train"),
        Difference("args.x", "fp32:row:a16", "bf16:row:a16"),
    )


def test_facts_that_only_one_side_has_are_told(entries):
    """A fact that is missing on one side differs."""
    facts = {name: value for name, value in TOOLCHAIN.facts if name != "cuda"}
    wanted = key(2, toolchain=Toolchain.of(**facts, numpy="2"))
    assert differing(entries, wanted) == (
        Difference("toolchain.cuda", "(none)", "13.0"),
        Difference("toolchain.numpy", "2", "(none)"),
    )


def test_an_unknown_fact_differs_from_itself():
    """What is unknown on both sides is the reason for a miss."""
    unknown = key(1, toolchain=Toolchain.of(driver="unknown"))
    found = differing([entry(1, key=unknown)], unknown)
    assert found == (Difference("toolchain.driver", "unknown", "unknown"),)


@pytest.mark.parametrize("text", ["T=4096 H=2", "H=2 T<=4096", "T<=4096  H=2"])
def test_keys_that_differ_are_never_told_to_be_equal(entries, text):
    """Another spelling of the same sizes is another key, and some difference is named."""
    (found,) = differing(entries, key(2, problem=text))
    assert found.field.startswith("problem")
    assert found.wanted != found.found


def test_the_nearest_entry_is_compared(entries):
    """Of several entries the one that differs in the fewest kinds of field is shown."""
    assert differing(entries, key(9)) == (Difference("problem.H", "9", "1"),)


def test_the_same_call_elsewhere_is_nearer_than_another_call(entries):
    """An entry for the very call under another toolchain, source and suite comes before one for another size."""
    other = entry(9, key=key(9, toolchain=Toolchain.of(driver="1"), source="x", suite="x"))
    assert nearest([*entries, other], key(9)).entry == other


def test_a_kernel_without_entries_has_no_nearest(entries):
    """Entries of other kernels are not near."""
    assert nearest(entries, key(1, kernel="none")) is None


# --- stale --------------------------------------------------------------------------------------------------------


def test_stale_entries_are_told_with_their_reasons(entries):
    """An entry that no call can match is listed with each field that rules it out; others are not."""
    (found,) = stale(entries, TOOLCHAIN, SOURCES, "2026.1")
    assert found == (entry(4, key=key(4, kernel="other")), (Difference("kernel", "(none)", "other"),))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"contract": "scale_rows/0"}, Difference("contract", "scale_rows/1", "scale_rows/0")),
        ({"source": "00"}, Difference("source", key(1).source, "00")),
        ({"suite": "2025.9"}, Difference("suite", "2026.1", "2025.9")),
        ({"toolchain": Toolchain.of(**{**dict(TOOLCHAIN.facts), "driver": "570"})},
         Difference("toolchain.driver", "580.159.04", "570")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_field_that_no_call_has_any_more_is_a_reason(changes, difference):
    """Another contract, source, suite or toolchain fact is told by name; sizes and phases never are."""
    (found,) = stale([entry(1, key=key(1, phase="decode", **changes))], TOOLCHAIN, SOURCES, "2026.1")
    assert found.reasons == (difference,)


def test_a_configuration_that_is_no_candidate_is_stale():
    """Of entries that would match, those whose configuration today's space lacks are listed with the reason."""
    other_suite = entry(3, key=key(3, suite="old"))
    asked = []

    def why(found):
        asked.append(found)
        return "no candidate today" if found == entry(2) else ""

    found = stale([entry(1), entry(2), other_suite], TOOLCHAIN, SOURCES, "2026.1", why)
    assert [(s.entry, s.reasons[0].field) for s in found] == [(entry(2), "config"), (other_suite, "suite")]
    assert asked == [entry(1), entry(2)]


REFERENCE, CANDIDATE, REFUSED, GONE = (Config(num_warps=n) for n in (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("config", "reason"),
    [(REFERENCE, ""), (CANDIDATE, ""), (REFUSED, "refused today: too many"), (GONE, "no candidate today")],
)
def test_a_configuration_is_used_while_it_is_a_candidate(config, reason):
    """The reference and today's candidates are used; a refused one is told with the reason."""
    assert outside(config, REFERENCE, Space((CANDIDATE,), ((REFUSED, "too many"),))) == reason
