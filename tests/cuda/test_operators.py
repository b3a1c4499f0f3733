"""What only a device can show of every operator: that it can be captured, and that its host waits for nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

from kalign_core import ops  # noqa: E402  # only where there is a device
from tests.there_and_back import there_and_back  # noqa: E402

DEVICE = torch.device("cuda")
by_name = pytest.mark.parametrize("op", ops.operators(), ids=lambda op: op.name)


def as_bytes(tensors):
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors]


@by_name
def test_the_host_waits_for_nothing(op):
    """A call and its gradient, once known, run through with waiting forbidden."""
    args = op.inputs(op.small_shapes[0], op.dtypes[0], 0, DEVICE)
    there_and_back(op, args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = there_and_back(op, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert as_bytes(made) == as_bytes(there_and_back(op, args))


@by_name
def test_calls_and_gradients_are_captured(op):
    """A replayed graph of a call and its gradient gives the bytes of the eager ones."""
    args = op.inputs(op.small_shapes[0], op.dtypes[0], 0, DEVICE)
    expected = as_bytes(there_and_back(op, args))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [t.detach() for t in there_and_back(op, args)]
    for t in made:
        t.zero_()
    graph.replay()
    assert as_bytes(made) == expected
