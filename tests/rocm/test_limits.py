"""What AMD devices can take, and what is refused before it is compiled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kalign_core.held import held_elements
from kalign_core.records import DeviceModel
from kalign_rocm import limits
from tests.cuda import samples

MI300X = limits.model_for("gfx942")


# --- the table ----------------------------------------------------------------------------------------------------


def test_the_table_holds_the_supported_architectures() -> None:
    """There is one model for every supported architecture, with wavefronts of 64 and groups of 1024 work-items."""
    found = [(model.arch, model.warp_size * model.max_warps) for model in limits.MODELS]
    assert found == [("gfx90a", 1024), ("gfx942", 1024), ("gfx950", 1024)]


def test_lds_grew_with_gfx950() -> None:
    """A group has 64 KiB of LDS, and 160 KiB from gfx950 on."""
    assert [model.shared_bytes for model in limits.MODELS] == [65536, 65536, 163840]


def test_a_cold_timing_rotates_past_the_last_level() -> None:
    """The run time reports one die's L2; the 256 MB behind it are what a cold timing must rotate past."""
    assert limits.model_for("gfx942", last_level_bytes=4 << 20).last_level_bytes == 256 << 20


def test_a_partition_has_fewer_units() -> None:
    """Units are what the device reports: a part of a board has its own."""
    assert limits.model_for("gfx942", units=38).units == 38


def test_the_table_speaks_where_the_device_does_not() -> None:
    """What a device does not report is the table's."""
    assert limits.model_for("gfx942") in limits.MODELS


def test_an_unknown_architecture_gets_the_smallest_limits(caplog: pytest.LogCaptureFixture) -> None:
    """An architecture without a row is kept to what every device has, and that is said once."""
    models = [limits.model_for("gfx1201", warp_size=32) for _ in range(3)]
    assert (models[0].arch, models[0].warp_size, models[0].shared_bytes) == ("gfx1201", 32, 65536)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# --- refusing -----------------------------------------------------------------------------------------------------

REFUSED = {
    "three wavefronts": ({"num_warps": 3}, "power of two"),
    "no wavefronts": ({"num_warps": 0}, "power of two"),
    "32 wavefronts": ({"num_warps": 32}, "2048 work-items"),
    "less than no stage": ({"num_stages": -1}, "num_stages=-1"),
    "no pipelining": ({"num_stages": 0}, None),
    "an odd tile": ({"BN": 96}, "BN=96"),
    "a tile too small for a matrix instruction": ({"BK": 8}, "BK=8"),
    "stages that do not fit": ({"BM": 256, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3}, "131072 bytes"),
    "a tile that fills LDS": ({"BM": 256, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 2}, None),
    "accumulators that do not fit": ({"BM": 256, "BN": 256, "BK": 32, "num_warps": 1, "num_stages": 2}, "1024 acc"),
    "a budget of nine waves": ({"waves_per_eu": 9}, "waves_per_eu=9"),
    "no budget": ({"waves_per_eu": 0}, None),
    "a budget of two": ({"BM": 256, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 2, "waves_per_eu": 2}, None),
    "a budget below the accumulators": (
        {"BM": 256, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 2, "waves_per_eu": 4},
        "128 accumulators",
    ),
    "a matrix instruction of 64": ({"matrix_instr_nonkdim": 64}, "matrix_instr_nonkdim=64"),
    "a matrix instruction larger than the tile": ({"BM": 16, "matrix_instr_nonkdim": 32}, "matrix_instr_nonkdim=32"),
    "a matrix instruction of 16": ({"matrix_instr_nonkdim": 16}, None),
    "packing a shallow tile": ({"BK": 16, "kpack": 2}, "kpack=2"),
    "clusters": ({"num_ctas": 2}, "num_ctas"),
    "a register cap of another vendor": ({"maxnreg": 128}, "maxnreg"),
}


@pytest.mark.parametrize(("knobs", "expected"), REFUSED.values(), ids=REFUSED)
def test_matmuls_on_mi300(knobs: dict[str, int], expected: str | None) -> None:
    """What cannot work is refused in words that name the value; what can work is not."""
    kernel, problem = samples.matmul(4096)
    reason = limits.veto(kernel, problem, MI300X, kernel.reference_config(problem).replace(**knobs))
    assert (reason is None) == (expected is None)
    assert (expected or "") in (reason or "")


def test_gfx950_has_more_lds() -> None:
    """Stages that overfill 64 KiB fit 160."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(BM=128, BN=256, BK=64, num_warps=8, num_stages=3)
    models = [limits.model_for(arch) for arch in ("gfx942", "gfx950")]
    assert [limits.veto(kernel, problem, model, config) is None for model in models] == [False, True]


def test_gfx950_packs_by_itself() -> None:
    """kpack is refused on gfx950, where the compiler ignores it."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(kpack=2)
    models = [limits.model_for(arch) for arch in ("gfx942", "gfx950")]
    assert [limits.veto(kernel, problem, model, config) is None for model in models] == [True, False]


def test_deep_pipelines_on_consumer_devices() -> None:
    """More than two stages are refused for devices outside the table, on which the compiler has hung."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(num_stages=3)
    assert limits.veto(kernel, problem, limits.model_for("gfx1201", warp_size=32), config) is not None


def test_rows_are_as_wide_as_what_is_written() -> None:
    """Rows that are held whole count, whatever a kernel calls their width: 16 of 8,192 fit no single warp."""
    kernel, problem = samples.softmax(4096, 8192)
    config = kernel.reference_config(problem).replace(ROWS=16, num_warps=1)
    assert held_elements(kernel, problem, config) == 16 * 8192
    assert "elements a work-item" in str(limits.veto(kernel, problem, MI300X, config))
    assert limits.veto(kernel, problem, MI300X, config.replace(ROWS=1, num_warps=8)) is None


def test_a_row_is_held_in_registers() -> None:
    """A row of 65,536 elements on one wavefront is refused: the compiler takes many seconds over it and spills."""
    kernel, problem = samples.rms_norm(16, 65536)
    reference = kernel.reference_config(problem)
    found = {w: limits.veto(kernel, problem, MI300X, reference.replace(num_warps=w)) is None for w in (1, 2, 8, 16)}
    assert found == {1: False, 2: False, 8: True, 16: True}


def test_a_row_that_fills_the_registers() -> None:
    """A row that takes every vector register of a wavefront is refused: compiled, it takes minutes and spills."""
    kernel, problem = samples.rms_norm(16, 16384)
    reference = kernel.reference_config(problem)
    found = {w: limits.veto(kernel, problem, MI300X, reference.replace(num_warps=w)) for w in (1, 2)}
    assert found == {1: "256 elements a work-item in 240 registers", 2: None}


def test_work_items_along_an_axis() -> None:
    """HIP counts work-items, not programs: four thousand million of them are too many for one axis."""
    kernel, problem = samples.swiglu(2**21, 65536)
    config = kernel.reference_config(problem).replace(BLOCK=256, num_warps=4)
    assert "2**32" in str(limits.veto(kernel, problem, MI300X, config))


@pytest.mark.parametrize("model", limits.MODELS, ids=lambda model: model.arch)
@pytest.mark.parametrize("sample", samples.SHIPPED.values(), ids=samples.SHIPPED)
def test_references_are_legal_everywhere(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """The reference launch of every shipped kernel is legal on every device."""
    kernel, problem = sample
    assert limits.veto(kernel, problem, model, kernel.reference_config(problem)) is None


def test_an_unknown_family_is_checked_as_far_as_known() -> None:
    """A kernel of a family without rules is refused for threads, and for nothing that it does not say of itself."""
    kernel, problem = samples.matmul(4096)
    stranger = type(kernel)(**{**vars(kernel), "family": "scan"})
    config = kernel.reference_config(problem).replace(BM=256, BN=256, BK=256, num_warps=1)
    found = [limits.veto(stranger, problem, MI300X, config.replace(num_warps=w)) for w in (1, 64)]
    assert [reason is None for reason in found] == [True, False]


# --- the estimate -------------------------------------------------------------------------------------------------

TILES = (
    "BM=128 BN=128 BK=64 num_warps=8 num_stages=3",
    "BM=16 BN=64 BK=128 num_warps=4 num_stages=2",
    "BM=64 BN=32 BK=64 num_warps=4 num_stages=1",
)
# From 3.9 on the compiler holds every stage of gfx950 in LDS, with some padding.
MOST_TIMES = {"gfx90a": 1.0, "gfx942": 1.0, "gfx950": 2.2}


@pytest.mark.parametrize("arch", MOST_TIMES)
def test_the_estimate_is_a_lower_bound(arch: str, child: Callable[..., Any]) -> None:
    """The compiler never takes less LDS than is asked for here, and exactly that before gfx950."""
    kernel, problem = samples.matmul(4096)
    model = limits.model_for(arch)
    done = child(samples.COMPILES.replace("sys.argv[1]", repr(json.dumps([["hip", arch, limits.WARP], TILES]))))
    assert done.returncode == 0, done.stderr
    configs = [samples.parsed(kernel, problem, text) for text in TILES]
    estimates = [limits.shared_bytes(kernel, problem, model, config) for config in configs]
    times = [int(taken) / least for taken, least in zip(done.stdout.split(), estimates, strict=True)]
    assert [1 <= more <= MOST_TIMES[arch] for more in times] == [True] * len(TILES), times
