"""``kalign compile``: what it prints for a device that is not there, and what it says to wrong words."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from kalign_core import hal, ops
from kalign_core.cli.main import main
from kalign_core.declare import Config
from kalign_core.errors import CandidateFailed, NoPlatform
from kalign_core.hal.select import launch_options
from kalign_core.hal.target import NOWHERE, TargetPlatform, forgotten, without_memory
from kalign_core.plugins import Plugins
from kalign_core.records import DeviceModel
from kalign_core.tuner import compile as compiling
from kalign_core.tuner import targets

TARGETS = targets.targets(hal.plugins)
SMALL = ("compile", "swiglu", "--shape", "T=4,F=64", "--jobs", "1")


def kalign(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(scope="module", params=["hip:gfx942", "cuda:sm_90"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``swiglu`` for an MI300X and an H200, as JSON: a small problem."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        result = kalign(*SMALL, "--target", request.param, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# --- what it prints -----------------------------------------------------------------------------------------------


def test_every_candidate_is_accounted_for(compiled: Any) -> None:
    """Each candidate compiled, was refused with a reason, or failed with one; none is missing."""
    rows = [row for block in compiled["kernels"] for row in block["rows"]]
    assert {block["kernel"] for block in compiled["kernels"]} == {"swiglu", "swiglu_backward"}
    assert compiled["candidates"] == sum(len(row["configs"]) for row in rows)
    assert compiled["candidates"] == compiled["compiled"] + compiled["refused"] + compiled["failed"]
    assert all(row["reason"] for row in rows if row["state"] != "compiled")
    assert compiled["failed"] == 0


def test_what_a_code_takes(compiled: Any) -> None:
    """A compiled row has registers, threads in warps or wavefronts, a share of the unit and the time it took."""
    width = TARGETS[compiled["target"]].model.warp_size
    rows = [row for block in compiled["kernels"] for row in block["rows"] if row["state"] == "compiled"]
    for row in rows:
        assert row["registers"] > 0
        assert row["threads"] == width * int(Config.parse(row["configs"][0])["num_warps"])
        assert 0 < row["occupancy"] <= 1
        assert row["compile_s"] > 0
        assert row["spills"] >= row["tmem_columns"] == 0


def test_equal_codes_are_one_row(compiled: Any) -> None:
    """No two rows of a kernel have the same device code."""
    for block in compiled["kernels"]:
        codes = [row["code"] for row in block["rows"] if row["state"] == "compiled"]
        assert len(codes) == len(set(codes)) > 1


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile processes that abort on two warps and find four too large, and take one to be the same as eight."""
    worker = [sys.executable, "-S", str(Path(__file__).with_name("fake_worker.py"))]
    plan = {"num_warps=2": "abort", "num_warps=4": "large", "num_warps=1": "code same", "num_warps=8": "code same"}
    monkeypatch.setenv("FAKE_WORKER_PLAN", json.dumps(plan))
    monkeypatch.setattr(compiling, "CompilePool", functools.partial(compiling.CompilePool, command=worker))


@pytest.mark.usefixtures("misbehaving")
def test_what_comes_of_a_candidate_that_misbehaves() -> None:
    """A compiler that dies costs its candidate and the exit code; code that does not fit is refused with both sizes."""
    result = kalign(*SMALL, "--target", "cuda:sm_90", "--json")
    assert result.exit_code == 1
    rows = [row for block in json.loads(result.stdout)["kernels"] for row in block["rows"]]
    reasons = {int(Config.parse(row["configs"][0])["num_warps"]): (row["state"], row["reason"]) for row in rows}
    assert reasons[2] == ("failed", "the compiler died of SIGABRT: LLVM ERROR: no layout for this tile")
    assert reasons[4] == ("refused", "needs 1048576 bytes of shared memory, 232448 fit")
    assert max(len(row["configs"]) for row in rows if row["state"] == "compiled") > 1


@pytest.mark.usefixtures("misbehaving")
def test_tables_are_for_readers() -> None:
    """Without --json there is one table a kernel and a sentence that counts; progress is on standard error."""
    result = kalign(*SMALL, "--target", "cuda:sm_120")
    assert "limited by" in result.stdout
    assert "LLVM ERROR" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(" failed")
    assert "cuda:sm_120 swiglu T=4 F=64 bf16 train: swiglu, " in result.stderr


# --- targets ------------------------------------------------------------------------------------------------------

ASKED_FOR = ("hip:gfx942", "hip:gfx950", "cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100",
             "cuda:sm_103", "cuda:sm_120")  # fmt: skip


@pytest.mark.parametrize("name", ASKED_FOR)
@pytest.mark.parametrize("op", ops.operators(), ids=lambda op: op.name)
def test_every_target_has_a_space(name: str, op: ops.Operator) -> None:
    """For each operator and target there are candidates, the reference first, whatever machine this is."""
    target = targets.target_named(hal.plugins, name)
    here = targets.session_for(target, hal.plugins)
    calls = targets.calls_of(here, op, op.shapes[0], op.dtypes[0])
    assert {call.kernel.name for call in calls} >= {op.kernels[0].name}
    for call in calls:
        found = targets.space_on(target, hal.plugins, call.kernel, call.problem)
        assert found.candidates[0] == call.kernel.reference_config(call.problem)


def test_an_interpreter_is_no_target() -> None:
    """What interprets kernels compiles nothing."""
    assert {target.model.backend for target in TARGETS.values()} == {"cuda", "hip"}


@pytest.mark.parametrize("model", [target.model for target in TARGETS.values()], ids=str)
def test_a_target_is_what_triton_takes(model: DeviceModel) -> None:
    """NVIDIA's architectures are numbers to the compiler, AMD's are names; both come with the width of a warp."""
    expected = int(model.arch.removeprefix("sm_")) if model.backend == "cuda" else model.arch
    assert model.compile_target == (model.backend, expected, model.warp_size)


def test_options_of_another_vendor_are_refused() -> None:
    """The space on a target knows its platform's launch options: a budget of waves is AMD's alone."""
    options = {name: launch_options(TARGETS[name].record) for name in ("hip:gfx942", "cuda:sm_90")}
    assert ["waves_per_eu" in known for known in options.values()] == [True, False]


# --- wrong words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("swiglu",), "kalign compile rms_norm --target hip:gfx942"),
        (("swiglu", "--target", "hip:gfx94"), "did you mean 'hip:gfx942'"),
        (("swiglu", "--target", "sm_90"), "the target is one of: "),
        (("swigloo", "--target", "hip:gfx942"), "did you mean 'swiglu'"),
        (("swiglu", "--target", "hip:gfx942", "--shape", "T=4"), "needs F as well"),
        (("swiglu", "--target", "hip:gfx942", "--dtype", "fp8"), "unknown dtype of swiglu 'fp8'"),
        (("swiglu", "--target", "hip:gfx942", "--timeout", "0"), "--timeout 0 is no time"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], said: str) -> None:
    """A wrong name or value exits with 2 and says what to type, on standard error alone."""
    result = kalign("compile", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_without_a_vendor_s_plugin() -> None:
    """Where no plugin knows a device to compile for, that is what is said."""
    with pytest.raises(NoPlatform, match="no plugin knows a device to compile for"):
        targets.target_named(Plugins(), "hip:gfx942")


# --- nothing is launched ------------------------------------------------------------------------------------------


def test_a_target_launches_nothing() -> None:
    """A device that is not there can be neither launched on nor timed, and is nobody."""
    platform = TargetPlatform(TARGETS["cuda:sm_90"].model)
    for ask in (lambda: platform.launcher(None, None, None, ()), lambda: platform.timer(NOWHERE)):  # type: ignore[arg-type]
        with pytest.raises(CandidateFailed, match="no device is at hand"):
            ask()
    assert not platform.identity(NOWHERE).known
    assert not platform.toolchain(NOWHERE).known


def test_inputs_take_no_memory() -> None:
    """Tensors made for a target have shapes and strides, and no bytes."""
    with without_memory():
        made = torch.randn((1 << 20, 1 << 20), generator=torch.Generator(), device="cpu")
    assert (made.device.type, made.shape[0]) == ("meta", 1 << 20)


def test_what_an_operator_has_to_know_is_known() -> None:
    """Numbers made on the host stay numbers; as arguments of a call tensors lose their bytes, and keep their nature."""
    with without_memory():
        lengths = torch.randint(1, 9, (4,), generator=torch.Generator().manual_seed(0))
        assert int(lengths.sum()) >= 4
        kept = [forgotten(each) for each in (lengths, torch.ones(2, requires_grad=True), 3, None)]
    assert [getattr(each, "device", torch.device("cpu")).type for each in kept] == ["meta", "meta", "cpu", "cpu"]
    assert [getattr(each, "requires_grad", None) for each in kept] == [False, True, None, None]
