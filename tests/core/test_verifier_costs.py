"""What the gate takes: steps on the device per candidate, and memory beside the problem's own. Counted, never timed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kalign_core.declare import Kernel, cdiv
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_backward_kernel, rms_norm_kernel
from kalign_core.kernels.swiglu import swiglu_kernel
from kalign_core.records import Case, DeviceModel
from kalign_core.verifier import bench as benches
from kalign_core.verifier import checks, compare, flight, making, reference
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from kalign_core.verifier.variants import dense_problem
from tests.core.verifier_samples import FAMILIES

# Looking at memory another way, or taking it, launches nothing; reading a number back waits for the device.
FREE = ("view", "slice", "as_strided", "select", "expand", "detach", "alias", "permute", "unsqueeze", "empty")
WAITS = ("_local_scalar_dense", "equal")
# An allocator rounds, so that a tenth is left of what is asked for; what is nothing but output cannot do with less.
MOST_MEMORY, MOST_MEMORY_OF_OUTPUTS = 2.0, 2.2


class Counted(TorchDispatchMode):
    """Counts the steps that a device would be given by name, and the bytes alive at the peak, torch's own included."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Counter[str] = Counter()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.steps.update(() if name in FREE else (name,))
        if name == "sum" and args[0].dim() == 2 and list(args[1]) == [0]:
            self.peak = max(self.peak, self.alive + scratch_bytes(*args[0].shape))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._met(tensor.untyped_storage())
        return made

    def _met(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def scratch_bytes(rows: int, columns: int, multiprocessors: int = 132, threads: int = 2048) -> int:
    """What torch takes on a GPU to add four-byte numbers down the columns of a table whose width is a multiple of four.

    As ``setReduceConfig`` and ``global_memory_size`` of aten/src/ATen/native/cuda/Reduce.cuh say for warps of 32.
    """
    vector = 4
    most = 512 // vector
    width = min(1 << (columns // vector).bit_length() - 1, 32)
    height = min(1 << rows.bit_length() - 1, most // width)
    width = min(1 << (columns // vector).bit_length() - 1, most // height)
    each, blocks = cdiv(rows, height), cdiv(columns // vector, width)
    at_once = multiprocessors * (threads // (width * height))
    if rows < min(16 * height, 256) or each < 256 or blocks > at_once:
        return 0
    parts = max(min(cdiv(at_once, blocks), cdiv(each, 16)), cdiv(each, 256))
    return 4 * columns * parts * width * vector if parts > 1 else 0


class Gpu(CpuPlatform):
    """The host, calling itself a device."""

    def model(self, device: int) -> DeviceModel:
        return DeviceModel("cuda", "sm_90", 32, 32, 232448)

    def free_bytes(self, device: int) -> int | None:
        return 1 << 30


@pytest.fixture(autouse=True)
def _every_launch_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has neither graphs nor streams."""
    plain = flight.ready
    monkeypatch.setattr(
        benches, "ready", lambda platform, device, launch, args, how: plain(platform, -1, launch, args, "")
    )


def constant(*args: Any) -> None:
    """A kernel that writes ones everywhere and takes no memory."""
    for out in args[-1]:
        out.fill_(1.0)


def gate_for(kernel: Kernel, dims: Mapping[str, int], dtype: str = "bf16", *, strict: bool = False) -> tuple[Gate, Any]:
    """A gate whose reference writes ones, and a launch that does the same."""
    dtypes = {name: "fp32" if name == "rstd" else "none" if name == "bias" else dtype for name in kernel.args}
    bench = Bench(Gpu(), kernel, dense_problem(kernel, dims, dtypes, {"eps": 1e-6}), -1, strict=strict)
    bench.families.update(FAMILIES)
    written = [kernel.parameters.index(name) for name in kernel.outputs()]
    launch = Fixed(lambda *args: constant([args[at] for at in written]))
    return Gate(bench, launch, CORE_CHECKS), launch


def further(gate: Gate, launch: Any) -> Counter[str]:
    """Steps that a second candidate adds to the suite of the first, by name."""
    steps: list[Counter[str]] = []
    for count in (1, 1, 2):  # the first time for what is kept from then on
        gate.bench.renew_inputs()
        with Counted() as counted:
            verdicts = gate.examine([launch] * count)
        assert not any(verdict.refutation for verdict in verdicts)
        steps.append(counted.steps)
    return steps[2] - steps[1]


def asked(gate: Gate) -> list[Case]:
    """The cases that candidates are held to."""
    return [case for check in gate.checks for case in check.cases(gate.bench)]


@pytest.mark.parametrize(
    ("kernel", "dims"), [(rms_norm_kernel, {"T": 70, "H": 64}), (rms_norm_backward_kernel, {"T": 70, "H": 64})]
)
def test_a_further_candidate_costs_four_steps_a_run_however_many_inputs_there_are(
    kernel: Kernel, dims: Mapping[str, int]
) -> None:
    """Clear, launch, compare and fold; inputs are compared along with outputs where memory allows it."""
    gate, launch = gate_for(kernel, dims)
    steps, cases = further(gate, launch), asked(gate)
    runs = sum(case.repeats for case in cases)
    outputs = len([name for name in kernel.outputs() if gate.bench.problem.argument(name).is_tensor])
    again = sum(case.repeats > 1 for case in cases)  # the answers of several runs are folded into one
    assert steps["fill_"] == (1 + outputs) * runs  # the launch here fills its outputs one by one
    assert (steps["ne"], steps["any"], steps["stack"]) == (runs, runs + again, again)
    assert steps["sum"] == 0


def test_a_candidate_is_waited_for_once_a_case_however_often_it_is_launched() -> None:
    """A device that is waited for after every run stands still until the host has queued the next one."""
    gate, launch = gate_for(rms_norm_kernel, {"T": 70, "H": 64})
    steps, cases = further(gate, launch), asked(gate)
    random_states = sum(case.check == "written bytes" for case in cases)
    assert sum(case.repeats for case in cases) > len(cases) + 40
    assert sum(steps[name] for name in WAITS) == len(cases) + random_states


@pytest.fixture
def scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken however small the problem is as much smaller as the problems here are."""
    monkeypatch.setattr(benches, "LEAST_MEMORY_BYTES", 0)
    monkeypatch.setattr(making, "_LEAST_BLOCK", 1 << 10)
    monkeypatch.setattr(reference, "_LEAST_BLOCK_ELEMENTS", 1 << 10)
    monkeypatch.setattr(compare, "_CHUNK", 1 << 11)
    for name, size in (("_ROWS", 16), ("_ROUND_BYTES", 256), ("GUARD_BYTES", 64)):
        monkeypatch.setattr(compare, name, size)


ROWS = {"T": 128, "H": 256}


@pytest.mark.parametrize(
    ("kernel", "dims", "strict", "most"),
    [
        (rms_norm_kernel, ROWS, False, MOST_MEMORY),
        (rms_norm_kernel, ROWS, True, MOST_MEMORY),
        (rms_norm_backward_kernel, ROWS, False, MOST_MEMORY),
        (swiglu_kernel, {"T": 128, "F": 256}, False, MOST_MEMORY),
        (matmul_kernel, {"M": 16, "N": 256, "K": 256}, False, MOST_MEMORY),
        (matmul_kernel, {"M": 512, "N": 512, "K": 16}, True, MOST_MEMORY_OF_OUTPUTS),
        (matmul_kernel, {"M": 192, "N": 192, "K": 192}, False, MOST_MEMORY),
    ],
)
@pytest.mark.usefixtures("scaled_down")
def test_the_gate_takes_no_more_than_twice_the_problems_memory(
    kernel: Kernel, dims: Mapping[str, int], strict: bool, most: float
) -> None:
    """Whichever of the problem's tensors are the large ones, what comparing takes included, far offsets apart."""
    gate, launch = gate_for(kernel, dims, strict=strict)
    gate.bench.drop_variant("far")
    with Counted() as counted:
        gate.check_reference()
        verdicts = gate.examine([launch, launch])
    assert not any(verdict.refutation for verdict in verdicts)
    assert counted.peak <= most * gate.bench.bytes_per_set()


@pytest.mark.usefixtures("scaled_down")
def test_large_inputs_are_sealed_only_where_a_case_has_no_memory_for_two_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps for each of these and candidate; most cases have few rows, and so memory to spare."""
    monkeypatch.setattr(checks, "_elements", lambda bench: 1 << 11)
    gate, launch = gate_for(rms_norm_backward_kernel, {"T": 1024, "H": 16})
    cases = asked(gate)
    shared = [len(gate.bench.inputs(case)) - len(gate.bench.room(case).own) for case in cases]
    assert further(gate, launch)["sum"] == 2 * sum(shared)
    assert 0 < sum(map(bool, shared)) <= len(cases) / 4


@pytest.mark.parametrize(
    ("kernel", "dims"), [(rms_norm_kernel, {"T": 4096, "H": 4096}), (matmul_kernel, {"M": 16, "N": 4096, "K": 4096})]
)
def test_an_imprint_of_a_large_input_takes_no_memory_worth_mentioning(kernel: Kernel, dims: Mapping[str, int]) -> None:
    """What torch takes by itself to add up 32 MiB on a GPU counts as well."""
    gate, launch = gate_for(kernel, dims)
    with Counted() as counted:
        assert gate.one_case(launch) is None
    assert counted.steps["sum"] > 0
    assert counted.peak <= MOST_MEMORY * gate.bench.bytes_per_set()


def test_adding_down_few_rows_takes_no_scratch_memory() -> None:
    """Down many, tens of MiB: what a GPU was seen to take for tables of 32 and 96 MiB that were 4,096 words wide."""
    assert [scratch_bytes(rows, 4096) >> 20 for rows in (2050, 6146)] == [66, 132]
    assert [scratch_bytes(256, width) for width in (4, 64, 1 << 13, 1 << 15, 1 << 20)] == [0] * 5
