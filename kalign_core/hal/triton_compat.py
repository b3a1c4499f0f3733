"""The only file that touches Triton's internals: compiling, prebinding a launch, the interpreter's matrix product.

Triton promises none of this between minor versions, so the fast launch exists for minors it was run on with a device
(``FAST_MINORS``); others launch through ``CompiledKernel.run``, which every version so far has kept, and say so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton

from kalign_core.errors import CandidateFailed

if TYPE_CHECKING:
    from kalign_core.declare import Lowered

log = logging.getLogger("kalign")
MINOR = tuple(int(part) for part in triton.__version__.split(".")[:2])
FAST_MINORS = ((3, 6), (3, 9))
Target = tuple[str, int | str, int]
RawLaunch = Callable[..., None]
_announced: set[str] = set()


def interpreting() -> bool:
    """Whether jit functions made in this process are interpreted rather than compiled."""
    return bool(triton.knobs.runtime.interpret)


# --- compiling ----------------------------------------------------------------------------------------------------


def compile_lowered(fn: Any, lowered: Lowered, target: Target) -> Any:
    """Compile the jit function ``fn`` as ``lowered`` says for ``target``; the same call in child and parent.

    Gives Triton's CompiledKernel. Whatever the compiler raises becomes ``CandidateFailed`` with its class and first
    line; an abort of the compiler ends the process, which is why candidates are compiled in children first.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {(position,): value for position, value in lowered.constants}
    attributes = {(position,): [["tt.divisibility", 16]] for position in lowered.divisible}
    try:
        source = ASTSource(fn, dict(lowered.signature), constants, attributes)
        return triton.compile(source, target=GPUTarget(*target), options=dict(lowered.options))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CandidateFailed(brief(error)) from error


def brief(error: BaseException) -> str:
    """Class and first telling line of an exception, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


def code_digest(compiled: Any) -> str:
    """A digest of the device code alone: equal where two configurations compile to the same instructions."""
    import hashlib

    for stage in ("cubin", "hsaco"):
        if stage in compiled.asm:
            return hashlib.sha256(compiled.asm[stage]).hexdigest()[:16]
    return str(compiled.hash)[:16]


def resources(compiled: Any) -> dict[str, int]:
    """What the compiler says of a kernel without a device: shared bytes, warps, scratch bytes."""
    metadata = compiled.metadata
    return {
        "shared_bytes": int(metadata.shared),
        "num_warps": int(metadata.num_warps),
        "global_scratch_bytes": int(getattr(metadata, "global_scratch_size", 0) or 0),
        "tmem_columns": int(getattr(metadata, "tmem_size", 0) or 0),
    }


# --- launching ----------------------------------------------------------------------------------------------------


def prebind(compiled: Any) -> RawLaunch:
    """A function ``(grid_x, grid_y, grid_z, stream, arguments)`` that launches ``compiled`` with everything prebound.

    ``arguments`` is a tuple of every parameter of the jit function in order, constants included (they are ignored).
    The device has to be current. Loads the binary; raises ``CandidateFailed`` where the device has not the resources.
    """
    try:
        run = compiled.run
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raise CandidateFailed(brief(error)) from error
    general = _general(compiled, run)
    if MINOR not in FAST_MINORS:
        _announce(f"triton {triton.__version__}: no fast launch for this version yet; launching through Triton's own")
        return general
    if _needs_scratch(run) or not hasattr(run, "launch_cooperative_grid"):
        return general
    return _guarded(_fast_36(compiled, run) if MINOR == (3, 6) else _fast_39(compiled, run), general)


def _general(compiled: Any, run: Any) -> RawLaunch:
    """The launch Triton's own ``kernel[grid](...)`` ends in, with its hooks and scratch allocators."""
    runtime = triton.knobs.runtime
    function, packed = compiled.function, compiled.packed_metadata

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        metadata = compiled.launch_metadata((x, y, z), stream, *arguments)
        run(x, y, z, stream, function, packed, metadata, runtime.launch_enter_hook, runtime.launch_exit_hook,
            *arguments)  # fmt: skip

    return launch


def _fast_36(compiled: Any, run: Any) -> RawLaunch:
    launch, function, packed = run.launch, compiled.function, compiled.packed_metadata
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl

    def fast(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        launch(x, y, z, stream, function, cooperative, pdl, None, None, packed, None, None, None, *arguments)

    return fast


def _fast_39(compiled: Any, run: Any) -> RawLaunch:
    launch, function, packed = run.launch, compiled.function, compiled.packed_metadata
    cooperative, pdl = run.launch_cooperative_grid, run.launch_pdl
    annotations, signature = run.arg_annotations, run.kernel_signature

    def fast(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        launch(x, y, z, stream, function, cooperative, pdl, packed, None, None, None, None, None, annotations,
               signature, arguments)  # fmt: skip

    return fast


def _guarded(fast: RawLaunch, general: RawLaunch) -> RawLaunch:
    """``fast`` unless somebody listens to launches (profilers do), in which case ``general`` tells them."""
    runtime = triton.knobs.runtime

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        if _listening(runtime.launch_enter_hook) or _listening(runtime.launch_exit_hook):
            general(x, y, z, stream, arguments)
        else:
            fast(x, y, z, stream, arguments)

    return launch


def _listening(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def _needs_scratch(run: Any) -> bool:
    sizes = (getattr(run, "global_scratch_size", 1), getattr(run, "profile_scratch_size", 1))
    return any(sizes) or bool(getattr(run, "gsan_enabled", False))


def globals_guard(fn: Any) -> Callable[[], None] | None:
    """A check that the globals ``fn`` was compiled with still hold, or None where it uses none.

    It raises ``RuntimeError`` as Triton's own launcher does: a kernel compiled for the old value must not run.
    """
    used = getattr(fn, "used_global_vals", None)
    if not used:
        return None
    watched = [(name, value, scope) for (name, _), (value, scope) in used.items()]

    def check() -> None:
        for name, value, scope in watched:
            if scope.get(name, check) != value:
                raise RuntimeError(
                    f"global {name} of kernel {fn.__name__} has changed from {value!r} to {scope.get(name)!r} since "
                    "the kernel was compiled; restart the process to use the new value"
                )

    return check


def _announce(text: str) -> None:
    if text not in _announced:
        _announced.add(text)
        log.warning(text)


# --- the interpreter ----------------------------------------------------------------------------------------------


def fix_interpreter_dot() -> bool:
    """Make the interpreter's ``tl.dot`` accumulate along K one step at a time; whether that took effect.

    As shipped it is one numpy product, whose bits depend on the tile and on M, so that no two tile shapes agree. With
    products and sums rounded one after the other, a row's bits depend on K's order alone, as on the devices this
    stands for. Versions whose interpreter looks otherwise are left alone: dot kernels are then not tuned there.
    """
    try:
        import numpy as np
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return False
    shipped = getattr(InterpreterBuilder, "create_dot", None)
    if shipped is None or MINOR not in FAST_MINORS:
        return False
    if getattr(shipped, "kalign", False):
        return True

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if a.dtype.primitive_bitwidth == 8 or a.data.ndim != 2:
            return shipped(self, a, b, d, input_precision, max_num_imprecise_acc)
        kind = d.data.dtype
        total = d.data.copy()
        left, right = _as_numbers(a).astype(kind), _as_numbers(b).astype(kind)
        with np.errstate(all="ignore"):
            for k in range(left.shape[1]):
                total += left[:, k : k + 1] * right[k : k + 1, :]
        return TensorHandle(total, d.dtype.scalar)

    create_dot.kalign = True  # type: ignore[attr-defined]
    InterpreterBuilder.create_dot = create_dot
    return True


def _as_numbers(handle: Any) -> Any:
    """The numbers of an interpreter tensor; bfloat16 may be held as its bit pattern in 16-bit integers."""
    import numpy as np

    data = handle.data
    if handle.dtype.scalar.name == "bf16" and data.dtype == np.uint16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data
