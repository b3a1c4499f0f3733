"""The file format: what is written, that it is read back, and that damage costs what it hit."""

from __future__ import annotations

import dataclasses
import difflib
import random
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kalign_core.cache.device_table import device_table
from kalign_core.cache.document import SCHEMA, Document, _split, read, render
from kalign_core.cache.entry_text import plain
from kalign_core.records import Config, Entry, Toolchain
from tests.core.cache_samples import DEVICE, TOOLCHAIN, entry, key

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
WORDS = st.from_regex(r"[A-Za-z_.+][A-Za-z0-9_.+-]{0,10}", fullmatch=True)
TIMES = st.none() | st.floats(0, 1e9, allow_nan=False)
VALUES = TEXT | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.lists(TEXT, max_size=3)

TOOLCHAINS = st.dictionaries(TEXT.filter(bool), TEXT.filter(lambda t: t and t != "unknown"), max_size=4).map(
    lambda facts: Toolchain(tuple(sorted(facts.items())))
)
KEYS = st.builds(
    key, st.integers(0, 5), kernel=TEXT, contract=TEXT, problem=TEXT, args=TEXT, phase=TEXT, toolchain=TOOLCHAINS,
    source=TEXT, suite=TEXT,
)  # fmt: skip
CONFIGS = st.dictionaries(NAMES.filter(lambda n: n not in ("self", "cls")), st.integers() | st.booleans() | WORDS).map(
    lambda knobs: Config(**knobs)
)
EXTRAS = st.dictionaries(NAMES.map(lambda n: f"later_{n}"), VALUES, max_size=3).map(lambda d: tuple(d.items()))
ENTRIES = st.builds(
    Entry, KEYS, CONFIGS, tuned_at=TEXT, cold_us=TIMES, warm_us=TIMES, reference_cold_us=TIMES,
    reference_warm_us=TIMES, mad_us=TIMES, tried=TEXT, digests=st.lists(TEXT, max_size=3).map(tuple),
    decided=st.just("") | st.datetimes().map(lambda t: t.isoformat(timespec="seconds") + "Z"),
    extra=EXTRAS,
)  # fmt: skip


def document_of(*entries: Entry) -> Document:
    document = Document(device_table(DEVICE))
    for one in entries:
        document.add(one)
    return document


def survivors(content: bytes) -> dict:
    """Entries that reading ``content`` gives, by key; whatever happens to it, reading does not raise."""
    document = read(content).document
    return {} if document is None else {found.key: found for found in document.entries()}


FILE = render(document_of(*(entry(n) for n in range(3))))
ORIGINAL = {entry(n).key: entry(n) for n in range(3)}


def test_a_file_reads_as_documented():
    """A file has a header, the device, toolchains by digest and one flat table for each entry, check last."""
    text = render(document_of(entry(4096))).decode()
    head, block = text.split("[[entry]]\n")
    assert head == (
        "# Decisions of kalign for one device. Safe to read, diff and delete; "
        "`kalign cache explain` says why an entry is not used.\n"
        "schema = 1\nentries = 1\n\n"
        '[device]\nvendor = "nvidia"\nname = "NVIDIA H200"\nkey = "GPU-11111111-2222-3333-4444-555555555555"\n'
        'pci_device_id = "10de:2335"\narch = "sm_90"\nmemory_gib = 139\nmust_match = ["arch", "memory_gib"]\n'
        'vbios = "96.00"\npower_cap_w = 700\n\n'
        f'[toolchain.{TOOLCHAIN.id}]\ncuda = "13.0"\ndriver = "580.159.04"\ntorch = "2.11.0"\ntriton = "3.6.0"\n\n'
    )
    names = [line.split(" = ")[0] for line in block.splitlines()]
    assert names == [
        "kernel", "contract", "problem", "args", "phase", "toolchain", "source", "suite", "config", "tuned_at",
        "cold_us", "warm_us", "reference_cold_us", "reference_warm_us", "mad_us", "tried", "digests", "decided",
        "check",
    ]  # fmt: skip
    assert 'digests = ["normals=1f3a", "spread=77c0"]\n' in block
    assert 'config = "BLOCK=64 enable_fp_fusion=0 num_warps=1"\n' in block


def test_a_file_is_toml():
    """What is written is a TOML document of plain tables to any reader."""
    parsed = tomllib.loads(FILE.decode())
    assert (parsed["schema"], parsed["entries"], len(parsed["entry"])) == (SCHEMA, 3, 3)


@settings(max_examples=60)
@given(st.lists(ENTRIES.map(plain), max_size=4))
def test_what_is_written_is_read(entries):
    """Any decision with any text in its fields is read back exactly, or refused before anything is written."""
    document = Document(device_table(DEVICE))
    expected = {}
    for one in sorted(entries, key=lambda e: e.decided):
        try:
            document.add(one)
        except ValueError:
            continue
        expected[one.key] = one
    reading = read(render(document))
    assert reading.damage == ()
    assert reading.document == document
    assert {found.key: found for found in reading.document.entries()} == expected
    assert all(document.find(wanted) == found for wanted, found in expected.items())


@given(ENTRIES.map(plain))
def test_an_ordinary_decision_can_be_written(one):
    """Nothing but a configuration that its own text does not give back, or a key too long, is refused."""
    document = Document(device_table(DEVICE))
    try:
        document.add(one)
    except ValueError:
        assert Config.parse(str(one.config)) != one.config or not str(one.config)


def test_the_order_of_decisions_does_not_show():
    """The same decisions give the same bytes in whatever order they were made."""
    entries = [entry(n) for n in range(20)]
    turned = random.Random(1).sample(entries, len(entries))
    assert render(document_of(*entries)) == render(document_of(*turned))


def test_a_diff_shows_what_changed():
    """One decision made anew changes its own lines and no other."""
    before = render(document_of(*(entry(n) for n in range(9)))).decode().splitlines()
    newer = entry(4, cold_us=17.0, decided="2026-12-01T00:00:00Z")
    after = render(document_of(*(entry(n) for n in range(9)), newer)).decode().splitlines()
    lines = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert sorted(line.split(" = ")[0] for line in lines) == sorted(
        f"{sign} {name}" for sign in "+-" for name in ("cold_us", "decided", "check")
    )


@pytest.mark.parametrize(("later", "stays"), [("2026-12-01", "new"), ("2026-11-01", "old"), ("2026-11-30", "new")])
def test_of_two_decisions_the_newer_stays(later, stays):
    """A key has one decision: the one decided later, the last one made where both say the same time."""
    old, new = entry(1, decided="2026-11-30"), entry(1, config=Config(num_warps=16), decided=later)
    assert list(document_of(old, new).entries()) == [{"old": old, "new": new}[stays]]


def test_toolchains_are_told_apart_by_their_facts():
    """Two toolchains whose short names collide keep their own entries."""
    document = document_of(entry(1))
    other = Toolchain.of(triton="3.9.0")
    document.toolchains = {other.id: TOOLCHAIN}
    document.blocks = {
        k.replace(TOOLCHAIN.id.encode(), other.id.encode()): v.replace(TOOLCHAIN.id.encode(), other.id.encode())
        for k, v in document.blocks.items()
    }
    document.add(entry(1, key=key(1, toolchain=other)))
    reading = read(render(document))
    assert {found.key.toolchain for found in reading.document.entries()} == {TOOLCHAIN, other}


def test_unknown_facts_are_never_found():
    """An entry under a toolchain with an unknown fact equals no key, not even its own."""
    unknown = Toolchain.of(driver="unknown")
    document = document_of(entry(1, key=key(1, toolchain=unknown)))
    assert read(render(document)).document.find(key(1, toolchain=unknown)) is None


def test_fields_of_a_later_version_survive():
    """Fields, values and tables that this version does not know are read, checked and written again."""
    document = document_of(entry(1, extra=(("later", "x"), ("list", ("a", "b")), ("n", 3), ("yes", True))))
    document.extra = {"site": "here", "notes": {"who": "me", "count": 2}}
    document.device["later"] = "y"
    reading = read(render(document))
    assert (reading.document, reading.damage) == (document, ())
    assert render(reading.document) == render(document)


def test_a_check_covers_fields_it_does_not_know():
    """A changed unknown field is damage like any other."""
    content = render(document_of(entry(1, extra=(("later", "x"),))))
    assert survivors(content.replace(b'later = "x"', b'later = "y"')) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"num_warps=2", b"num_warps=4"), (b'driver = "580', b'driver = "570'), (b'arch = "sm_90"', b'arch = "sm_80"'),
     (b'vbios = "96.00"', b'vbios = "97.00"'), (b"cold_us = 18.5", b"cold_us = 18.6")],
)  # fmt: skip
def test_an_entry_cannot_be_moved(before, after):
    """An entry counts only beside the device and toolchain that it was written with, and as it was written."""
    content = render(document_of(entry(1)))
    assert content.count(before) == 1
    assert survivors(content.replace(before, after)) == {}


def test_a_reader_may_lay_a_file_out_anew():
    """Blank lines, comments, other quotes, line ends and order leave entries whole; they are written as before."""
    content = FILE.replace(b"[[entry]]\n", b"\n[[ entry ]]  # mine\n\n# a remark\n").replace(b"\n", b"\r\n")
    content = content.replace(b'phase = "train"', b"phase = 'train'")
    reading = read(b"\xef\xbb\xbf" + content)
    assert reading.damage == ()
    assert render(reading.document) == FILE


MARKERS = st.sampled_from(
    [b"[[entry]]\n", b"[[entry]]", b"[[ entry ]]  # mine\n", b"[[entry]]\r\n", b"[[other]]\n", b"\n", b"a = 1\n", b"[["]
)


@given(st.lists(MARKERS, max_size=9).map(b"".join))
def test_every_line_that_begins_an_entry_is_found(content):
    """However the marker is spelt and wherever it stands, it begins an entry if it is a line of its own."""
    lines = [line.partition(b"#")[0].split() for line in content.splitlines()]
    markers = sum(line in ([b"[[entry]]"], [b"[[", b"entry", b"]]"]) for line in lines)
    assert len(_split(content)) == markers + 1


def test_a_table_after_the_entries_is_kept():
    """A table of someone else's behind the last entry stays, and so does the entry."""
    reading = read(FILE + b'\n[notes]\nwho = "me"\n')
    assert (reading.damage, reading.document.extra) == ((), {"notes": {"who": "me"}})
    assert len(reading.document.blocks) == 3


@pytest.mark.parametrize("schema", [2, 99])
def test_a_newer_schema_is_not_read(schema):
    """A file of a later schema gives no document and no damage."""
    reading = read(FILE.replace(b"schema = 1", b"schema = %d" % schema))
    assert reading == (None, schema, ())


@pytest.mark.parametrize("value", [b"nan", b"inf", b"{}", b"[1]", b"1979-05-27", b"[[]]", b"1e999", b"9" * 20])
def test_values_of_other_kinds_are_damage(value):
    """Numbers that are none, tables, dates and mixed lists do not pass, whatever the check says."""
    reading = read(FILE.replace(b"mad_us = 0.1", b"later = " + value, 1))
    assert len(reading.document.blocks) == 2
    assert len(reading.damage) == 1


def test_text_is_never_code():
    """Configurations are plain words: anything that could be evaluated or imported is no configuration."""
    for text in (b"__import__('os').system('x')", b"module=evil/path", b"{}", b"BLOCK=64 BLOCK=32", b"BLOCK= 64"):
        assert len(survivors(FILE.replace(b"BLOCK=64 enable_fp_fusion=0 num_warps=1", text, 1))) < 3


@pytest.mark.parametrize("field", ["kernel", "config", "toolchain", "suite", "check", "args"])
def test_an_entry_without_a_field_is_set_aside(field):
    """A missing field costs the entry it is missing from."""
    lines = FILE.decode().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{field} = "))
    reading = read("".join(lines[:at] + lines[at + 1 :]).encode())
    assert (len(reading.document.blocks), len(reading.damage)) == (2, 1)


@pytest.mark.parametrize(
    "damage",
    [b"", b"\xff\xfe", b"[" * 3000, b"schema = 1", b"schema = true", b"[device]\n", b"entry = 3", b"[[entry]]", b"\0",
     b"toolchain = 5\n[device]\nkey = 'x'", b"[device.x]\ny = 1", b"[[device]]\ny = 1", b"[toolchain]\nx = 1"],
)  # fmt: skip
def test_garbage_is_damage_and_no_error(damage):
    """Bytes that are no file of ours are told as damage."""
    reading = read(damage)
    assert reading.document.blocks == {}
    assert reading.damage


def test_bytes_that_are_no_text_cost_one_entry():
    """A byte that is no UTF-8 damages the entry it is in and no other."""
    reading = read(FILE.replace(b'suite = "2026.1"', b'suite = "\xff"', 1))
    assert (len(reading.document.blocks), len(reading.damage)) == (2, 1)
    assert b"\xff" in reading.damage[0].content


def test_a_damaged_toolchain_costs_its_entries():
    """Entries of other toolchains stay in use beside a damaged toolchain table."""
    other = Toolchain.of(triton="3.9.0")
    content = render(document_of(entry(1), entry(2, key=key(2, toolchain=other))))
    broken = content.replace(b'cuda = "13.0"', b'cuda = "13.0')
    assert set(survivors(broken)) == {key(2, toolchain=other)}


def test_a_shorter_file_is_noticed():
    """A file that was cut between two entries still parses; the count tells."""
    cut = FILE[: FILE.rindex(b"[[entry]]")]
    assert [piece.reason for piece in read(cut).damage] == ["3 entries are announced, 2 are there"]


def test_no_prefix_gives_a_wrong_entry():
    """Cut anywhere, a file gives only entries that it held, and all those that lie before the cut."""
    ends = [FILE.index(line) + len(line) for line in FILE.splitlines() if line.startswith(b"check = ")]
    for length in range(len(FILE)):
        found = survivors(FILE[:length])
        assert all(ORIGINAL[k] == v for k, v in found.items()), length
        assert len(found) >= sum(end <= length for end in ends), length


def test_no_flipped_byte_gives_a_wrong_entry():
    """With any one byte changed, entries come back as they were or not at all; damage in an entry costs that one."""
    numbers = random.Random(2026)
    first = FILE.index(b"[[entry]]")
    for _ in range(500):
        at = numbers.randrange(len(FILE))
        flipped = bytearray(FILE)
        flipped[at] ^= 1 << numbers.randrange(8)
        found = survivors(bytes(flipped))
        assert all(ORIGINAL[k] == v for k, v in found.items()), at
        if at >= first + len(b"[[entry]]\n"):
            assert len(found) >= 1, at


def test_a_long_text_is_refused():
    """Strings, names and entries have bounds, so that a file stays readable."""
    for wrong in (
        entry(1, tried="x" * 5000),
        entry(1, extra=(("n" * 65, 1),)),
        entry(1, extra=(("nested", {"a": 1}),)),
        entry(1, extra=(("numbers", (1, 2)),)),
        entry(1, extra=(("kernel", "x"),)),
        entry(1, extra=(("nan", float("nan")),)),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            document_of(wrong)


def test_times_that_are_no_numbers_are_left_out():
    """An entry in a file has times to the nanosecond and none where there is no finite one."""
    written = plain(entry(1, cold_us=float("nan"), warm_us=None, mad_us=0.12345, reference_cold_us=float("inf")))
    assert (written.cold_us, written.warm_us, written.mad_us, written.reference_cold_us) == (None, None, 0.123, None)
    assert list(document_of(written).entries()) == [written]


def test_a_field_without_a_value_is_left_out():
    """Nothing in an entry stands for a missing value: TOML has no null."""
    bare = dataclasses.replace(entry(1), cold_us=None, digests=(), tried="", decided="", tuned_at="")
    lines = render(document_of(bare)).decode().splitlines()
    assert not {"cold_us", "digests", "tried", "decided", "tuned_at"} & {line.split(" = ")[0] for line in lines}
