"""The prebound launch as far as it goes without a device: a compiled kernel and a driver are fakes that write down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from kalign_core.errors import CandidateFailed
from kalign_core.hal import triton_compat
from kalign_core.hal.triton_compat import Prebound

GRID, TAIL = (5, 6, 7), (40, 2.0, "constant")


class Chain:
    """A chain of launch hooks."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, metadata: Any) -> None:
        for call in self.calls:
            call(metadata)


class Run:
    """Triton's launcher of one kernel: called itself the long way, by its inner function the short one."""

    def __init__(self, **changes: Any) -> None:
        self.global_scratch_size = self.profile_scratch_size = 0
        self.launch_cooperative_grid, self.launch_pdl = "cooperative", "dependent"
        self.arg_annotations, self.kernel_signature = "annotations", "signature"
        self.long: list[tuple[Any, ...]] = []
        self.short: list[tuple[Any, ...]] = []
        self.__dict__.update(changes)

    def __call__(self, *args: Any) -> None:
        self.long.append(args)
        args[7](args[6]), args[8](args[6])

    def launch(self, *args: Any) -> None:
        """What reaches the driver."""
        self.short.append(args)


def compiled(run: Any) -> Any:
    """A compiled kernel as far as it is looked at."""
    return SimpleNamespace(
        run=run, function="function", packed_metadata="packed", launch_metadata=lambda grid, stream, *args: "metadata"
    )


@pytest.fixture(autouse=True)
def chains(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The hook chains in force, both empty."""
    runtime = SimpleNamespace(launch_enter_hook=Chain(), launch_exit_hook=Chain())
    monkeypatch.setattr(triton_compat.triton, "knobs", SimpleNamespace(runtime=runtime))
    return runtime


@pytest.fixture(params=[(3, 6), (3, 9)], ids=["3.6", "3.9"])
def behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """What the driver call of a Triton minor takes behind grid and stream, for given arguments of the kernel."""
    monkeypatch.setattr(triton_compat, "MINOR", request.param)
    flags = ("function", "cooperative", "dependent")
    if request.param == (3, 6):
        return lambda *args: (*flags, None, None, "packed", None, None, None, *args)
    return lambda *args: (*flags, "packed", *(None,) * 5, "annotations", "signature", args)


class Device:
    """Which device is current, and the stream of each."""

    current = 3

    def fire(self, run: Run) -> Any:
        """A pinned launch for device 3."""
        return Prebound(compiled(run)).pin(GRID, TAIL, 3, lambda: self.current, lambda device: 100 + device)


# --- the short way ------------------------------------------------------------------------------------------------


def test_a_launch_is_one_driver_call(behind: Any) -> None:
    """Grid, stream and arguments stand where this minor's driver call takes them."""
    run = Run()
    Prebound(compiled(run)).launch(*GRID, 103, (1, 2, *TAIL))
    assert (run.short, run.long) == ([(*GRID, 103, *behind(1, 2, *TAIL))], [])


def test_a_pinned_launch_is_the_same_call(behind: Any) -> None:
    """Addresses stand for the tensors, an absent one for none, on the stream that is current then."""
    run = Run()
    assert Device().fire(run)([16, None, 32]) is True
    assert (run.short, run.long) == ([(*GRID, 103, *behind(16, None, 32, *TAIL))], [])


def test_the_stream_is_asked_for_each_time(behind: Any) -> None:
    """A pinned launch follows the current stream."""
    run, streams = Run(), iter((7, 8))
    fire = Prebound(compiled(run)).pin(GRID, TAIL, 3, lambda: 3, lambda device: next(streams))
    assert fire is not None
    fire([16]), fire([16])
    assert [call[3] for call in run.short] == [7, 8]


def test_the_same_addresses_again_are_the_same_call(behind: Any) -> None:
    """A sequence of addresses that is given again is launched again, on the stream that is current by then."""
    run, streams = Run(), iter((7, 7, 8, 8))
    fire = Prebound(compiled(run)).pin(GRID, TAIL, 3, lambda: 3, lambda device: next(streams))
    assert fire is not None
    first, other = [16, None], [32, None]
    fire(first), fire(first), fire(first), fire(other)
    assert run.short == [
        (*GRID, stream, *behind(*addresses, *TAIL))
        for stream, addresses in ((7, first), (7, first), (8, first), (8, other))
    ]


def test_a_call_amid_another_one_changes_nothing_of_it(behind: Any) -> None:
    """What another thread launches while a launch is being put together does not take its place."""
    run, others = Run(), [[48], [64]]

    def stream_of(device: int) -> int:
        if others:
            fire(others.pop())
        return 103

    fire: Any = Prebound(compiled(run)).pin(GRID, TAIL, 3, lambda: 3, stream_of)
    fire([16])
    assert run.short == [(*GRID, 103, *behind(address, *TAIL)) for address in (48, 64, 16)]


# --- what sends a pinned launch back ------------------------------------------------------------------------------


def test_another_current_device(behind: Any) -> None:
    """A pinned launch is for one device: while another is current it launches nothing."""
    run, device = Run(), Device()
    fire = device.fire(run)
    device.current = 0
    assert (fire([16]), run.short, run.long) == (False, [], [])
    device.current = 3
    assert fire([16]) is True


def test_a_device_without_others_is_not_asked_about(behind: Any) -> None:
    """Where no other device can be current, launches go out without asking."""
    run = Run()
    fire = Prebound(compiled(run)).pin(GRID, TAIL, 0, None, lambda device: 100 + device)
    assert fire is not None
    assert fire([16]) is True
    assert run.short == [(*GRID, 100, *behind(16, *TAIL))]


@pytest.mark.parametrize(("devices", "fired"), [(1, True), (2, False)])
def test_whether_there_are_others_is_what_torch_says(
    behind: Any, monkeypatch: pytest.MonkeyPatch, devices: int, fired: bool
) -> None:
    """A pinned launch of one of several devices is for the time that this one is current; one alone always is."""
    import torch

    from kalign_core.hal.torch_gpu import DeviceLaunch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100, raising=False)
    run = Run()
    launch = DeviceLaunch(None, Prebound(compiled(run)), lambda args: GRID, TAIL, 0, None, lambda: None)
    fire = launch.pin((1, 40), (40,))
    assert fire is not None
    assert (fire([16]), len(run.short)) == (fired, int(fired))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("replaced", [False, True])
def test_somebody_who_listens(behind: Any, chains: Any, name: str, replaced: bool) -> None:
    """A hook added to a chain, or another chain in its place, is told of the next launch."""
    run, told = Run(), []
    prebound = Prebound(compiled(run))
    fire = prebound.pin(GRID, TAIL, 3, lambda: 3, lambda device: 103)
    assert fire is not None
    chain = getattr(chains, name)
    if replaced:
        setattr(chains, name, Chain())
    getattr(chains, name).calls.append(told.append)
    assert (fire([16]), run.short, run.long) == (False, [], [])
    prebound.launch(*GRID, 103, (1, *TAIL))
    assert (told, run.short) == (["metadata"], [])
    setattr(chains, name, chain)
    chain.calls.clear()
    assert fire([16]) is True


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_an_empty_chain_in_place_of_the_first(behind: Any, chains: Any, name: str) -> None:
    """A chain that somebody put there is theirs to fill later: launches do not go past it."""
    run = Run()
    fire = Device().fire(run)
    setattr(chains, name, Chain())
    assert (fire([16]), run.short) == (False, [])


# --- where there is no short way ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"global_scratch_size": 64}, {"profile_scratch_size": 64}, {"gsan_enabled": True}],
)
def test_scratch_memory_needs_the_long_way(behind: Any, changes: dict[str, Any]) -> None:
    """A kernel that needs memory of its own per launch goes where Triton allocates it."""
    run = Run(**changes)
    prebound = Prebound(compiled(run))
    assert prebound.pin(GRID, TAIL, 3, lambda: 3, lambda device: 0) is None
    prebound.launch(*GRID, 103, (1, *TAIL))
    assert (prebound.fast, len(run.long), run.short) == (False, 1, [])


@pytest.mark.parametrize(
    "lacks", ["global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"]
)
def test_a_launcher_that_looks_otherwise_is_called_the_long_way(behind: Any, lacks: str) -> None:
    """What this version's launcher does not say is not taken for no."""
    run = Run()
    delattr(run, lacks)
    assert not Prebound(compiled(run)).fast


def test_chains_that_cannot_be_looked_into(behind: Any, chains: Any) -> None:
    """A hook that is a plain function, as in older versions, is told of every launch."""
    told: list[Any] = []
    chains.launch_enter_hook = told.append
    run = Run()
    prebound = Prebound(compiled(run))
    prebound.launch(*GRID, 103, (1, *TAIL))
    assert (prebound.fast, told, run.short) == (False, ["metadata"], [])


@pytest.fixture
def unannounced() -> Iterator[None]:
    """Nothing was announced before this test."""
    before = set(triton_compat._announced)
    triton_compat._announced.clear()
    yield
    triton_compat._announced.update(before)


def test_an_unknown_minor_is_announced_once(
    unannounced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A Triton whose driver call nobody tried launches through Triton's own, after one warning."""
    monkeypatch.setattr(triton_compat, "MINOR", (3, 99))
    run = Run()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            Prebound(compiled(run)).launch(*GRID, 103, (1, *TAIL))
    assert [len(run.long), run.short, len(caplog.records)] == [3, [], 1]
    assert f"triton {triton.__version__}: no fast launch for this version yet" in caplog.text


def test_a_binary_that_cannot_be_loaded(behind: Any) -> None:
    """What the driver says when a kernel is loaded becomes the candidate's failure."""

    class Broken:
        @property
        def run(self) -> Any:
            raise RuntimeError("out of resource: shared memory")

    with pytest.raises(CandidateFailed, match="RuntimeError: out of resource: shared memory"):
        Prebound(Broken())


# --- globals ------------------------------------------------------------------------------------------------------


def kernel_using(scope: dict[str, Any]) -> Any:
    """A jit function that was compiled with the global SHIFT of ``scope``."""
    return SimpleNamespace(__name__="shifted", used_global_vals={("SHIFT", 1): (scope["SHIFT"], scope)})


def test_a_changed_global_is_an_error() -> None:
    """A kernel compiled for one value does not run with another, nor without."""
    scope = {"SHIFT": 3}
    check = triton_compat.globals_guard(kernel_using(scope))
    assert check is not None
    check()
    scope["SHIFT"] = 5
    with pytest.raises(RuntimeError, match="global SHIFT of kernel shifted has changed from 3 to 5"):
        check()
    del scope["SHIFT"]
    with pytest.raises(RuntimeError, match="to None"):
        check()


def test_a_kernel_without_globals_has_nothing_to_check() -> None:
    """Where a kernel reads no global there is no check to pay for."""
    assert triton_compat.globals_guard(SimpleNamespace(used_global_vals={})) is None


def test_a_kernel_that_reads_globals_is_not_pinned(behind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch checks them each time, which a driver call alone does not."""
    from kalign_core.hal.torch_gpu import DeviceLaunch

    monkeypatch.setattr(triton_compat, "listening", lambda chains: False)
    import torch

    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *device: 3, raising=False)
    run, checked = Run(), []
    made = {check: DeviceLaunch(None, Prebound(compiled(run)), lambda args: GRID, TAIL, 3, check, lambda: None)
            for check in (None, lambda: checked.append(1))}  # fmt: skip
    assert [launch.pin((1, 40), (40,)) is None for launch in made.values()] == [False, True]
    for launch in made.values():
        launch(1, 40)
    assert (len(run.short), checked) == (2, [1])
