"""Every operator past 2**31 elements: the last rows are those of a small call, byte for byte, forward and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

from tests.large_calls import LARGE  # noqa: E402  # only where there is a device

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _all_memory():
    """What one call took is free for the next."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("large", LARGE, ids=lambda large: large.name)
def test_rows_past_two_to_the_thirty_one(large):
    """Rows beyond element 2**31 are read and written where they are, and keep the bits they have alone."""
    free, needed = torch.cuda.mem_get_info()[0], large.needs_bytes(2**31)
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of device memory, {free / 1e9:.0f} are free")
    for got, alone in large.run(2**31, DEVICE):
        assert torch.equal(got.contiguous().view(torch.uint8), alone.contiguous().view(torch.uint8))
