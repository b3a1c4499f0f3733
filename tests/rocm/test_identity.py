"""Which AMD device this is, with a fake in place of amdsmi."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kalign_core.records import Identity
from kalign_rocm import identity
from tests.rocm.fakes import (
    FUNCTIONS,
    MACHINE,
    AmdSmiException,
    FakeSmi,
    Processor,
    Unreachable,
    parts,
    properties,
)

CPX = {"multi_processor_count": 38}


# --- who it is ----------------------------------------------------------------------------------------------------


def test_a_whole_board(machine: Path) -> None:
    """A board is named by machine, PCI address, PCI device id and partition; names and firmware are only recorded."""
    expected = Identity(
        vendor="amd",
        name="AMD Instinct MI300X",
        key=f"{MACHINE}/0000:60:00/1002:74a1/SPX-NPS1",
        pci_device_id="1002:74a1",
        must_match=(
            ("arch", "gfx942"),
            ("units", 304),
            ("memory_gib", 191),
            ("compute_partition", "SPX"),
            ("memory_partition", "NPS1"),
        ),
        provenance=(("pci_bus_id", "0000:60:00"), ("vbios", "022.040.003"), ("power_limit_w", 750)),
    )
    assert identity.identity(properties(), FakeSmi(Processor()), machine) == expected


MASKS = (
    {}, {"HIP_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": ""}, {"ROCR_VISIBLE_DEVICES": "1,0"},
    {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1,0"}, {"CUDA_VISIBLE_DEVICES": "3,1"},
    {"ROCR_VISIBLE_DEVICES": "GPU-1d37e1c4ab1a2d0e"}, {"HIP_VISIBLE_DEVICES": "-1"},
)  # fmt: skip


@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_visibility_is_the_run_time_s_business(masks: dict[str, str], machine: Path) -> None:
    """Where addresses differ the masks are not looked at: torch's PCI address decides, whatever amdsmi's order."""
    smi = FakeSmi(Processor(1, hip_id=0, device="0x74a5"), Processor(0, hip_id=1))
    found = [identity.identity(properties(n), smi, machine, 0, masks).pci_device_id for n in (0, 1)]
    assert found == ["1002:74a1", "1002:74a5"]


@pytest.mark.parametrize("name", ["AMD Instinct MI308X", b"MI308X", "N/A", b"\xff\xfe", "", None, 7])
def test_a_market_name_changes_nothing(name: object, machine: Path) -> None:
    """A board that is sold under several names has one key."""
    plain = identity.identity(properties(), FakeSmi(Processor()), machine)
    assert identity.identity(properties(), FakeSmi(Processor(market_name=name)), machine).key == plain.key


@pytest.mark.parametrize("device", ["0x74a1", "74A1", 0x74A1])
def test_device_ids_are_text_or_numbers(device: object, machine: Path) -> None:
    """The PCI device id is the same whichever way a release of amdsmi writes it."""
    found = identity.identity(properties(), FakeSmi(Processor(device=device)), machine)
    assert found.pci_device_id == "1002:74a1"


def test_two_machines_are_two_devices(machine: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Boards in the same slot of two machines have different keys."""
    other = tmp_path_factory.mktemp("other")
    (other / "etc").mkdir()
    (other / "etc/machine-id").write_text("f" * 32, encoding="ascii")
    smi = FakeSmi(Processor())
    assert identity.identity(properties(), smi, machine).key != identity.identity(properties(), smi, other).key


def test_a_machine_without_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no machine id the host name stands for it."""
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    assert identity.identity(properties(), FakeSmi(Processor()), tmp_path).key.startswith("node7/")


def test_the_same_architecture_with_other_memory(machine: Path) -> None:
    """MI300X and MI325X share their architecture and differ in what must match."""
    other = identity.identity(properties(total_memory=256 * 2**30), FakeSmi(Processor(device="0x74a5")), machine)
    assert (other.pci_device_id, dict(other.must_match)["memory_gib"]) == ("1002:74a5", 256)


# --- partitions ---------------------------------------------------------------------------------------------------


def part_of(smi: FakeSmi, index: int, masks: dict[str, str], root: Path, **changes: Any) -> Identity:
    return identity.identity(properties(**{**CPX, **changes}), smi, root, index, masks)


SAME_ADDRESS = {
    "no mask": (3, {}, "3"),
    "hip": (0, {"HIP_VISIBLE_DEVICES": "5"}, "5"),
    "rocr": (1, {"ROCR_VISIBLE_DEVICES": "7,6"}, "6"),
    "rocr, then hip": (0, {"ROCR_VISIBLE_DEVICES": "4,2", "HIP_VISIBLE_DEVICES": "1"}, "2"),
    "cuda's name": (0, {"CUDA_VISIBLE_DEVICES": "1"}, "1"),
    "hip before cuda": (0, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "6"}, "6"),
    "an empty one is none": (2, {"HIP_VISIBLE_DEVICES": ""}, "2"),
}


@pytest.mark.parametrize(("index", "masks", "expected"), SAME_ADDRESS.values(), ids=SAME_ADDRESS)
def test_parts_of_one_board(index: int, masks: dict[str, str], expected: str, machine: Path) -> None:
    """Parts share an address; the run time's number, with both masks undone, tells them apart."""
    smi = FakeSmi(*reversed(parts(0, 0)))
    found = part_of(smi, index, masks, machine)
    assert (found.known, dict(found.must_match)["partition"]) == (True, expected)


def test_parts_before_hip_numbers(machine: Path) -> None:
    """Releases without the run time's number are matched in the order of the kernel's nodes."""
    smi = FakeSmi(*reversed(parts(0, 0, hip_id=None)))
    assert dict(part_of(smi, 3, {}, machine).must_match)["partition"] == "3"


AMBIGUOUS = {
    "a mask by UUID": (0, {"HIP_VISIBLE_DEVICES": "GPU-1d37e1c4ab1a2d0e"}),
    "a mask that is too short": (2, {"HIP_VISIBLE_DEVICES": "1,0"}),
    "a mask that is garbage": (0, {"ROCR_VISIBLE_DEVICES": "1gpu"}),
    "a number that another board has": (9, {}),
}


@pytest.mark.parametrize(("index", "masks"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_parts_that_cannot_be_told_apart(index: int, masks: dict[str, str], sys_tree: Path) -> None:
    """Where it is not certain which part it is, nothing is matched, and nothing may be stored for it."""
    (sys_tree / "sys/bus/pci/devices/0000:60:00.0/current_compute_partition").write_text("CPX\n", encoding="ascii")
    smi = FakeSmi(*parts(0, 0), *parts(1, 8))
    found = part_of(smi, index, masks, sys_tree)
    assert (found.known, dict(found.must_match)["partition"]) == (False, "unknown")


def test_parts_and_numbers_missing_everywhere(sys_tree: Path) -> None:
    """Without the run time's number and without node numbers parts are not matched by their place in a list."""
    (sys_tree / "sys/bus/pci/devices/0000:60:00.0/current_compute_partition").write_text("CPX\n", encoding="ascii")
    smi = FakeSmi(*parts(0, 0, hip_id=None, node_id=None))
    assert not part_of(smi, 3, {}, sys_tree).known


def test_each_part_has_its_own_key(machine: Path) -> None:
    """Eight parts of a board are eight devices."""
    smi = FakeSmi(*parts(0, 0))
    assert len({part_of(smi, index, {}, machine).key for index in range(8)}) == 8


def test_a_repartitioned_board_is_another_device(machine: Path) -> None:
    """The same board in SPX and in CPX, in NPS1 and in NPS4, never shares entries."""
    modes = [("SPX", "NPS1"), ("CPX", "NPS1"), ("CPX", "NPS4")]
    found = {identity.identity(properties(), FakeSmi(Processor(compute=c, memory=m)), machine).key for c, m in modes}
    assert len(found) == 3


def test_a_board_without_partitions(machine: Path) -> None:
    """A board that has no partitions has no field for them, and is known."""
    refuse: dict[str, BaseException] = {
        "amdsmi_get_gpu_compute_partition": AmdSmiException("not supported"),
        "amdsmi_get_gpu_memory_partition": AmdSmiException("not supported"),
    }
    found = identity.identity(properties(gcnArchName="gfx90a"), FakeSmi(Processor(), failing=refuse), machine)
    assert (found.known, [name for name, _ in found.must_match]) == (True, ["arch", "units", "memory_gib"])


# --- without amdsmi -----------------------------------------------------------------------------------------------


def test_torch_and_the_kernel_are_enough(sys_tree: Path) -> None:
    """Without amdsmi, torch and the kernel's files name the device as amdsmi would, and it may be stored for."""
    found = identity.identity(properties(), Unreachable(), sys_tree)
    asked = identity.identity(properties(), FakeSmi(Processor()), sys_tree)
    assert found.known
    assert (found.key, found.must_match) == (asked.key, asked.must_match)


def test_handles_are_gone(sys_tree: Path) -> None:
    """A library that lists no device, as some do once the run time is loaded, is as good as none."""
    assert identity.identity(properties(), FakeSmi(), sys_tree).known


def test_torch_alone_is_not_stored_for(machine: Path) -> None:
    """Where neither amdsmi nor the kernel tells the PCI device, it is unknown and equals nothing."""
    found = identity.identity(properties(), Unreachable(), machine)
    assert (found.pci_device_id, found.known) == ("unknown", False)


def test_a_torch_without_addresses(machine: Path) -> None:
    """A torch that gives no PCI address is served where there is one device, which needs no telling apart."""
    found = identity.identity(properties(pci_bus_id=None), FakeSmi(Processor()), machine)
    assert found.key == identity.identity(properties(), FakeSmi(Processor()), machine).key


def test_a_torch_without_addresses_on_two_boards(machine: Path) -> None:
    """With two devices the run time's number decides in their place."""
    smi = FakeSmi(Processor(1, hip_id=1), Processor(0, hip_id=0))
    found = identity.identity(properties(pci_bus_id=None), smi, machine, 1, {})
    assert dict(found.provenance)["pci_bus_id"] == "0000:61:00"


def test_no_properties_at_all(tmp_path: Path) -> None:
    """Anything may be passed as properties: nothing raises, nothing is known."""
    assert not identity.identity(object(), FakeSmi(), tmp_path).known


ERRORS = (
    AmdSmiException("not supported"), KeyError("libamd_smi.so"), AttributeError("undefined symbol"),
    OSError("cannot open shared object"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), SystemExit(1),
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_any_call_may_fail(function: str, error: BaseException, sys_tree: Path) -> None:
    """Whichever call raises whatever, the device keeps its key and its PCI device id."""
    plain = identity.identity(properties(), FakeSmi(Processor()), sys_tree)
    found = identity.identity(properties(), FakeSmi(Processor(), failing={function: error}), sys_tree)
    assert (found.key, found.pci_device_id) == (plain.key, plain.pci_device_id)
