"""The only file that touches Triton's internals: compiling, prebinding a launch, the interpreter's matrix product.

Triton promises none of this between minor versions, so the fast launch exists for minors it was run on with a device
(``FAST_MINORS``); others launch through ``CompiledKernel.run``, which every version so far has kept, and say so once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton

from kalign_core.declare import OVERLAP_OPTION
from kalign_core.errors import CandidateFailed
from kalign_core.hal.machine_code import instructions, registers_and_spills, waits_first

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
        compiled = triton.compile(source, target=GPUTarget(*target), options=dict(lowered.options))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise CandidateFailed(brief(error)) from error
    if dict(lowered.options).get(OVERLAP_OPTION):
        _check_early(lowered.kernel, compiled.asm)
    return compiled


def _check_early(kernel: str, asm: Any) -> None:
    """Raise ``CandidateFailed`` where ``asm`` does not show that the kernel waits for its predecessor."""
    if "cubin" in asm and "ptx" not in asm:
        raise CandidateFailed(
            f"{kernel} is launched early, and nothing shows whether it waits",
            why="TRITON_STORE_BINARY_ONLY was set when it was compiled, which leaves the binary alone",
            fix="unset it, and name an empty folder in TRITON_CACHE_DIR",
        )
    if not waits_first(asm):
        raise CandidateFailed(
            f"{kernel} is launched early and does not wait before all else",
            why="the kernel before it may still be writing what it reads, or what the kernel behind it reads",
            fix="call after_predecessor(OVERLAP) of kalign_core.kernels.overlap before every load, store and branch",
        )


def brief(error: BaseException) -> str:
    """Class and first telling line of an exception, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


def code_digest(compiled: Any) -> str:
    """Equal where two configurations compile to the same instructions, launched by the same threads and memory."""
    metadata, code = compiled.metadata, instructions(compiled.asm)
    if not code:
        return str(compiled.hash)[:16]
    names = ("num_warps", "num_ctas", "shared", "tmem_size", "global_scratch_size", "launch_pdl",
             "launch_cooperative_grid")  # fmt: skip
    launched_by = [str(getattr(metadata, name, 0) or 0) for name in names]
    return hashlib.sha256(" ".join((code, *launched_by)).encode()).hexdigest()[:16]


def resources(compiled: Any) -> dict[str, int]:
    """What the compiler says of a kernel without a device: shared bytes, warps, scratch bytes, registers, spills."""
    metadata = compiled.metadata
    registers, spills = registers_and_spills(compiled.asm) or (0, 0)
    return {
        "shared_bytes": int(metadata.shared),
        "num_warps": int(metadata.num_warps),
        "global_scratch_bytes": int(getattr(metadata, "global_scratch_size", 0) or 0),
        "tmem_columns": int(getattr(metadata, "tmem_size", 0) or 0),
        "registers": registers,
        "spills": spills,
    }


# --- launching ----------------------------------------------------------------------------------------------------


class Driver(NamedTuple):
    """The call that reaches the driver: ``call(x, y, z, stream, *behind, ...)`` with a launch's arguments last.

    ``spread`` says whether those follow one by one or as one tuple.
    """

    call: Callable[..., None]
    behind: tuple[Any, ...]
    spread: bool


class Prebound:
    """A compiled kernel with everything about its launch bound that does not change from call to call.

    ``launch(x, y, z, stream, arguments)`` launches it on the current device; ``arguments`` is a tuple of every
    parameter of the jit function in order, constants included (they are ignored). Loads the binary when made; raises
    ``CandidateFailed`` where the device has not the resources.
    """

    __slots__ = ("_chains", "_driver", "_general")

    def __init__(self, compiled: Any) -> None:
        try:
            run = compiled.run
        except KeyboardInterrupt:
            raise
        except Exception as error:
            raise CandidateFailed(brief(error)) from error
        runtime = triton.knobs.runtime
        self._general = _general(compiled, run)
        self._chains = (runtime.launch_enter_hook, runtime.launch_exit_hook)
        self._driver = _driver(compiled, run) if all(hasattr(chain, "calls") for chain in self._chains) else None

    @property
    def fast(self) -> bool:
        """Whether launches reach the driver without Triton's own launch code."""
        return self._driver is not None

    def launch(self, x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        """Launch, telling whoever listens (profilers do)."""
        driver = self._driver
        if driver is None or listening(self._chains):
            self._general(x, y, z, stream, arguments)
        elif driver.spread:
            driver.call(x, y, z, stream, *driver.behind, *arguments)
        else:
            driver.call(x, y, z, stream, *driver.behind, arguments)

    def pin(
        self,
        grid: tuple[int, int, int],
        tail: tuple[Any, ...],
        device: int,
        current: Callable[[], int] | None,
        stream_of: Callable[[int], int],
    ) -> Callable[[Sequence[int | None]], bool] | None:
        """The driver call for ``(*addresses, *tail)``, with all that has to be asked before it, in one frame.

        It gives False, and launches nothing, while ``current()`` is another device than ``device`` (without
        ``current`` there is no other) or somebody listens to launches. Who gives the same sequence again has not
        changed it. None where there is no fast launch.
        """
        if self._driver is None:
            return None
        call, behind, spread = self._driver
        runtime, (enter, leave) = triton.knobs.runtime, self._chains
        # What stands before the arguments on a stream, and the last call: one value, which threads cannot mix.
        latest: tuple[tuple[Any, ...], Any, tuple[Any, ...]] = ((*grid, None, *behind), None, ())

        def fire(addresses: Sequence[int | None]) -> bool:
            nonlocal latest
            if (
                (current is not None and current() != device)
                or enter.calls
                or leave.calls
                or runtime.launch_enter_hook is not enter
                or runtime.launch_exit_hook is not leave
            ):
                return False
            stream, (ahead, known, arguments) = stream_of(device), latest
            if addresses is not known or ahead[3] != stream:
                if ahead[3] != stream:
                    ahead = (*grid, stream, *behind)
                arguments = ahead + ((*addresses, *tail) if spread else ((*addresses, *tail),))
                latest = (ahead, addresses, arguments)
            call(*arguments)
            return True

        return fire


def listening(chains: tuple[Any, Any]) -> bool:
    """Whether anybody hooked into launches since ``chains`` were taken, or hooks are in them."""
    runtime = triton.knobs.runtime
    enter, leave = chains
    return bool(
        runtime.launch_enter_hook is not enter or enter.calls or runtime.launch_exit_hook is not leave or leave.calls
    )


def _general(compiled: Any, run: Any) -> RawLaunch:
    """The launch Triton's own ``kernel[grid](...)`` ends in, with its hooks and scratch allocators."""
    runtime = triton.knobs.runtime
    function, packed = compiled.function, compiled.packed_metadata

    def launch(x: int, y: int, z: int, stream: int, arguments: tuple[Any, ...]) -> None:
        metadata = compiled.launch_metadata((x, y, z), stream, *arguments)
        run(x, y, z, stream, function, packed, metadata, runtime.launch_enter_hook, runtime.launch_exit_hook,
            *arguments)  # fmt: skip

    return launch


def _driver(compiled: Any, run: Any) -> Driver | None:
    """The driver call of ``compiled`` in the form of this Triton's minor; None where that is not known."""
    if MINOR not in FAST_MINORS:
        _announce(f"triton {triton.__version__}: no fast launch for this version yet; launching through Triton's own")
        return None
    if _needs_scratch(run) or not (hasattr(run, "launch_cooperative_grid") and hasattr(run, "launch_pdl")):
        return None
    flags, packed = (run.launch_cooperative_grid, run.launch_pdl), compiled.packed_metadata
    if MINOR == (3, 6):
        return Driver(run.launch, (compiled.function, *flags, None, None, packed, None, None, None), spread=True)
    typed = (run.arg_annotations, run.kernel_signature)
    return Driver(run.launch, (compiled.function, *flags, packed, *(None,) * 5, *typed), spread=False)


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


def fix_interpreter_rounding() -> bool:
    """Make the interpreter round float32 to bfloat16 to nearest even, as devices do; whether that took effect.

    As shipped it cuts the low bits off, which is up to one unit in the last place off, and turns a NaN whose payload
    lies there into an infinity.
    """
    try:
        import numpy as np
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        return False
    shipped = getattr(InterpreterBuilder, "cast_impl", None)
    if shipped is None or MINOR not in FAST_MINORS:
        return False
    if getattr(shipped, "kalign", False):
        return True

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = (src.dtype.scalar.name, dst_type.scalar.name)
        if kinds == ("bf16", "fp32"):
            return TensorHandle(np.asarray(_as_numbers(src)), dst_type.scalar)
        if kinds == ("fp32", "bf16"):
            return TensorHandle(np.asarray(_rounded_to_bf16(src.data)), dst_type.scalar)
        return shipped(self, src, dst_type)

    cast_impl.kalign = True  # type: ignore[attr-defined]
    InterpreterBuilder.cast_impl = cast_impl
    return True


def _rounded_to_bf16(data: Any) -> Any:
    """Bit patterns of bfloat16, in 16-bit integers, of float32 numbers rounded to nearest even; NaN is 0x7FC0."""
    import numpy as np

    pattern = np.asarray(data).view(np.uint32)
    rounded = (pattern + (np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _as_numbers(handle: Any) -> Any:
    """The numbers of an interpreter tensor; bfloat16 may be held as its bit pattern in 16-bit integers."""
    import numpy as np

    data = handle.data
    if handle.dtype.scalar.name == "bf16" and data.dtype == np.uint16:
        return (np.asarray(data).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data
