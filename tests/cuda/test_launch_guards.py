"""What a launch may not leave out, shown on a device: each rule with a call that would go wrong without it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("needs an NVIDIA GPU and a torch built for CUDA", allow_module_level=True)

import triton  # noqa: E402  # only where there is a device

import kalign_core as kalign  # noqa: E402
from kalign_core import ops, session  # noqa: E402
from kalign_core.cache.base import MemoryStore  # noqa: E402
from kalign_core.errors import BadArgument  # noqa: E402
from kalign_core.ops.noting import launch  # noqa: E402
from kalign_core.session import Session  # noqa: E402
from tests.cuda import guard_kernels  # noqa: E402

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def here():
    """A session of its own with an empty store."""
    made = Session(store=MemoryStore())
    with made.active():
        yield made
    made.close()


def normals(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype)


def expected(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.double()) * up.double()).to(gate.dtype)


def right(result: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> bool:
    return torch.allclose(result.double(), expected(gate, up).double(), rtol=1e-2, atol=1e-2)


def warm(*calls):
    for call in calls:
        call(), call()


def test_a_hit_is_one_driver_call(here):
    """A call like one before goes past Triton's launch code and the kernel's own memo."""
    x, y = normals(4, 256), normals(4, 256)
    warm(lambda: ops.swiglu(x, y))
    here.site(ops.swiglu.kernels[0]).memo.clear()
    assert right(ops.swiglu(x, y), x, y)
    assert not here.site(ops.swiglu.kernels[0]).memo


def test_an_unaligned_base_is_not_launched_with_aligned_code(here):
    """A tensor that starts at an odd element is another kind of call than one that starts at a multiple of 16 bytes."""
    room = normals(4 * 256 + 1)
    y = normals(4, 256)
    for x in (room[:-1].view(4, 256), room[1:].view(4, 256), room[:-1].view(4, 256)):
        assert right(ops.swiglu(x, y), x, y)


@pytest.mark.parametrize("width", [1, 16, 17, 256, 250])
def test_sizes_of_each_class_have_code_of_their_own(width):
    """Rows of one element, of a multiple of 16 and of another length, in turn, are each computed whole."""
    for tokens in (1, 2, 16, 17):
        x, y = normals(tokens, width), normals(tokens, width)
        warm(lambda x=x, y=y: ops.swiglu(x, y))
        assert right(ops.swiglu(x, y), x, y)


def test_a_padded_stride_is_another_kind_of_call():
    """Tensors alike in shape and unlike in strides are each read where their elements are."""
    dense, y = normals(4, 256), normals(4, 256)
    padded = torch.cat((dense, normals(4, 256)), 1)[:, :256]
    warm(lambda: ops.swiglu(dense, y))
    assert torch.equal(ops.swiglu(padded, y), ops.swiglu(dense, y))


def test_addresses_past_two_gib_are_reached():
    """A tensor far behind another one in memory is read where it is."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free device memory")
    room = torch.empty(3 * 2**30, dtype=torch.bfloat16, device=DEVICE)
    near, far = room[: 4 * 256].view(4, 256), room[-4 * 256 :].view(4, 256)
    near.copy_(normals(4, 256)), far.copy_(normals(4, 256))
    warm(lambda: ops.swiglu(near, near.clone()))
    assert right(ops.swiglu(near, far), near, far)
    assert right(ops.swiglu(far, near), far, near)


def test_the_current_stream_is_asked_for_each_call():
    """A hit on a side stream runs there, behind what was put on it before."""
    x, y = normals(2048, 4096), normals(2048, 4096)
    wanted = ops.swiglu(x, y)
    warm(lambda: ops.swiglu(x, y))
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        result = ops.swiglu(late, y)
    stream.synchronize()
    assert torch.equal(result, wanted)


def test_launch_hooks_see_hits_and_are_forgotten():
    """A hook added after a call was remembered is told of the next one, and hits go on once it is gone."""
    seen: list[str] = []
    x, y = normals(4, 256), normals(4, 256)
    warm(lambda: ops.swiglu(x, y))

    def hook(metadata):
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        ops.swiglu(x, y)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    ops.swiglu(x, y)
    assert seen == ["swiglu_kernel"]


def test_a_replaced_hook_chain_is_noticed(monkeypatch):
    """A profiler that puts a chain of its own in place of Triton's is told of hits."""
    x, y = normals(4, 256), normals(4, 256)
    warm(lambda: ops.swiglu(x, y))
    seen: list[str] = []
    chain = type(triton.knobs.runtime.launch_enter_hook)()
    chain.add(lambda metadata: seen.append(metadata.get()["name"]))
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain)
    ops.swiglu(x, y)
    assert seen == ["swiglu_kernel"]


def test_a_changed_global_is_refused(monkeypatch):
    """A kernel compiled with a global's value does not run once that has changed."""
    x, out = normals(64), torch.empty(64, dtype=torch.bfloat16, device=DEVICE)
    launch(guard_kernels.shifted_kernel, x, out, 64)
    assert torch.equal(out, x + 3)
    monkeypatch.setattr(guard_kernels, "SHIFT", triton.language.constexpr(5))
    with pytest.raises(RuntimeError, match="SHIFT"):
        launch(guard_kernels.shifted_kernel, x, out, 64)


def test_scratch_comes_from_the_allocator():
    """A kernel that makes a bulk-copy descriptor needs scratch memory: each launch asks the allocator in force."""
    asked: list[int] = []

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.int8, device=DEVICE)

    triton.set_allocator(allocate)
    x, out = normals(64, 64), torch.empty(64, 64, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(3):
        launch(guard_kernels.described_kernel, x, out, 64, 64)
    assert torch.equal(out, x)
    assert len(asked) in (0, 3)  # a compiler that needs none asks for none


def test_memory_that_was_freed_and_given_out_again_is_read_as_it_is():
    """A hit keeps no address: tensors that come and go are each read where they are."""
    y = normals(64, 256)
    for _ in range(20):
        x = normals(64, 256)
        assert right(ops.swiglu(x, y), x, y)
        del x


def test_a_parameter_is_not_a_tensor_s_kind():
    """A parameter and a plain tensor are told apart, and both are computed."""
    x, weight = normals(4, 256), normals(256)
    plain = ops.rms_norm(x, weight)
    with torch.no_grad():
        assert torch.equal(ops.rms_norm(x, torch.nn.Parameter(weight)), plain)
    assert ops.rms_norm(x, torch.nn.Parameter(weight)).requires_grad


def test_an_output_on_an_input_s_memory_is_refused_on_a_hit():
    """``out`` that overlaps an input without lying on it exactly is refused, though calls like it are known."""
    room, y = normals(5, 256), normals(4, 256)
    out = torch.empty(4, 256, dtype=torch.bfloat16, device=DEVICE)
    warm(lambda: ops.swiglu(room[:4], y, out=out))
    with pytest.raises(BadArgument, match="shares memory"):
        ops.swiglu(room[:4], y, out=room[1:])
    wanted = ops.swiglu(room[:4], y)
    assert torch.equal(ops.swiglu(room[:4], y, out=room[:4]), wanted)


def test_a_written_output_is_known_to_autograd():
    """A tensor that autograd saved is marked as changed by a hit that writes it."""
    x, y = normals(4, 256), normals(4, 256)
    saved = torch.ones(4, 256, dtype=torch.bfloat16, device=DEVICE)
    warm(lambda: ops.swiglu(x, y, out=saved))
    leaf = normals(4, 256).requires_grad_()
    product = leaf * saved
    ops.swiglu(x, y, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_what_was_warmed_up_compiles_and_tunes_nothing_in_capture(here, monkeypatch):
    """The first call on these tensors may be in a capture: it launches what is known and follows its inputs."""
    kalign.warmup(ops.rms_norm, [{"T": 32, "H": 512, "dtype": "bf16"}])
    monkeypatch.setattr(type(here.platform), "compile", None)
    x, w = normals(32, 512), normals(512)
    graph = torch.cuda.CUDAGraph()
    with kalign.using(mode="tune"), torch.cuda.graph(graph):
        captured = ops.rms_norm(x, w)
    x.copy_(normals(32, 512))
    graph.replay()
    assert torch.equal(captured, ops.rms_norm(x, w))
    assert here.store.entries(here.facts(0).identity) == ()


def test_a_first_call_in_capture_is_right(here):
    """A call that nothing is known of may be captured too; it is computed by the reference."""
    x, w = normals(24, 640), normals(640)
    graph = torch.cuda.CUDAGraph()
    with kalign.using(mode="tune"), torch.cuda.graph(graph):
        captured = ops.rms_norm(x, w)
    graph.replay()
    assert torch.equal(captured, ops.rms_norm(x, w))
    assert here.store.entries(here.facts(0).identity) == ()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_launch_the_same_kernels(dynamic):
    """Under ``torch.compile`` an operator is one opaque node: forward and backward bytes are those of eager calls."""
    x, w = normals(8, 512).requires_grad_(), normals(512).requires_grad_()

    def block(x, w):
        return ops.rms_norm(ops.swiglu(x, x * 2), w)

    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic)
    for tokens in (8, 8, 24, 40) if dynamic else (8, 8):
        rows = normals(tokens, 512).requires_grad_()
        gradients = []
        for call in (block, compiled):
            result = call(rows, w)
            gradients.append((result.detach(), *torch.autograd.grad(result, (rows, w), torch.ones_like(result))))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert x.grad is None


def test_sessions_of_threads_are_one(here):
    """Eight threads that call at once, on cold and on hot keys, each get their own right result."""
    from concurrent.futures import ThreadPoolExecutor

    def one(seed: int) -> bool:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            good = True
            for tokens in (1, 3, 16, 3, 1, 16) * 20:
                x, y = (
                    torch.randn(tokens, 384, generator=generator, device=DEVICE).to(torch.bfloat16) for _ in range(2)
                )
                good &= right(ops.swiglu(x, y), x, y)
            stream.synchronize()
        return good

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(8)))
    assert session.current() is here
