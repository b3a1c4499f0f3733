"""Which NVIDIA device this is, with a fake in place of NVML."""

from __future__ import annotations

from pathlib import Path

import pytest

from kalign_core.records import Identity
from kalign_cuda import identity
from tests.cuda.fakes import FUNCTIONS, Board, FakeNvml, NVMLError, Slice, Unreachable, properties, uuid_of

SLICES = [Slice("MIG-11111111-2222-3333-4444-555555555555", 16, 17920), Slice("MIG-a", 32, 35840, 2, 1)]


# --- who it is ----------------------------------------------------------------------------------------------------


def test_a_whole_board() -> None:
    """A board is named by its UUID and keeps apart what must match from what is only recorded."""
    expected = Identity(
        vendor="nvidia",
        name="NVIDIA H200",
        key=f"GPU-{uuid_of(0)}",
        pci_device_id="10de:2335",
        must_match=(("arch", "sm_90"), ("multiprocessors", 132), ("memory_gib", 139)),
        provenance=(
            ("pci_bus_id", "0000007F:C0:00.0"),
            ("vbios", "96.00.A5.00.1A"),
            ("power_limit_w", 700),
            ("ecc", "on"),
        ),
    )
    assert identity.identity(properties(), FakeNvml(Board())) == expected


MASKS = (
    None, "", "-1", "3,1", f"GPU-{uuid_of(2)}", "GPU-3f597b0b", "MIG-11111111-2222-3333-4444-555555555555",
    f"MIG-GPU-{uuid_of(2)}/1/0", "0,,1", "0,0", "1gpu2", "NoDevFiles",
)  # fmt: skip


@pytest.mark.parametrize("order", [None, "PCI_BUS_ID", "FASTEST_FIRST"])
@pytest.mark.parametrize("mask", MASKS)
def test_visibility_is_the_run_time_s_business(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, order: str | None
) -> None:
    """Whatever CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER say, torch's properties alone decide which board it is."""
    for name, value in (("CUDA_VISIBLE_DEVICES", mask), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    nvml = FakeNvml(*(Board(number) for number in (3, 2, 1, 0)))
    found = identity.identity(properties(2), nvml)
    assert (found.key, dict(found.provenance)["pci_bus_id"]) == (f"GPU-{uuid_of(2)}", "0000007F:C2:00.0")


def test_boards_of_different_kind() -> None:
    """Of two kinds of board in one machine each gets its own PCI device id, whatever NVML's order."""
    nvml = FakeNvml(Board(1, "NVIDIA A100", 0x20B210DE), Board(0))
    found = [identity.identity(properties(number), nvml).pci_device_id for number in (0, 1)]
    assert found == ["10de:2335", "10de:20b2"]


def test_more_boards_than_the_container_has() -> None:
    """A board that NVML lists and torch does not see changes nothing."""
    alone = identity.identity(properties(4), FakeNvml(Board(4)))
    assert identity.identity(properties(4), FakeNvml(*(Board(n) for n in range(5)))) == alone


def test_a_board_without_uuid_is_found_by_address() -> None:
    """Where torch gives no UUID the PCI address finds the board, and NVML's UUID names it."""
    assert identity.identity(properties(uuid=None), FakeNvml(Board(1), Board(0))).key == f"GPU-{uuid_of(0)}"


@pytest.mark.parametrize("uuid", ["00000000-0000-0000-0000-000000000000", "", "garbage", b"\xff\xfe", 7])
def test_a_uuid_that_is_none_is_not_used(uuid: object) -> None:
    """A zero or malformed UUID names no device: without NVML it stays unknown and nothing may be stored for it."""
    found = identity.identity(properties(uuid=uuid), Unreachable())
    assert (found.known, ("uuid", "unknown") in found.must_match) == (False, True)


def test_unnamed_devices_differ_in_memory() -> None:
    """Two devices without UUID have different keys, so that what one decides in memory does not serve the other."""
    keys = {identity.identity(properties(n, uuid=None), Unreachable()).key for n in (0, 1)}
    assert len(keys) == 2


# --- slices -------------------------------------------------------------------------------------------------------


def test_a_slice_by_its_uuid() -> None:
    """A MIG slice is named by its own UUID, and its profile must match."""
    board = Board(slices=SLICES)
    seen = properties(uuid=SLICES[0].uuid.removeprefix("MIG-"), multi_processor_count=16, total_memory=17920 * 2**20)
    found = identity.identity(seen, FakeNvml(board))
    assert (found.key, dict(found.must_match)["mig"]) == (SLICES[0].uuid, "1g.18gb")


def test_a_slice_under_its_board_s_uuid() -> None:
    """Where torch gives the board's UUID and MIG is on, the one slice of torch's size is meant, not the board."""
    seen = properties(multi_processor_count=32, total_memory=35000 * 2**20)
    found = identity.identity(seen, FakeNvml(Board(slices=SLICES)))
    assert (found.key, dict(found.must_match)["mig"]) == ("MIG-a", "1c.2g.35gb")


def test_equal_slices_are_told_apart_by_uuid() -> None:
    """Where torch gives a slice's own UUID its twin of the same size does not matter."""
    twins = [Slice(f"MIG-{uuid_of(number)}", 16, 17920) for number in (8, 9)]
    seen = properties(uuid=uuid_of(9), multi_processor_count=16, total_memory=17920 * 2**20)
    found = identity.identity(seen, FakeNvml(Board(slices=twins)))
    assert (found.key, found.known) == (f"MIG-{uuid_of(9)}", True)


def test_slices_that_cannot_be_told_apart() -> None:
    """Two slices of torch's size leave the device unknown: nothing is stored rather than stored for the wrong one."""
    twins = [Slice("MIG-a", 16, 17920), Slice("MIG-b", 16, 17920)]
    seen = properties(multi_processor_count=16, total_memory=17920 * 2**20)
    found = identity.identity(seen, FakeNvml(Board(slices=twins)))
    assert (found.known, dict(found.must_match)["mig"]) == (False, "unknown")


def test_a_slice_is_not_its_board() -> None:
    """A slice and the whole board have different files and different units."""
    whole = identity.identity(properties(), FakeNvml(Board()))
    seen = properties(uuid=SLICES[0].uuid[4:], multi_processor_count=16, total_memory=17920 * 2**20)
    part = identity.identity(seen, FakeNvml(Board(slices=SLICES)))
    assert whole.file_stem != part.file_stem
    assert dict(whole.must_match)["multiprocessors"] != dict(part.must_match)["multiprocessors"]


# --- without NVML -------------------------------------------------------------------------------------------------


def test_torch_and_the_kernel_are_enough(sys_tree: Path) -> None:
    """Without NVML, torch and the kernel's files name the device as NVML would, and it may be stored for."""
    found = identity.identity(properties(), Unreachable(), sys_tree)
    asked = identity.identity(properties(), FakeNvml(Board()))
    assert found.known
    assert (found.key, found.pci_device_id, found.must_match) == (asked.key, asked.pci_device_id, asked.must_match)


def test_torch_alone_is_not_stored_for(tmp_path: Path) -> None:
    """Where neither NVML nor the kernel tells the PCI device, it is unknown and equals nothing."""
    found = identity.identity(properties(), Unreachable(), tmp_path)
    assert (found.pci_device_id, found.known) == ("unknown", False)


@pytest.mark.parametrize("missing", ["major", "multi_processor_count", "total_memory"])
def test_what_torch_does_not_say_is_unknown(missing: str) -> None:
    """A property that torch lacks is unknown, not absent."""
    found = identity.identity(properties(**{missing: None}), FakeNvml(Board()))
    assert not found.known


def test_no_properties_at_all(tmp_path: Path) -> None:
    """Anything may be passed as properties: nothing raises, nothing is known."""
    assert not identity.identity(object(), FakeNvml(Board()), tmp_path).known


ERRORS = (
    NVMLError("Not Supported"), NVMLError("Unknown Error"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    AttributeError("nvmlErrorFunctionNotFound"), TypeError("expected bytes"), SystemExit(1),
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_call_may_fail(function: str, error: BaseException, sys_tree: Path) -> None:
    """Whichever call raises whatever, the device keeps its key and its PCI device id."""
    found = identity.identity(properties(), FakeNvml(Board(), failing={function: error}), sys_tree)
    assert (found.key, found.pci_device_id) == (f"GPU-{uuid_of(0)}", "10de:2335")


@pytest.mark.parametrize("name", [b"\xff\xfe", "", b"NVIDIA H200", 7, None])
def test_a_strange_name_changes_neither_key_nor_name(name: object) -> None:
    """What NVML calls the board is never part of what it is."""
    found = identity.identity(properties(), FakeNvml(Board(name=name)))
    assert (found.key, found.name) == (f"GPU-{uuid_of(0)}", "NVIDIA H200")


def test_another_name_is_recorded_only() -> None:
    """A name that differs from torch's is kept as provenance, which is never compared."""
    found = identity.identity(properties(), FakeNvml(Board(name="NVIDIA H200 141GB")))
    assert ("nvml_name", "NVIDIA H200 141GB") in found.provenance
