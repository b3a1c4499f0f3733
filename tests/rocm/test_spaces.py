"""Which launches are worth trying on AMD devices."""

from __future__ import annotations

from typing import Any

import pytest

from kalign_core.held import held_elements
from kalign_core.records import DeviceModel
from kalign_rocm import limits, spaces
from tests.cuda import samples

MI300X = limits.model_for("gfx942")
each_model = pytest.mark.parametrize("model", limits.MODELS, ids=lambda model: model.arch)
each_sample = pytest.mark.parametrize("sample", samples.ALL.values(), ids=samples.ALL)


@each_model
@each_sample
def test_only_schedule_knobs_change(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """A candidate differs from the reference in the kernel's own knobs and the register budget alone."""
    kernel, problem = sample
    reference = kernel.reference_config(problem)
    found = spaces.candidates(kernel, problem, model)
    changed = {name for config in found for name in config if config[name] != reference.get(name)}
    assert changed <= {*kernel.knobs, "waves_per_eu"}
    assert {name for config in found for name in config} <= {*reference, "waves_per_eu"}


@each_model
@each_sample
def test_candidates_are_few_different_and_possible(sample: tuple[Any, Any], model: DeviceModel) -> None:
    """There are at most MOST candidates, none twice, none that the device's limits refuse."""
    kernel, problem = sample
    found = spaces.candidates(kernel, problem, model)
    assert len(found) <= spaces.MOST
    assert len(set(found)) == len(found)
    assert [config for config in found if limits.veto(kernel, problem, model, config)] == []


@each_model
@pytest.mark.parametrize("m", [1, 16, 64, 256, 1024, 4096, 65536])
def test_there_is_enough_to_choose_from(m: int, model: DeviceModel) -> None:
    """Every row count of a matmul has between 16 and MOST candidates."""
    assert 16 <= len(spaces.candidates(*samples.matmul(m), model)) <= spaces.MOST


def test_waves_are_a_free_option() -> None:
    """A register budget is tried though no kernel lists it as a knob, and the compiler's own choice beside it."""
    found = spaces.candidates(*samples.matmul(4096), MI300X)
    assert {config.get("waves_per_eu", 0) for config in found} == {0, 2}


def test_small_blocks_have_no_budget() -> None:
    """An elementwise program that holds little is not given a register budget."""
    found = spaces.candidates(*samples.swiglu(4096, 12288), MI300X)
    assert min(config.BLOCK for config in found if "waves_per_eu" in config) == 2048


def test_matrix_options_stay_at_the_reference_s() -> None:
    """matrix_instr_nonkdim and kpack are no business of a candidate."""
    found = [config for model in limits.MODELS for config in spaces.candidates(*samples.matmul(4096), model)]
    assert {name for config in found for name in config} & {"matrix_instr_nonkdim", "kpack"} == set()


def test_gfx950_has_room_for_more_stages() -> None:
    """Three stages are offered where LDS is 160 KiB, and nowhere else."""
    stages = [{c.num_stages for c in spaces.candidates(*samples.matmul(4096), model)} for model in limits.MODELS]
    assert stages == [{2}, {2}, {2, 3}]


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_get_small_tiles(m: int) -> None:
    """A tile is not higher than 64 rows where the problem has no more."""
    assert max(config.BM for config in spaces.candidates(*samples.matmul(m), MI300X)) <= 64


def test_many_rows_get_large_tiles() -> None:
    """With thousands of rows the smallest tiles are not offered."""
    assert min(config.BM for config in spaces.candidates(*samples.matmul(16384), MI300X)) >= 64


def test_tiles_are_not_larger_than_the_matrix() -> None:
    """Columns and depth stay within the next power of two of the matrix's own, or 64."""
    found = [spaces.candidates(*samples.matmul(m, n=100, k=24), MI300X) for m in (16, 4096)]
    assert [max(config.BN for config in each) for each in found] == [128, 128]
    assert [max(config.BK for config in each) for each in found] == [64, 64]


@pytest.mark.parametrize(("dtype", "times"), [("fp32", 1), ("bf16", 2), ("fp8e4nv", 4)])
def test_depth_follows_the_type(dtype: str, times: int) -> None:
    """A tile is as many bytes deep whatever the type, so that as many stages fit."""
    found = spaces.candidates(*samples.matmul(4096, dtype), MI300X)
    depth = found[0].BK
    assert depth == 32 * times


def test_grouping_is_tried_on_the_leaders() -> None:
    """Other groupings of tiles are tried for large problems, behind the tiles themselves."""
    found = spaces.candidates(*samples.matmul(4096), MI300X)
    groups = [config.GROUP_M for config in found]
    assert sorted(set(groups)) == [4, 8]
    assert groups == sorted(groups, key=lambda group: group != 8)


def test_short_rows_share_a_program() -> None:
    """Rows of 128 elements are tried with up to 32 of them to a program, on one warp and on many."""
    found = spaces.candidates(*samples.rms_norm(65536, 128), MI300X)
    assert {config.ROWS for config in found} == {1, 2, 4, 8, 16, 32}
    assert {config.num_warps for config in found} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize(("t", "h"), [(65536, 128), (4096, 4096), (1024, 16384), (1, 128)])
def test_a_work_item_holds_2_to_64_elements(t: int, h: int) -> None:
    """A row kernel's work-items hold between 2 and 64 elements each."""
    kernel, problem = samples.rms_norm(t, h)
    found = spaces.candidates(kernel, problem, MI300X)
    held = [held_elements(kernel, problem, config) // (64 * config.num_warps) for config in found]
    assert [2 <= each <= 64 for each in held] == [True] * len(held) != []


def test_no_more_rows_than_there_are() -> None:
    """A problem of three rows is not tried with eight to a program."""
    assert {config.ROWS for config in spaces.candidates(*samples.rms_norm(3, 128), MI300X)} == {1, 2, 4}


def test_blocks_stay_within_a_row() -> None:
    """An elementwise block is not longer than the row it walks, but for the shortest there is."""
    blocks = [{c.BLOCK for c in spaces.candidates(*samples.swiglu(64, f), MI300X)} for f in (1000, 3)]
    assert blocks == [{256, 512, 1024}, {256}]


def test_other_families_are_left_to_others() -> None:
    """A family without a space here has no candidates from here."""
    kernel, problem = samples.matmul(4096)
    assert spaces.candidates(type(kernel)(**{**vars(kernel), "family": "scan"}), problem, MI300X) == ()
