"""What only two devices can show: each has its own file, and a call runs where its tensors are."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs and a torch built for CUDA", allow_module_level=True)

import kalign_core as kalign  # noqa: E402  # only where there are devices
from kalign_core import ops, settings  # noqa: E402
from kalign_core.errors import MixedDevices  # noqa: E402
from kalign_core.session import Session  # noqa: E402
from kalign_core.tuner.loop import effort_named  # noqa: E402

BOTH = (0, 1)
SIZES = {"T": 64, "H": 1024}
ONLY_ON_ONE = {"T": 64, "H": 512}


def inputs(device: int, sizes: dict[str, int] = SIZES) -> tuple[Any, Any]:
    x, weight = ops.rms_norm.inputs(sizes, "bf16", 0, torch.device("cuda", device))
    return x.detach(), weight.detach()


@pytest.fixture(scope="module")
def boards() -> list[dict[str, str]]:
    """What nvidia-smi says of each board, in its own order, which is PCI's."""
    fields = ("uuid", "pci.bus_id", "driver_version", "pci.device_id")
    asked = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    return [dict(zip(fields, map(str.strip, line.split(",")), strict=True)) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decisions")


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Session]:
    """A session that has tuned one problem on both devices, and another on the second alone.

    The other device is current each time, and has to be afterwards.
    """
    made = Session(configuration=settings.read({"KALIGN_CACHE_DIR": str(folder)}))
    made.observer.effort = effort_named("quick")
    with made.active():
        for device, sizes in ((0, SIZES), (1, SIZES), (1, ONLY_ON_ONE)):
            torch.cuda.set_device(1 - device)
            kalign.tune(ops.rms_norm, *inputs(device, sizes))
            assert torch.cuda.current_device() == 1 - device
        torch.cuda.set_device(0)
        yield made
    made.close()


@pytest.fixture(scope="module")
def files(here: Session) -> list[dict[str, Any]]:
    """The file of each device, by torch's number."""
    assert here.store.flush()
    paths = [here.store.path(here.facts(device).identity) for device in BOTH]
    assert None not in paths
    return [tomllib.loads(Path(str(path)).read_text(encoding="utf-8")) for path in paths]


def test_identity_is_what_the_driver_reports(files: list[dict[str, Any]], boards: list[dict[str, str]]) -> None:
    """Each file names the board that nvidia-smi knows by that UUID: its address, its PCI device and its driver."""
    known = {board["uuid"]: board for board in boards}
    assert {file["device"]["key"] for file in files} <= set(known)
    for file in files:
        device, board = file["device"], known[file["device"]["key"]]
        assert device["pci_bus_id"].lower() == board["pci.bus_id"].lower()
        assert device["pci_device_id"] == f"10de:{board['pci.device_id'].lower().removeprefix('0x')[:4]}"
        assert {chain["driver"] for chain in file["toolchain"].values()} == {board["driver_version"]}


def test_each_uuid_is_listed(files: list[dict[str, Any]]) -> None:
    """`nvidia-smi -L` prints the key of every file."""
    printed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [file["device"]["key"] in printed for file in files] == [True, True]


def test_two_devices_have_two_files(files: list[dict[str, Any]], folder: Path) -> None:
    """What was tuned on one device stands in its own file and not in the other's."""
    assert len(list(folder.glob("*.toml"))) == 2
    problems = [{entry["problem"] for entry in file["entry"]} for file in files]
    assert problems == [{"T<=64 H=1024"}, {"T<=64 H=1024", "T<=64 H=512"}]


@pytest.mark.parametrize("device", BOTH)
def test_a_call_runs_where_its_tensors_are(here: Session, device: int) -> None:
    """Whatever device is current, a call is launched on its tensors' device, and the current one stays current."""
    import triton

    ran_on = []
    hook = lambda metadata: ran_on.append(torch.cuda.current_device())  # noqa: E731
    expected = ops.rms_norm(*(tensor.cpu().cuda(0) for tensor in inputs(device))).cpu()
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        for current in BOTH:
            torch.cuda.set_device(current)
            for mode in ("off", "read"):
                with kalign.using(mode=mode):
                    result = ops.rms_norm(*inputs(device))
                assert (result.device.index, torch.cuda.current_device()) == (device, current)
                assert torch.equal(result.cpu().view(torch.int16), expected.view(torch.int16))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
        torch.cuda.set_device(0)
    assert ran_on == [device] * 4


@pytest.mark.parametrize("device", BOTH)
def test_repeated_calls_keep_to_their_device(here: Session, device: int) -> None:
    """The fast path of a call seen before runs on its tensors' device too, on the stream that is current there."""
    torch.cuda.set_device(1 - device)
    x, weight = inputs(device)
    expected = ops.rms_norm(x, weight)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = ops.rms_norm(x, weight).clone()
    stream.synchronize()
    torch.cuda.set_device(0)
    assert torch.equal(late, expected)


def test_a_decision_serves_its_own_device_alone(here: Session) -> None:
    """What was decided on the second device is a miss on the first."""
    with kalign.using(mode="read"):
        found = [kalign.explain(ops.rms_norm, *inputs(device, ONLY_ON_ONE))[0].why for device in BOTH]
    assert ["decided" in why for why in found] == [False, True]


def test_tensors_of_two_devices_are_refused(here: Session) -> None:
    """A call on tensors of both devices says so rather than copying."""
    with pytest.raises(MixedDevices):
        ops.rms_norm(inputs(0)[0], inputs(1)[1])


SEEN = """
import json, torch
import kalign_core as kalign
from kalign_core import ops, session
here, sizes = session.current(), {"T": 64, "H": 512}
seen = []
for device in here.platform.devices():
    x, weight = (t.detach() for t in ops.rms_norm.inputs(sizes, "bf16", 0, torch.device("cuda", device)))
    identity = here.facts(device).identity
    seen.append([identity.key, str(here.store.path(identity)), kalign.explain(ops.rms_norm, x, weight)[0].why])
print(json.dumps(seen))
"""


@pytest.mark.parametrize("mask", ["1", "1,0", "the second's UUID"])
def test_a_masked_process_names_the_right_file(
    mask: str, here: Session, boards: list[dict[str, str]], folder: Path, child: Callable[..., Any]
) -> None:
    """Under a mask, however written, each device that is left has the file that it has without one."""
    assert here.store.flush()
    visible = boards[1]["uuid"] if "UUID" in mask else mask
    expected = [boards[int(word)]["uuid"] for word in ("1" if "UUID" in mask else mask).split(",")]
    done = child(
        SEEN, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_ORDER="PCI_BUS_ID", KALIGN_CACHE_DIR=str(folder),
        KALIGN_MODE="read",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert [key for key, _, _ in seen] == expected
    by_key = {here.facts(device).identity.key: here.facts(device).identity for device in BOTH}
    assert [path for _, path, _ in seen] == [str(here.store.path(by_key[key])) for key in expected]
    tuned = here.facts(1).identity.key
    assert ["decided" in why for _, _, why in seen] == [key == tuned for key in expected]
