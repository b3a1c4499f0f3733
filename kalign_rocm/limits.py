"""What AMD devices can take: the device models, and the static reasons for which a candidate is refused.

The compiler accepts what a device cannot launch (32 wavefronts, three stages of a large tile), and the launch is too
late to find out. The rules here refuse only what cannot work or is certain to spill, so that they never cost a winner;
LDS is a lower bound over the compilers seen, the compiled kernel's own figure decides afterwards.

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

LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "waves_per_eu"})
FOREIGN_OPTIONS = ("num_ctas", "maxnreg")
TILES = ("BLOCK", "ROWS", "BM", "BN", "BK")
SMALLEST_DOT = 16
# Beside its accumulators or its row a program holds addresses, masks and operands.
OPERAND_REGISTERS = 16
WARP = 64
MOST_WAVES_PER_SIMD = 8
SIMD_REGISTERS = 512
# Half of a lane's registers accumulate matrix products and can do nothing else.
VECTOR_REGISTERS = 256
MATRIX_SIZES = (0, 16, 32)


def _model(arch: str, shared_bytes: int, units: int, last_level_mb: int, lds_step_bytes: int = 512) -> DeviceModel:
    return DeviceModel(
        backend="hip", arch=arch, warp_size=WARP, max_warps=16, shared_bytes=shared_bytes,
        registers_per_block=4 * SIMD_REGISTERS * WARP, registers_per_thread=SIMD_REGISTERS, units=units,
        last_level_bytes=last_level_mb * 2**20, unit=_unit(shared_bytes, lds_step_bytes),
    )  # fmt: skip


def _unit(lds_bytes: int, lds_step_bytes: int) -> Unit:
    """A compute unit: 4 SIMDs of 8 waves, registers in steps of 8 a lane (LLVM's ``AMDGPUBaseInfo.cpp``, gfx90a on)."""
    waves = 4 * MOST_WAVES_PER_SIMD
    return Unit(
        warps=waves, blocks=waves, shared_bytes=lds_bytes, shared_step_bytes=lds_step_bytes,
        registers=4 * SIMD_REGISTERS * WARP, register_step=8 * WARP,
    )  # fmt: skip


# LDS per group, compute units and cache: ROCm's table of accelerators. A group has at most 1,024 work-items, a unit 4
# SIMDs of 512 registers a lane. Units are those of one device with the whole board (MI250X: one of its two dies;
# MI300X; MI355X); a partition reports fewer. The last level is what a cold timing must rotate past: 256 MB of memory
# side cache on MI300 and MI350, of which the run time reports only the 4 MB of one die's L2.
MODELS: tuple[DeviceModel, ...] = (
    _model("gfx90a", 65536, 110, 8),
    _model("gfx942", 65536, 304, 256),
    _model("gfx950", 163840, 256, 256, 1280),
)
# The least any supported device has, with the largest cache to rotate past: what an architecture without a row gets.
SMALLEST = _model("gfx_unknown", 65536, 0, 256)
_BY_ARCH: Mapping[str, DeviceModel] = {model.arch: model for model in MODELS}


def model_for(
    arch: str, *, shared_bytes: int = 0, units: int = 0, last_level_bytes: int = 0, warp_size: int = 0
) -> DeviceModel:
    """The model of ``arch`` (``gfx942``) with what a live device reports in place of the table's; 0 is not reported.

    The last level is the larger of the two, since the run time reports an inner one. An architecture without a row
    gets the smallest limits, and that is logged.
    """
    known = _BY_ARCH.get(arch)
    if known is None:
        _announce(arch)
    model = known or replace(SMALLEST, arch=arch)
    return replace(
        model,
        shared_bytes=shared_bytes or model.shared_bytes,
        units=units or model.units,
        last_level_bytes=max(last_level_bytes, model.last_level_bytes),
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
        return f"num_warps={warps} makes {int(warps) * model.warp_size} work-items; {model.arch} takes 1024"
    return None


def _options(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    for name in FOREIGN_OPTIONS:
        if config.get(name, 1) != 1 and name not in kernel.constants:
            return f"{name} is no option of this compiler"
    waves, size, pack = (config.get(name, 0) for name in ("waves_per_eu", "matrix_instr_nonkdim", "kpack"))
    if not isinstance(waves, int) or not 0 <= waves <= MOST_WAVES_PER_SIMD:
        return f"waves_per_eu={waves}; a SIMD holds 1 to {MOST_WAVES_PER_SIMD}, and 0 leaves it to the compiler"
    tile = _tile(kernel, config)
    if size not in MATRIX_SIZES or (tile is not None and int(size) > min(tile[:2])):
        return f"matrix_instr_nonkdim={size} falls back to scalar multiplication"
    if pack == 2 and (model.arch == "gfx950" or (tile is not None and tile[2] <= SMALLEST_DOT)):
        return "kpack=2 is ignored on gfx950 and for tiles of depth 16"
    return None


def _stages(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    stages = config.get("num_stages", 2)
    if not isinstance(stages, int) or stages < 0:
        return f"num_stages={stages} is less than none"
    if stages > 2 and model.arch not in _BY_ARCH:
        return f"num_stages={stages}; the compiler has hung on more than two for consumer devices"
    return None


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
    budget = SIMD_REGISTERS // max(1, _integer(config, "waves_per_eu", 0))
    most = min(model.registers_per_thread, model.registers_per_block // threads, budget)
    tile = _tile(kernel, config)
    if tile is not None:
        held, what, most = tile[0] * tile[1] // threads, "accumulators", most - OPERAND_REGISTERS
    elif kernel.family in ("rowwise", "pointwise"):
        held, what = held_elements(kernel, problem, config) // threads, "elements"
        most = min(most, VECTOR_REGISTERS) - OPERAND_REGISTERS
    else:
        return None
    return f"{held} {what} a work-item in {most} registers" if held > most else None


def _shared(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    needed = shared_bytes(kernel, problem, model, config)
    if needed > model.shared_bytes:
        return f"at least {needed} bytes of LDS; {model.arch} has {model.shared_bytes} a group"
    return None


def _grid(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    programs = max(kernel.grid(problem, config))
    threads = programs * _integer(config, "num_warps", 4) * model.warp_size
    return f"{threads} work-items along one axis; HIP takes fewer than 2**32" if threads >= 2**32 else None


Rule = Callable[["Kernel", Problem, DeviceModel, Config], str | None]
RULES: tuple[Rule, ...] = (_threads, _options, _stages, _tile_sizes, _registers, _shared, _grid)


# --- estimates ----------------------------------------------------------------------------------------------------


def operand_bytes(kernel: Kernel, problem: Problem) -> int:
    """Bytes of one element of the narrowest matrix that the kernel reads; 2 where it reads none."""
    matrices = [name for name, role in kernel.args.items() if role.kind == "data" and len(role.shape) > 1]
    sizes = [ITEM_BYTES[problem.dtype(name)] for name in matrices if problem.dtype(name) in ITEM_BYTES]
    return min(sizes, default=2)


def shared_bytes(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> int:
    """LDS that the tiles of a matmul need at least; 0 for other families.

    Without pipelining (0 or 1 stages) the larger tile alone; with it one pair of tiles for every stage but one, the
    last being held in registers. Compiled with Triton 3.6 and 3.9; 3.9 holds all stages in LDS on gfx950.
    """
    tile = _tile(kernel, config)
    if tile is None:
        return 0
    stages = _integer(config, "num_stages", 2)
    held = max(tile[:2]) if stages < 2 else (stages - 1) * (tile[0] + tile[1])
    return held * tile[2] * operand_bytes(kernel, problem)


def _tile(kernel: Kernel, config: Config) -> tuple[int, int, int] | None:
    """Rows, columns and depth of a matmul's tile, or None for other families."""
    sizes = [config.get(name) for name in ("BM", "BN", "BK")]
    if kernel.family != "matmul" or not all(isinstance(size, int) for size in sizes):
        return None
    return int(sizes[0] or 0), int(sizes[1] or 0), int(sizes[2] or 0)


def _integer(config: Config, name: str, otherwise: int) -> int:
    value = config.get(name, otherwise)
    return value if isinstance(value, int) else otherwise


def _power_of_two(value: object) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0
