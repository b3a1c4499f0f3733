"""On a device: kernels launched while their predecessor ends compute what they do when launched in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of capability 9.0 or later", allow_module_level=True)

import kalign_core as kalign  # noqa: E402  # only where there is a device
from kalign_core import ops  # noqa: E402
from kalign_core.cache.base import MemoryStore  # noqa: E402
from kalign_core.declare import Kernel  # noqa: E402
from kalign_core.session import Session  # noqa: E402

DEVICE = torch.device("cuda")
STEPS = 60
ROWS, WIDTH = 3000, 4096  # a few waves of programs, so that the tail of one launch overlaps the start of the next
KERNELS: tuple[Kernel, ...] = (*ops.rms_norm.kernels, *ops.swiglu.kernels)


@contextlib.contextmanager
def launching(early: bool) -> Iterator[None]:
    """A session without a store in which the kernels' references are launched early, or in turn."""
    before = {kernel: kernel.reference for kernel in KERNELS if kernel.overlaps}

    def changed(reference):
        return lambda p: (reference(p) if callable(reference) else reference).replace(launch_pdl=early)

    made = Session(store=MemoryStore())
    try:
        for kernel, reference in before.items():
            object.__setattr__(kernel, "reference", changed(reference))
        with made.active(), kalign.using(mode="off"):
            yield
    finally:
        made.close()
        for kernel, reference in before.items():
            object.__setattr__(kernel, "reference", reference)


def chain(x, weight, given) -> torch.Tensor:
    """Launches that each read what the one before wrote, and write over what the one before that read."""
    here, there = x.clone(), torch.empty_like(x)
    for step in range(STEPS):
        ops.rms_norm(here, weight, out=there)
        if step % 7 == 3:
            there.mul_(1.5)  # a kernel of somebody else's between two of ours
        ops.swiglu(there, given, out=here)
        if step % 11 == 5:
            here.copy_(there)
    return here


def results(early: bool) -> list[torch.Tensor]:
    """What a chain gives eagerly, on another stream, and when its graph is replayed."""
    torch.manual_seed(0)
    x, given = (torch.randn(ROWS, WIDTH, device=DEVICE).bfloat16() for _ in range(2))
    weight = torch.rand(WIDTH, device=DEVICE).bfloat16() + 0.5
    with launching(early):
        found = [chain(x, weight, given) for _ in range(3)]
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            found.append(chain(x, weight, given))
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(x, weight, given)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            found.append(captured.clone())
    return found


def test_a_chain_of_early_launches_gives_the_same_bytes():
    """Every link waits for the one before it: eagerly, on a second stream and in a replayed graph."""
    wanted = results(early=False)[0]
    assert torch.isfinite(wanted).all()
    assert [torch.equal(found, wanted) for found in results(early=True)] == [True] * 7


def test_early_launches_are_early():
    """The compiled kernel carries the flag: without it the test above would compare a thing with itself."""
    x, weight = torch.randn(8, 128, device=DEVICE).bfloat16(), torch.ones(128, device=DEVICE).bfloat16()
    for early in (False, True):
        with launching(early):
            config = kalign.explain(ops.rms_norm, x, weight)[0].config
            assert bool(config.get("launch_pdl")) is early
