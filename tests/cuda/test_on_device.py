"""What only a device can show: real identity, captured graphs, mode equality, refutation of a naive kernel."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

import kalign_core as kalign  # noqa: E402  # only where there is a device
from kalign_core import ops, session  # noqa: E402
from kalign_core.cache.base import MemoryStore  # noqa: E402
from kalign_core.errors import NotNow  # noqa: E402
from kalign_core.hal import torch_gpu  # noqa: E402
from kalign_core.problems import problem_of  # noqa: E402
from kalign_core.session import Session  # noqa: E402
from kalign_core.tuner.report import effort_named  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda")


@pytest.fixture
def here():
    """A session of its own with an empty store, which tries few candidates."""
    made = Session(store=MemoryStore())
    made.observer.effort = effort_named("quick")
    with made.active():
        yield made
    made.close()


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def test_identity_is_what_the_driver_reports():
    """The key of a device is the UUID that nvidia-smi prints for it."""
    printed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert session.current().facts(0).identity.key in printed


def test_modes_agree_bit_for_bit(here):
    """Outputs are the same bytes with tuning off, with the winner just tuned, and with the winner looked up."""
    a, b = ops.matmul.inputs({"M": 48, "N": 512, "K": 512}, "bf16", 0, DEVICE)
    results = []
    for mode in ("off", "tune", "read"):
        with kalign.using(mode=mode):
            results.append(ops.matmul(a, b))
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    assert torch.equal(results[0].view(torch.int16), results[2].view(torch.int16))


def test_naive_sum_is_refuted(here):
    """Every candidate of a kernel whose order follows num_warps is refuted, and the reference is kept."""
    here.observer.effort = effort_named("normal")
    kernel = load(ROOT / "benchmarks" / "naive_rms_norm.py").naive_rms_norm_kernel
    x = torch.randn(256, 4096, dtype=torch.bfloat16, device=DEVICE)
    weight, rstd = torch.randn(4096, dtype=x.dtype, device=DEVICE), torch.empty(256, device=DEVICE)
    out = torch.empty_like(x)
    problem = problem_of(kernel, (x, weight, out, rstd, 256, 4096, 4096, 4096, 1e-6), "train")
    report, _ = here.tune(kernel, problem, 0)
    assert report.tally.refuted == 4
    assert report.entry.config == kernel.reference_config(problem)


def test_capture_never_tunes(here):
    """A call in graph capture launches what is known, tunes nothing, and replays the reference's bits."""
    x, w = (t.detach() for t in ops.rms_norm.inputs({"T": 64, "H": 1024}, "bf16", 0, DEVICE))
    expected = ops.rms_norm(x, w)
    graph = torch.cuda.CUDAGraph()
    with kalign.using(mode="tune"), torch.cuda.graph(graph):
        captured = ops.rms_norm(x, w)
    graph.replay()
    assert torch.equal(captured, expected)
    assert here.store.entries(here.facts(0).identity) == ()


def test_a_captured_graph_keeps_its_launch(here, monkeypatch):
    """A graph replays what it was captured with, after another launch won and whatever nobody holds was unloaded."""
    a, b = (t.detach() for t in ops.matmul.inputs({"M": 48, "N": 512, "K": 512}, "bf16", 0, DEVICE))
    graph = torch.cuda.CUDAGraph()
    with kalign.using(mode="tune"), torch.cuda.graph(graph):
        captured = ops.matmul(a, b)
    kalign.tune(ops.matmul, a, b)
    here.forget()
    monkeypatch.setattr(torch_gpu, "MOST_LOADED", 0)
    ops.swiglu(a, a)  # what is loaded next has all candidates unloaded
    gc.collect()
    a.copy_(torch.randn_like(a))
    graph.replay()
    assert torch.equal(captured, ops.matmul(a, b))


def test_a_capture_beside_a_thread_that_tunes(here):
    """Neither takes the other for a fault: graphs that were captured are right, and what was not tuned was not now."""
    x, w = (t.detach() for t in ops.rms_norm.inputs({"T": 64, "H": 1024}, "bf16", 0, DEVICE))
    expected = ops.rms_norm(x, w)
    a, b = (t.detach() for t in ops.matmul.inputs({"M": 32, "N": 512, "K": 512}, "bf16", 0, DEVICE))
    ends, replays = [], []

    def tune() -> None:
        try:
            ends.extend(decided.how for decided in kalign.tune(ops.matmul, a, b))
        except NotNow:
            ends.append("not now")

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            captured = ops.rms_norm(x, w)
        graph.replay()
        replays.append(torch.equal(captured, expected))

    thread = threading.Thread(target=tune)
    thread.start()
    while thread.is_alive():
        with contextlib.suppress(RuntimeError):  # a driver may end a capture for what another thread does
            capture()
    thread.join()
    capture()
    assert all(replays)
    assert ends in (["tuned"], ["kept"], ["not now"])
    assert [decided.how for decided in kalign.tune(ops.matmul, a, b)] in (["tuned"], ["kept"], ["hit"])


def test_launch_hook_sees_every_launch(here):
    """A profiler's hook is told of launches on the fast path too."""
    import triton

    seen = []
    x, w = (t.detach() for t in ops.rms_norm.inputs({"T": 4, "H": 128}, "bf16", 0, DEVICE))
    ops.rms_norm(x, w)
    hook = seen.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        ops.rms_norm(x, w)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert [metadata.get()["name"] for metadata in seen] == ["rms_norm_kernel"]


def test_unaligned_bases_get_code_of_their_own(here):
    """A view that starts at an odd element is computed right: it is not launched with aligned code."""
    storage = torch.randn(8 * 1024 + 1, dtype=torch.bfloat16, device=DEVICE)
    aligned, shifted = storage[: 8 * 1024].view(8, 1024), storage[1:].view(8, 1024)
    w = torch.ones(1024, dtype=torch.bfloat16, device=DEVICE)
    ops.rms_norm(aligned, w)
    assert torch.equal(ops.rms_norm(shifted, w), ops.rms_norm(shifted.clone(), w))


def test_side_stream_is_used(here):
    """A call on a side stream runs on that stream: work ordered after it there sees its result."""
    x, w = (t.detach() for t in ops.rms_norm.inputs({"T": 4096, "H": 4096}, "bf16", 0, DEVICE))
    expected = ops.rms_norm(x, w)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        copy = ops.rms_norm(x, w).clone()
    stream.synchronize()
    assert torch.equal(copy, expected)
