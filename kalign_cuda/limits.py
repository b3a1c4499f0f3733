"""What NVIDIA devices can take: the device models, and the static reasons for which a candidate is refused.

The compiler accepts what a device cannot launch (64 warps, five stages of a large tile), and the launch is too late to
find out. The rules here refuse only what cannot work or is certain to spill, so that they never cost a winner; shared
memory is a lower bound over the compilers seen, the compiled kernel's own figure decides afterwards.

Imports nothing but the standard library and ``kalign_core``'s records.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kalign_core.held import held_elements
from kalign_core.records import ITEM_BYTES, Config, DeviceModel, Problem, Unit

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

log = logging.getLogger("kalign")

LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"})
FOREIGN_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
TILES = ("BLOCK", "ROWS", "BM", "BN", "BK")
SMALLEST_DOT = 16
# Beside its accumulators a matmul holds addresses, masks and operands.
OPERAND_REGISTERS = 16
WARP = 32
# Warpgroup matrix instructions hold their operands' descriptors and pipeline state in registers: the assembler gives up
# below about 90 a thread (seen compiling for sm_90).
FEWEST_WARPGROUP_REGISTERS = 96


def _model(
    arch: str, shared_bytes: int, units: int, last_level_mb: int, unit: Unit, tmem: int = 0, ctas: int = 1
) -> DeviceModel:
    return DeviceModel(
        backend="cuda", arch=arch, warp_size=WARP, max_warps=32, shared_bytes=shared_bytes,
        registers_per_block=65536, registers_per_thread=255, units=units,
        last_level_bytes=last_level_mb * 2**20, tmem_columns=tmem, max_ctas=ctas, unit=unit,
    )  # fmt: skip


def _unit(threads: int, blocks: int, shared_kib: int) -> Unit:
    return Unit(
        warps=threads // WARP, blocks=blocks, shared_bytes=shared_kib * 1024, shared_step_bytes=128,
        registers=65536, register_step=256, reserved_bytes=1024,
    )  # fmt: skip


# What a multiprocessor holds: the table of compute capabilities in CUDA's programming guide, and its occupancy
# calculator for the steps.
SM_80 = _unit(2048, 32, 164)
SM_86 = _unit(1536, 16, 100)
SM_89 = _unit(1536, 24, 100)
SM_90 = _unit(2048, 32, 228)
# Shared bytes are the opt-in maximum per block: CCCL's arch_traits.h, as are 1024 threads and 65,536 registers a block
# and 255 registers a thread. Units and the last level are those of the largest board of each architecture in the
# vendor's tables (A100, A40, L40S with the full die's cache, H200 as its driver reports it, B200, B300, RTX 5090); a
# device at hand overrides them. Tensor memory: 512 columns (compiled). Clusters of 8 are the portable maximum; below
# sm_90 the compiler refuses them, and GeForce Blackwell has no multicast.
MODELS: tuple[DeviceModel, ...] = (
    _model("sm_80", 166912, 108, 40, SM_80),
    _model("sm_86", 101376, 84, 6, SM_86),
    _model("sm_89", 101376, 142, 96, SM_89),
    _model("sm_90", 232448, 132, 60, SM_90, ctas=8),
    _model("sm_100", 232448, 148, 126, SM_90, tmem=512, ctas=8),
    _model("sm_103", 232448, 148, 126, SM_90, tmem=512, ctas=8),
    _model("sm_120", 101376, 170, 96, SM_89),
)
# The least any supported device has, with the largest cache to rotate past: what an architecture without a row gets.
SMALLEST = _model("sm_unknown", 65536, 0, 128, SM_86)
_BY_ARCH: Mapping[str, DeviceModel] = {model.arch: model for model in MODELS}


def model_for(
    arch: str, *, shared_bytes: int = 0, units: int = 0, last_level_bytes: int = 0, warp_size: int = 0
) -> DeviceModel:
    """The model of ``arch`` (``sm_90``) with what a live device reports in place of the table's; 0 is not reported.

    An architecture without a row gets the smallest limits, and that is logged.
    """
    known = _BY_ARCH.get(arch)
    if known is None:
        _announce(arch)
    model = known or replace(SMALLEST, arch=arch)
    return replace(
        model,
        shared_bytes=shared_bytes or model.shared_bytes,
        units=units or model.units,
        last_level_bytes=last_level_bytes or model.last_level_bytes,
        warp_size=warp_size or model.warp_size,
    )


@functools.cache
def _announce(arch: str) -> None:
    log.warning("%s is not in the table of devices: kept to the smallest limits any has", arch or "this device")


# --- refusing -----------------------------------------------------------------------------------------------------


def veto(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    """Why ``config`` cannot work on ``model``, in words, or None."""
    for rule in RULES:
        reason = rule(kernel, problem, model, config)
        if reason is not None:
            return reason
    return None


def _threads(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    warps = config.get("num_warps", 4)
    if not _power_of_two(warps):
        return f"num_warps={warps} is no power of two"
    if int(warps) > model.max_warps:
        return f"num_warps={warps} makes {int(warps) * model.warp_size} threads; {model.arch} takes 1024"
    return None


def _options(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    for name in FOREIGN_OPTIONS:
        if name in config and name not in kernel.constants:
            return f"{name} is no option of this compiler"
    ctas, registers = config.get("num_ctas", 1), config.get("maxnreg")
    if not _power_of_two(ctas) or int(ctas) > model.max_ctas:
        return f"num_ctas={ctas}; {model.arch} takes powers of two up to {model.max_ctas}"
    if registers is None:
        return None
    fewest = FEWEST_WARPGROUP_REGISTERS if kernel.family == "matmul" and _warpgroups(model) else 1
    if not isinstance(registers, int) or not fewest <= registers <= model.registers_per_thread:
        return f"maxnreg={registers}; {kernel.family} on {model.arch} takes {fewest} to {model.registers_per_thread}"
    return None


def overlaps(kernel: Kernel, model: DeviceModel) -> bool:
    """Whether ``kernel`` may start while its predecessor ends: programmatic dependent launch, from capability 9.0."""
    number = model.arch.removeprefix("sm_")
    return kernel.overlaps and number.isdecimal() and int(number) >= 90


def _overlap(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    if config.get("launch_pdl") and not overlaps(kernel, model):
        return f"launch_pdl; {kernel.name} on {model.arch} starts when the kernel before it has ended"
    return None


def _stages(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    stages = config.get("num_stages", 1)
    return None if isinstance(stages, int) and stages >= 1 else f"num_stages={stages} is less than one"


def _tile_sizes(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    for name in TILES:
        if name not in config or name not in kernel.constants:
            continue
        if not _power_of_two(config[name]):
            return f"{name}={config[name]} is no power of two"
        if kernel.family == "matmul" and int(config[name]) < SMALLEST_DOT:
            return f"{name}={config[name]}; a matrix instruction takes at least {SMALLEST_DOT}"
    return None


def _registers(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    threads = _integer(config, "num_warps", 4) * model.warp_size
    most = min(model.registers_per_thread, model.registers_per_block // threads)
    tile = _tile(kernel, config)
    if tile is not None and not _uses_tensor_memory(model, config):
        held, what, most = tile[0] * tile[1] // threads, "accumulators", most - OPERAND_REGISTERS
    elif kernel.family in ("rowwise", "pointwise"):
        held, what = held_elements(kernel, problem, config) // threads, "elements"
    else:
        return None
    return f"{held} {what} a thread in {most} registers" if held > most else None


def _shared(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    needed = shared_bytes(kernel, problem, model, config)
    if needed > model.shared_bytes:
        return f"at least {needed} bytes of shared memory; {model.arch} has {model.shared_bytes} a block"
    return None


def _tensor_memory(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    tile = _tile(kernel, config)
    if tile is None or not _uses_tensor_memory(model, config):
        return None
    columns = max(1, tile[0] // 128) * tile[1]  # 128 lanes of 32 bits a column
    if columns > model.tmem_columns:
        return f"{columns} columns of tensor memory; {model.arch} has {model.tmem_columns}"
    return None


Rule = Callable[["Kernel", Problem, DeviceModel, Config], str | None]
RULES: tuple[Rule, ...] = (_threads, _options, _overlap, _stages, _tile_sizes, _registers, _shared, _tensor_memory)


# --- estimates ----------------------------------------------------------------------------------------------------


def operand_bytes(kernel: Kernel, problem: Problem) -> int:
    """Bytes of one element of the narrowest matrix that the kernel reads; 2 where it reads none."""
    matrices = [name for name, role in kernel.args.items() if role.kind == "data" and len(role.shape) > 1]
    sizes = [ITEM_BYTES[problem.dtype(name)] for name in matrices if problem.dtype(name) in ITEM_BYTES]
    return min(sizes, default=2)


def shared_bytes(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> int:
    """Shared memory that the tiles of a matmul need at least; 0 for other families.

    One pair of tiles per stage where matrix instructions read shared memory (sm_90 from 64 rows on; sm_100 with 4 or 8
    warps), one less where they read registers. Compiled with Triton 3.6 and 3.9; both add a few bytes of barriers.
    """
    tile = _tile(kernel, config)
    if tile is None:
        return 0
    stages = _integer(config, "num_stages", 1)
    held = stages if _warpgroups(model) and _large_instructions(model, config) else max(1, stages - 1)
    return held * (tile[0] + tile[1]) * tile[2] * operand_bytes(kernel, problem)


def _tile(kernel: Kernel, config: Config) -> tuple[int, int, int] | None:
    """Rows, columns and depth of a matmul's tile, or None for other families."""
    sizes = [config.get(name) for name in ("BM", "BN", "BK")]
    if kernel.family != "matmul" or not all(isinstance(size, int) for size in sizes):
        return None
    return int(sizes[0] or 0), int(sizes[1] or 0), int(sizes[2] or 0)


def _warpgroups(model: DeviceModel) -> bool:
    return model.arch in ("sm_90", "sm_100", "sm_103")


def _large_instructions(model: DeviceModel, config: Config) -> bool:
    warps = _integer(config, "num_warps", 4)
    return _integer(config, "BM", 0) >= 64 and (warps in (4, 8) if model.tmem_columns else warps >= 4)


def _uses_tensor_memory(model: DeviceModel, config: Config) -> bool:
    return model.tmem_columns > 0 and _large_instructions(model, config)


def _integer(config: Config, name: str, otherwise: int) -> int:
    value = config.get(name, otherwise)
    return value if isinstance(value, int) else otherwise


def _power_of_two(value: object) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0
