"""What NVIDIA devices can take, and what is refused before it is compiled."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kalign_core.held import held_elements
from kalign_core.records import DeviceModel
from kalign_cuda import limits
from tests.cuda import samples

H200 = limits.model_for("sm_90")


# --- the table ----------------------------------------------------------------------------------------------------


def test_the_table_holds_the_supported_architectures() -> None:
    """There is one model for every supported architecture."""
    archs = [model.arch for model in limits.MODELS]
    assert archs == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]


def test_consumer_blackwell_is_not_a_b200() -> None:
    """sm_120 has Ada's shared memory and no tensor memory, though its number is higher than the B200's."""
    model = limits.model_for("sm_120")
    assert (model.shared_bytes, model.tmem_columns, model.max_ctas) == (101376, 0, 1)


def test_the_table_speaks_where_the_device_does_not() -> None:
    """What a device does not report is the table's."""
    assert limits.model_for("sm_90") in limits.MODELS


def test_the_device_speaks_first() -> None:
    """What a live device reports stands in place of the table's figures."""
    model = limits.model_for("sm_90", shared_bytes=166912, units=16, last_level_bytes=8 << 20)
    assert (model.shared_bytes, model.units, model.last_level_bytes) == (166912, 16, 8 << 20)


def test_an_unknown_architecture_gets_the_smallest_limits(caplog: pytest.LogCaptureFixture) -> None:
    """An architecture without a row is kept to what every device has, and that is said once."""
    models = [limits.model_for("sm_75") for _ in range(3)]
    least = min(model.shared_bytes for model in limits.MODELS)
    assert models[0].arch == "sm_75"
    assert models[0].shared_bytes <= least
    assert (models[0].tmem_columns, models[0].max_ctas) == (0, 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# --- refusing -----------------------------------------------------------------------------------------------------

REFUSED = {
    "three warps": ({"num_warps": 3}, "power of two"),
    "no warps": ({"num_warps": 0}, "power of two"),
    "64 warps": ({"num_warps": 64}, "2048 threads"),
    "no stage": ({"num_stages": 0}, "num_stages=0"),
    "an odd tile": ({"BN": 96}, "BN=96"),
    "a tile too small for a matrix instruction": ({"BK": 8}, "BK=8"),
    "stages that do not fit": ({"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 5}, "327680 bytes"),
    "accumulators that do not fit": ({"BM": 128, "BN": 256, "num_warps": 4, "num_stages": 2}, "256 accumulators"),
    "threads that leave each few registers": ({"BM": 256, "BN": 256, "num_warps": 16, "num_stages": 2}, "in 112"),
    "clusters of 16": ({"num_ctas": 16}, "num_ctas=16"),
    "few registers for warpgroups": ({"maxnreg": 64}, "maxnreg=64"),
    "an option of another vendor": ({"waves_per_eu": 2}, "waves_per_eu"),
    "a good one": ({"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 4}, None),
    "a good one with options": ({"num_ctas": 2, "maxnreg": 128}, None),
}


@pytest.mark.parametrize(("knobs", "expected"), REFUSED.values(), ids=REFUSED)
def test_matmuls_on_hopper(knobs: dict[str, int], expected: str | None) -> None:
    """What cannot work is refused in words that name the value; what can work is not."""
    kernel, problem = samples.matmul(4096)
    reason = limits.veto(kernel, problem, H200, kernel.reference_config(problem).replace(**knobs))
    assert (reason is None) == (expected is None)
    assert (expected or "") in (reason or "")


def test_ada_has_less_shared_memory() -> None:
    """A tile that fits Hopper is refused where a block has 99 KiB."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(BM=128, BN=128, BK=64, num_warps=8, num_stages=5)
    models = [limits.model_for(arch) for arch in ("sm_90", "sm_89", "sm_120")]
    assert [limits.veto(kernel, problem, model, config) is None for model in models] == [True, False, False]


def test_tensor_memory_holds_the_accumulators() -> None:
    """On a B200 a tile of 256 x 256 fits the 512 columns of tensor memory, and needs no registers."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(BM=256, BN=256, BK=64, num_warps=8, num_stages=3)
    assert limits.veto(kernel, problem, limits.model_for("sm_100"), config) is None


def test_tensor_memory_takes_four_or_eight_warps() -> None:
    """With 16 warps the B200's accumulators are in registers again, and do not fit."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(BM=256, BN=256, BK=64, num_warps=16, num_stages=2)
    assert "128 accumulators" in str(limits.veto(kernel, problem, limits.model_for("sm_100"), config))


def test_tensor_memory_has_512_columns() -> None:
    """A tile that needs more columns than there are is refused."""
    kernel, problem = samples.matmul(4096)
    config = kernel.reference_config(problem).replace(BM=256, BN=512, BK=16, num_warps=8, num_stages=1)
    assert "1024 columns" in str(limits.veto(kernel, problem, limits.model_for("sm_103"), config))


def test_clusters_need_hopper() -> None:
    """Clusters are refused below sm_90, where the compiler has none."""
    kernel, problem = samples.swiglu(4096, 12288)
    config = kernel.reference_config(problem).replace(num_ctas=2)
    assert limits.veto(kernel, problem, limits.model_for("sm_89"), config) is not None


def test_wide_types_need_more_shared_memory() -> None:
    """The same tile needs twice the shared memory for float32 as for bfloat16."""
    kernel, half = samples.matmul(4096)
    _, full = samples.matmul(4096, "fp32")
    config = kernel.reference_config(half).replace(BM=128, BN=256, BK=64, num_warps=8, num_stages=4)
    needed = [limits.shared_bytes(kernel, problem, H200, config) for problem in (half, full)]
    assert needed == [196608, 393216]


def test_rows_are_as_wide_as_what_is_written() -> None:
    """Rows that are held whole count, whatever a kernel calls their width: 16 of 8,192 fit no single warp."""
    kernel, problem = samples.softmax(4096, 8192)
    config = kernel.reference_config(problem).replace(ROWS=16, num_warps=1)
    assert held_elements(kernel, problem, config) == 16 * 8192
    assert "elements a thread" in str(limits.veto(kernel, problem, H200, config))
    assert limits.veto(kernel, problem, H200, config.replace(ROWS=1, num_warps=8)) is None


def test_a_row_is_held_in_registers() -> None:
    """A row of 65,536 elements on one warp is refused: it would spill nearly all of them."""
    kernel, problem = samples.rms_norm(16, 65536)
    config = kernel.reference_config(problem).replace(num_warps=1)
    assert "2048 elements a thread" in str(limits.veto(kernel, problem, H200, config))


@pytest.mark.parametrize("model", [*limits.MODELS, limits.SMALLEST], ids=lambda model: model.arch)
@pytest.mark.parametrize("sample", samples.SHIPPED.values(), ids=samples.SHIPPED)
def test_references_are_legal_everywhere(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """The reference launch of every shipped kernel is legal on every device, and on the least there is."""
    kernel, problem = sample
    assert limits.veto(kernel, problem, model, kernel.reference_config(problem)) is None


def test_an_unknown_family_is_checked_as_far_as_known() -> None:
    """A kernel of a family without rules is refused for threads, and for nothing that it does not say of itself."""
    kernel, problem = samples.matmul(4096)
    stranger = type(kernel)(**{**vars(kernel), "family": "scan"})
    config = kernel.reference_config(problem).replace(BM=256, BN=256, BK=256, num_warps=1)
    found = [limits.veto(stranger, problem, H200, config.replace(num_warps=w)) for w in (1, 64)]
    assert [reason is None for reason in found] == [True, False]


# --- the estimate -------------------------------------------------------------------------------------------------

TILES = ("BM=128 BN=128 BK=64 num_warps=8 num_stages=3", "BM=16 BN=64 BK=128 num_warps=4 num_stages=2",
         "BM=64 BN=32 BK=64 num_warps=4 num_stages=1")  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100"])
def test_the_estimate_is_a_lower_bound(arch: str, child: Callable[..., Any]) -> None:
    """The compiler never takes less shared memory than is asked for here, and takes at most some barriers more."""
    kernel, problem = samples.matmul(4096)
    model = limits.model_for(arch)
    target = ["cuda", int(arch.removeprefix("sm_")), limits.WARP]
    done = child(samples.COMPILES.replace("sys.argv[1]", repr(json.dumps([target, TILES]))))
    assert done.returncode == 0, done.stderr
    configs = [samples.parsed(kernel, problem, text) for text in TILES]
    estimates = [limits.shared_bytes(kernel, problem, model, config) for config in configs]
    extra = [int(taken) - least for taken, least in zip(done.stdout.split(), estimates, strict=True)]
    assert [0 <= more <= 64 for more in extra] == [True] * len(TILES), extra
