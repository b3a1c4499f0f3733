"""Which launches are worth trying on NVIDIA devices."""

from __future__ import annotations

from typing import Any

import pytest

from kalign_core.held import held_elements
from kalign_core.records import DeviceModel
from kalign_cuda import limits, spaces
from tests.cuda import samples

H200 = limits.model_for("sm_90")
each_model = pytest.mark.parametrize("model", limits.MODELS, ids=lambda model: model.arch)
each_sample = pytest.mark.parametrize("sample", samples.ALL.values(), ids=samples.ALL)


@each_model
@each_sample
def test_only_schedule_knobs_change(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """A candidate differs from the reference in the kernel's own knobs and, where it may be launched early, in that."""
    kernel, problem = sample
    reference = kernel.reference_config(problem)
    found = spaces.candidates(kernel, problem, model)
    changed = {name for config in found for name in config if config[name] != reference.get(name)}
    assert changed <= {*kernel.knobs, "launch_pdl"}
    assert {tuple(config) for config in found} <= {tuple(reference), tuple(reference.replace(launch_pdl=True))}


@each_model
@each_sample
def test_early_launches_are_for_kernels_and_devices_that_can(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """Candidates are tried early as well where kernel and device can; elsewhere none is, and one would be refused."""
    kernel, problem = sample
    found = spaces.candidates(kernel, problem, model)
    early = [config for config in found if config.get("launch_pdl")]
    asked = kernel.reference_config(problem).replace(launch_pdl=True)
    if kernel.overlaps and model.arch in ("sm_90", "sm_100", "sm_103", "sm_120"):
        assert asked in early
        assert len(early) > 1
        assert limits.veto(kernel, problem, model, asked) is None
    else:
        assert early == []
        assert "launch_pdl" in str(limits.veto(kernel, problem, model, asked))


@each_model
@each_sample
def test_candidates_are_few_different_and_possible(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """There are at most MOST candidates, none twice, none that the device's limits refuse."""
    kernel, problem = sample
    found = spaces.candidates(kernel, problem, model)
    assert len(found) <= spaces.MOST
    assert len(set(found)) == len(found)
    assert [config for config in found if limits.veto(kernel, problem, model, config)] == []


@pytest.mark.parametrize("m", [1, 16, 64, 256, 1024, 4096, 65536])
def test_hopper_has_enough_to_choose_from(m: int) -> None:
    """Every row count of a matmul has between 20 and MOST candidates on an H200."""
    assert 20 <= len(spaces.candidates(*samples.matmul(m), H200)) <= spaces.MOST


@each_model
@pytest.mark.parametrize("m", [1, 16, 64, 256, 1024, 4096, 65536])
def test_every_architecture_has_enough_to_choose_from(m: int, model: DeviceModel) -> None:
    """Every row count of a matmul has between 16 and MOST candidates, on 99 KiB of shared memory as well."""
    assert 16 <= len(spaces.candidates(*samples.matmul(m), model)) <= spaces.MOST


def test_datacenter_blackwell_is_tried_with_its_largest_tiles() -> None:
    """Where accumulators lie in tensor memory tiles of 256 x 256 are tried, which fill its 512 columns."""
    tiles = {model.arch: {(c.BM, c.BN) for c in spaces.candidates(*samples.matmul(4096), model)}
             for model in limits.MODELS}  # fmt: skip
    assert {arch for arch, found in tiles.items() if (256, 256) in found} == {"sm_100", "sm_103"}


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
@each_sample
def test_tensor_memory_is_not_overfilled(sample: tuple[Any, Any], arch: str) -> None:
    """No candidate that accumulates in tensor memory asks for more than 512 columns of 128 lanes."""
    kernel, problem = sample
    found = [c for c in spaces.candidates(kernel, problem, limits.model_for(arch)) if "BM" in c and c.BM >= 64]
    assert [config for config in found if max(1, config.BM // 128) * config.BN > 512] == []


def test_consumer_blackwell_is_tried_like_ada() -> None:
    """An RTX 5090 has neither tensor memory nor more shared memory than Ada: it gets Ada's candidates."""
    for m in (1, 64, 1024, 4096):
        found = [spaces.candidates(*samples.matmul(m), limits.model_for(arch)) for arch in ("sm_89", "sm_120")]
        assert found[0] == found[1] != ()


BEST = {
    16: "BK=256 BM=16 BN=32 num_stages=4 num_warps=4",
    64: "BK=128 BM=64 BN=32 num_stages=4 num_warps=4",
    256: "BK=128 BM=64 BN=128 num_stages=3 num_warps=4",
    1024: "BK=64 BM=128 BN=128 num_stages=3 num_warps=4",
    4096: "BK=64 BM=128 BN=128 num_stages=3 num_warps=4",
}


@pytest.mark.parametrize(("m", "best"), BEST.items())
def test_known_winners_come_early(m: int, best: str) -> None:
    """What an exhaustive timing on an H200 found best is among the first ten."""
    kernel, problem = samples.matmul(m)
    assert samples.parsed(kernel, problem, best) in spaces.candidates(kernel, problem, H200)[:10]


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_get_small_tiles(m: int) -> None:
    """A tile is not higher than 64 rows where the problem has no more."""
    assert max(config.BM for config in spaces.candidates(*samples.matmul(m), H200)) <= 64


def test_many_rows_get_large_tiles() -> None:
    """With thousands of rows the smallest tiles are not offered."""
    assert min(config.BM for config in spaces.candidates(*samples.matmul(16384), H200)) >= 64


def test_tiles_are_not_larger_than_the_matrix() -> None:
    """Columns and depth stay within the next power of two of the matrix's own, or 64."""
    found = [spaces.candidates(*samples.matmul(m, n=100, k=24), H200) for m in (16, 4096)]
    assert [max(config.BN for config in each) for each in found] == [128, 128]
    assert [max(config.BK for config in each) for each in found] == [64, 64]


@pytest.mark.parametrize(("dtype", "times"), [("fp32", 1), ("bf16", 2), ("fp8e4nv", 4)])
def test_depth_follows_the_type(dtype: str, times: int) -> None:
    """A tile is as many bytes deep whatever the type, so that as many stages fit."""
    found = spaces.candidates(*samples.matmul(4096, dtype), H200)
    depth = found[0].BK
    assert depth == 32 * times


def test_grouping_is_tried_on_the_leaders() -> None:
    """Other groupings of tiles are tried for large problems, behind the tiles themselves."""
    found = spaces.candidates(*samples.matmul(4096), H200)
    groups = [config.GROUP_M for config in found]
    assert sorted(set(groups)) == [1, 4, 8, 16]
    assert groups == sorted(groups, key=lambda group: group != 8)


def test_short_rows_share_a_program() -> None:
    """Rows of 128 elements are tried with up to 32 of them to a program, on one warp and on many."""
    found = spaces.candidates(*samples.rms_norm(65536, 128), H200)
    assert {config.ROWS for config in found} == {1, 2, 4, 8, 16, 32}
    assert {config.num_warps for config in found} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(("t", "h"), [(65536, 128), (4096, 4096), (1024, 16384), (1, 128)])
def test_a_thread_holds_2_to_64_elements(t: int, h: int) -> None:
    """A row kernel's threads hold between 2 and 64 elements each."""
    kernel, problem = samples.rms_norm(t, h)
    found = spaces.candidates(kernel, problem, H200)
    held = [held_elements(kernel, problem, config) // (32 * config.num_warps) for config in found]
    assert [2 <= each <= 64 for each in held] == [True] * len(held) != []


def test_no_more_rows_than_there_are() -> None:
    """A problem of three rows is not tried with eight to a program, but for the reference launched early."""
    found = [config for config in spaces.candidates(*samples.rms_norm(3, 128), H200) if not config.get("launch_pdl")]
    assert {config.ROWS for config in found} == {1, 2, 4}


def test_blocks_stay_within_a_row() -> None:
    """An elementwise block is not longer than the row it walks, but for the shortest there is."""
    found = [spaces.candidates(*samples.swiglu(64, f), H200) for f in (1000, 3)]
    blocks = [{c.BLOCK for c in each if not c.get("launch_pdl")} for each in found]
    assert blocks == [{256, 512, 1024}, {256}]


def test_other_families_are_left_to_others() -> None:
    """A family without a space here has no candidates from here."""
    kernel, problem = samples.matmul(4096)
    assert spaces.candidates(type(kernel)(**{**vars(kernel), "family": "scan"}), problem, H200) == ()
