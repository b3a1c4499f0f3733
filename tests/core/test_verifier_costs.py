"""What the gate takes: steps on the device per candidate, and memory beside the problem's own. Counted, never timed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kalign_core.declare import Kernel
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_backward_kernel, rms_norm_kernel
from kalign_core.kernels.swiglu import swiglu_kernel
from kalign_core.records import DeviceModel
from kalign_core.verifier import bench as benches
from kalign_core.verifier import compare, flight, making, reference
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from kalign_core.verifier.variants import dense_problem
from tests.core.verifier_samples import FAMILIES

# Looking at memory another way, or taking it, launches nothing.
FREE = ("view", "slice", "as_strided", "select", "expand", "detach", "alias", "permute", "unsqueeze", "empty")
MOST_MEMORY = 2.2


class Counted(TorchDispatchMode):
    """Counts the steps that a device would be given, and the bytes alive at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.steps += func.overloadpacket.__name__ not in FREE
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


def test_a_further_candidate_costs_three_steps_a_run_and_two_for_each_input_of_a_case() -> None:
    """Clear, launch and compare; the seal of the inputs once per case. Inputs and reference are shared."""
    gate, launch = gate_for(rms_norm_kernel, {"T": 70, "H": 64})
    cases = [case for check in gate.checks for case in check.cases(gate.bench)]
    steps = []
    for count in (1, 1, 2):  # the first time for what is kept from then on
        gate.bench.renew_inputs()
        with Counted() as counted:
            gate.examine([launch] * count)
        steps.append(counted.steps)
    outputs, inputs = 2, 2  # the launch here fills its outputs one by one
    runs = sum(case.repeats for case in cases)
    random_states = sum(case.check == "written bytes" for case in cases)
    assert steps[2] - steps[1] == (2 + outputs) * runs + 2 * inputs * len(cases) + random_states


@pytest.fixture
def scaled_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken however small the problem is as much smaller as the problems here are."""
    monkeypatch.setattr(benches, "LEAST_MEMORY_BYTES", 0)
    monkeypatch.setattr(making, "_LEAST_BLOCK", 1 << 10)
    monkeypatch.setattr(reference, "_LEAST_BLOCK_ELEMENTS", 1 << 10)
    monkeypatch.setattr(compare, "_CHUNK", 1 << 11)
    for name, size in (("_FOLD", 64), ("_ROW_BYTES", 256), ("_ROUND_BYTES", 512), ("GUARD_BYTES", 64)):
        monkeypatch.setattr(compare, name, size)


ROWS = {"T": 128, "H": 256}


@pytest.mark.parametrize(
    ("kernel", "dims", "strict"),
    [
        (rms_norm_kernel, ROWS, False),
        (rms_norm_kernel, ROWS, True),
        (rms_norm_backward_kernel, ROWS, False),
        (swiglu_kernel, {"T": 128, "F": 256}, False),
        (matmul_kernel, {"M": 16, "N": 256, "K": 256}, False),
        (matmul_kernel, {"M": 512, "N": 512, "K": 16}, True),
        (matmul_kernel, {"M": 192, "N": 192, "K": 192}, False),
    ],
)
@pytest.mark.usefixtures("scaled_down")
def test_the_gate_takes_little_more_than_twice_the_problems_memory(
    kernel: Kernel, dims: Mapping[str, int], strict: bool
) -> None:
    """At most 2.2 times the problem's tensors, whichever of them are the large ones, offsets past 2**31 apart."""
    gate, launch = gate_for(kernel, dims, strict=strict)
    gate.bench.drop_variant("far")
    with Counted() as counted:
        gate.check_reference()
        gate.examine([launch, launch])
    own = gate.bench.bytes_per_set()
    outputs = sum(gate.bench.bytes_of(gate.bench.problem, gate.bench.problem.argument(n)) for n in kernel.outputs())
    assert counted.peak + outputs / 8 <= MOST_MEMORY * own  # a device compares into a byte for every eight
