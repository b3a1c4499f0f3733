"""Launching: the bytes are right, they are in the tensors of this call, and nothing else has changed.

Every rule is tried with a kernel on integers whose result is known; what a device computes with floating-point numbers
is the verifier's to find out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch, Platform
from kalign_core.records import Condition
from kalign_core.testing.identity import IdentityRules

if TYPE_CHECKING:
    import torch

    from kalign_core.declare import Kernel

ROWS, COLUMNS, STEPS = 8, 24, 3


class Ground:
    """One device of a platform, and what it takes to launch the conformance kernels there."""

    def __init__(self, platform: Platform, device: int) -> None:
        import torch

        from kalign_core.testing import kernels

        self.platform, self.device, self.kernels = platform, device, kernels
        self.place = torch.device(platform.device_type, *((device,) if device >= 0 else ()))

    def numbers(self, rows: int = ROWS, columns: int = COLUMNS, start: int = 0) -> torch.Tensor:
        """Whole numbers that are all different: ``(rows columns)`` int32."""
        import torch

        made = torch.arange(start, start + rows * columns, dtype=torch.int32)
        return made.view(rows, columns).to(self.place)

    def blank(self, rows: int = ROWS, columns: int = COLUMNS) -> torch.Tensor:
        """Memory for a result, filled with -1: ``(rows columns)`` int32."""
        import torch

        return torch.full((rows, columns), -1, dtype=torch.int32, device=self.place)

    def bound(self, x: torch.Tensor, out: torch.Tensor, steps: int = STEPS, kernel: Kernel | None = None) -> Launch:
        """The reference launch of ``stir``, or of ``kernel``, bound for arguments such as these."""
        from kalign_core.problems import problem_of

        kernel, args = kernel or self.kernels.stir_kernel, self.kernels.arguments(x, out, steps)
        problem = problem_of(kernel, args, "train")
        return self.platform.launcher(kernel, problem, kernel.reference_config(problem), args)

    def run(self, launch: Launch, x: torch.Tensor, out: torch.Tensor, steps: int = STEPS) -> None:
        """Launch once and wait for it."""
        launch(*self.kernels.arguments(x, out, steps))
        self.platform.synchronize(self.device)

    def assert_stirred(self, out: torch.Tensor, x: torch.Tensor, steps: int = STEPS) -> None:
        """Assert that ``out`` holds what the kernel gives for ``x``."""
        assert out.cpu().tolist() == self.kernels.stirred(x, steps).tolist()


class LaunchRules(IdentityRules):
    """Rules for the launcher, and for what a platform says of the device while it works."""

    @pytest.fixture
    def ground(self, platform: Platform, device: int) -> Ground:
        """The device, ready to be launched on."""
        return Ground(platform, device)

    # --- the launcher ---------------------------------------------------------------------------------------------

    def test_a_launch_writes_the_right_bytes(self, ground: Ground) -> None:
        """A bound launch runs the kernel: every element of the output is what the kernel says."""
        x, out = ground.numbers(), ground.blank()
        ground.run(ground.bound(x, out), x, out)
        ground.assert_stirred(out, x)

    def test_a_launch_uses_the_tensors_it_is_given(self, ground: Ground) -> None:
        """Bound for one set of tensors, a launch reads and writes those it is called with and no others."""
        x, out = ground.numbers(), ground.blank()
        launch = ground.bound(x, out)
        other_x, other_out = ground.numbers(start=1000), ground.blank()
        ground.run(launch, other_x, other_out)
        ground.assert_stirred(other_out, other_x)
        assert set(out.flatten().tolist()) == {-1}

    @pytest.mark.parametrize("rows", [1, 5, 8])
    def test_a_launch_serves_its_bucket(self, ground: Ground, rows: int) -> None:
        """Bound for eight rows, a launch serves any number up to there: the grid follows the call."""
        launch = ground.bound(ground.numbers(), ground.blank())
        x, memory = ground.numbers(rows), ground.blank()
        ground.run(launch, x, memory[:rows])
        ground.assert_stirred(memory[:rows], x)
        assert set(memory[rows:].flatten().tolist()) <= {-1}

    def test_a_launch_follows_strides(self, ground: Ground) -> None:
        """Rows that are further apart than they are long are read and written where they are."""
        wide, memory = ground.numbers(columns=2 * COLUMNS), ground.blank(columns=2 * COLUMNS)
        x, out = wide[:, :COLUMNS], memory[:, :COLUMNS]
        ground.run(ground.bound(x, out), x, out)
        ground.assert_stirred(out, x)
        assert set(memory[:, COLUMNS:].flatten().tolist()) == {-1}

    def test_a_launch_passes_numbers(self, ground: Ground) -> None:
        """A number of the call reaches the kernel: the same kernel with another number of steps gives other bytes."""
        x, out = ground.numbers(), ground.blank()
        for steps in (1, 2, 16):
            ground.run(ground.bound(x, out, steps), x, out, steps)
            ground.assert_stirred(out, x, steps)

    def test_a_launch_leaves_its_inputs_alone(self, ground: Ground) -> None:
        """The input is the same bytes afterwards."""
        x, out = ground.numbers(), ground.blank()
        ground.run(ground.bound(x, out), x, out)
        assert x.tolist() == ground.numbers().tolist()

    def test_a_launch_can_be_repeated(self, ground: Ground) -> None:
        """The third launch of one binding gives what the first gave."""
        x, out = ground.numbers(), ground.blank()
        launch = ground.bound(x, out)
        for _ in range(3):
            ground.run(launch, x, out.fill_(-1))
            ground.assert_stirred(out, x)

    def test_bindings_do_not_disturb_each_other(self, ground: Ground) -> None:
        """Two bindings of one kernel, launched in turn, each do their own work."""
        x, out = ground.numbers(), ground.blank()
        launches = {steps: ground.bound(x, out, steps) for steps in (2, 5)}
        for steps in (2, 5, 2):
            ground.run(launches[steps], x, out, steps)
            ground.assert_stirred(out, x, steps)

    def test_an_empty_call_launches_nothing(self, ground: Ground) -> None:
        """A call without rows is no error and writes nothing."""
        x, out = ground.numbers(), ground.blank()
        launch = ground.bound(x, out)
        ground.run(launch, x[:0], out[:0])
        assert set(out.flatten().tolist()) == {-1}

    def test_a_kernel_that_cannot_be_compiled_has_failed(self, ground: Ground) -> None:
        """What does not compile is ``CandidateFailed``, when it is bound or at the latest when it is launched."""
        x, out = ground.numbers(), ground.blank()
        with pytest.raises(CandidateFailed):
            ground.run(ground.bound(x, out, kernel=ground.kernels.broken_kernel), x, out)

    def test_a_launch_goes_to_the_current_stream(self, ground: Ground) -> None:
        """A launch waits for what was put on the caller's stream before it."""
        import torch

        if ground.place.type != "cuda":
            pytest.skip(f"{ground.place.type} tensors have no streams that torch knows")
        x, out, busy = ground.numbers(), ground.blank(), torch.zeros((4096, 4096), device=ground.place)
        launch, late = ground.bound(x, out), ground.numbers(start=5000)
        side = torch.cuda.Stream(ground.place)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        side.wait_stream(torch.cuda.current_stream(ground.place))
        with torch.cuda.stream(side):
            for _ in range(16):
                torch.mm(busy, busy)
            x.copy_(late)
            launch(*ground.kernels.arguments(x, out, STEPS))
        ground.platform.synchronize(ground.device)
        ground.assert_stirred(out, late)

    def test_a_launch_goes_to_the_tensors_device(self, platform: Platform) -> None:
        """With one device current, tensors of another are computed on that other one."""
        if len(platform.devices()) < 2:
            pytest.skip("one device here")
        first, second = (Ground(platform, device) for device in platform.devices()[:2])
        with platform.on(first.device):
            x, out = second.numbers(), second.blank()
            second.run(second.bound(x, out), x, out)
        second.assert_stirred(out, x)

    # --- what is asked of the device besides ----------------------------------------------------------------------

    def test_tensors_name_their_device(self, ground: Ground, platform: Platform) -> None:
        """A tensor made for a device says that device's number, and torch's type of it is the platform's."""
        made = ground.blank()
        assert made.device.type == platform.device_type
        assert made.get_device() == ground.device
        assert ground.device in platform.devices()

    def test_nothing_is_captured_by_itself(self, platform: Platform) -> None:
        """Outside a graph's capture the platform says that nothing is captured."""
        assert platform.capturing() is False

    def test_a_capture_is_noticed(self, ground: Ground) -> None:
        """While the current stream records a graph, the platform says so."""
        import torch

        if ground.place.type != "cuda":
            pytest.skip(f"{ground.place.type} tensors have no graphs that torch knows")
        counter = ground.blank()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            counter.add_(1)  # torch warns of a graph with nothing in it
            noticed = ground.platform.capturing()
        assert noticed is True

    def test_the_current_device_is_restored(self, platform: Platform, device: int) -> None:
        """``on`` makes a device current for a block, nests, and lets errors through."""
        with platform.on(device), platform.on(device):
            pass
        with pytest.raises(KeyError, match="inside"), platform.on(device):
            raise KeyError("inside")

    def test_free_memory_is_a_size(self, platform: Platform, device: int) -> None:
        """Free memory is a whole number of bytes, or None where that is not known."""
        free = platform.free_bytes(device)
        assert free is None or (type(free) is int and free > 0)

    def test_the_condition_can_always_be_asked(self, platform: Platform, device: int) -> None:
        """Clocks, temperature, throttling and company are numbers that make sense, or None; nothing is raised."""
        for _ in range(2):
            condition = platform.condition(device)
            assert isinstance(condition, Condition)
            for name in ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "foreign_processes"):
                value: Any = getattr(condition, name)
                assert value is None or (type(value) is int and value >= 0), f"{name} is {value!r}"
            assert [reason for reason in condition.throttle if not isinstance(reason, str)] == []
            assert isinstance(condition.power_capped, bool)
