"""What a platform says of itself without a device: its record, its probe, the devices it can compile for, its options.

A record is read on every machine that has the plugin installed, most of which have no such device.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kalign_core.declare import Kernel
from kalign_core.environment import Environment, TorchBuild
from kalign_core.hal.select import ask_for_interpreter
from kalign_core.plugins import Plugins
from kalign_core.records import Config, DeviceModel, Evidence, PlatformRecord, Problem
from kalign_core.testing import elsewhere
from kalign_core.testing.plugin import PluginConformance

NOWHERE = Path("/nonexistent")
# Options of Triton's compilers that choose the arithmetic: candidates differ in schedule only.
ARITHMETIC = frozenset(
    {
        "enable_fp_fusion", "default_dot_input_precision", "allowed_dot_input_precisions", "allow_fp8e4nv",
        "max_num_imprecise_acc_default", "matrix_instr_nonkdim", "kpack",
    }
)  # fmt: skip
_VARIABLES = ("TRITON_INTERPRET", "PATH", "HOME")
MACHINES: dict[str, Environment] = {
    "nothing installed": Environment(root=NOWHERE),
    "torch for the host": Environment(root=NOWHERE, torch=TorchBuild("2.11.0"), triton=True),
    "torch for both vendors at once": Environment(root=NOWHERE, torch=TorchBuild("2.11.0", "13.0", "7.0"), triton=True),
    "a version nobody can read": Environment(root=NOWHERE, torch=TorchBuild("unknown"), triton=True),
    "no triton": Environment(root=NOWHERE, torch=TorchBuild("2.11.0", "13.0")),
    "empty variables": Environment(variables=dict.fromkeys(_VARIABLES, ""), root=NOWHERE, triton=True),
    "strange variables": Environment(variables=dict.fromkeys(_VARIABLES, "\udcff,,-1 "), root=NOWHERE),
    "everything loaded": Environment(root=NOWHERE, loaded=frozenset({"torch", "triton"}), triton=True),
}


def shipped_problems() -> list[tuple[Kernel, Problem]]:
    """The forward kernels of the shared operators, each with a problem of an ordinary size."""
    from kalign_core.kernels.matmul import matmul_kernel
    from kalign_core.kernels.rms_norm import rms_norm_kernel
    from kalign_core.kernels.swiglu import swiglu_kernel
    from kalign_core.verifier.variants import dense_problem

    sizes: list[tuple[Kernel, dict[str, int]]] = [
        (matmul_kernel, {"M": 256, "N": 1024, "K": 1024}),
        (rms_norm_kernel, {"T": 256, "H": 4096}),
        (swiglu_kernel, {"T": 256, "F": 4096}),
    ]
    dtypes = {"bias": "none", "rstd": "fp32"}
    return [
        (kernel, dense_problem(kernel, dims, {name: dtypes.get(name, "bf16") for name in kernel.args}, {"eps": 1e-6}))
        for kernel, dims in sizes
    ]


class RecordRules(PluginConformance):
    """Rules for the platform's record. ``name`` is the platform's name."""

    name: ClassVar[str]

    @pytest.fixture
    def record(self) -> PlatformRecord:
        """The record of the platform ``name`` of the plugin; asks for the interpreter where it needs that."""
        found = elsewhere.platform_record(self._said("plugin"), self._said("name"))
        ask_for_interpreter(found)
        return found

    @pytest.fixture
    def models(self, record: PlatformRecord) -> tuple[DeviceModel, ...]:
        """The device models that candidates and vetoes are asked about."""
        return record.models

    @pytest.fixture
    def options(self, record: PlatformRecord) -> frozenset[str]:
        """The launch options of the platform's class."""
        module, _, attribute = record.factory.partition(":")
        made: Any = getattr(importlib.import_module(module), attribute)
        return frozenset(made.launch_options)

    # --- the probe ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("machine", MACHINES)
    def test_the_probe_never_raises(self, record: PlatformRecord, machine: str) -> None:
        """Whatever the machine is like, a probe gives evidence with a reason in words."""
        evidence = record.probe(MACHINES[machine])
        assert isinstance(evidence, Evidence)
        assert isinstance(evidence.usable, bool)
        assert evidence.reason.strip()

    def test_the_probe_looks_at_the_environment_it_is_given(self, record: PlatformRecord) -> None:
        """On a machine without torch and triton nothing can be used, whatever this machine is like."""
        assert record.probe(MACHINES["nothing installed"]).usable is False

    @pytest.mark.parametrize("machine", MACHINES)
    def test_the_probe_says_the_same_again(self, record: PlatformRecord, machine: str) -> None:
        """Evidence is a function of the environment alone."""
        assert record.probe(MACHINES[machine]) == record.probe(MACHINES[machine])

    def test_probing_touches_no_device(self) -> None:
        """A probe opens no device, loads no library, imports no torch and starts nothing, in a fresh process."""
        assert elsewhere.ask("probing", self._said("plugin"), self._said("name"))["did"] == []

    # --- the devices it compiles for ------------------------------------------------------------------------------

    def test_limits_are_sane(self, models: tuple[DeviceModel, ...]) -> None:
        """A model's limits are whole numbers that are not negative, and a warp has at least one lane."""
        for model in models:
            assert_sane(model)

    def test_targets_are_told_apart(self, record: PlatformRecord) -> None:
        """No two models of a platform are the same target, which is how the command line names them."""
        targets = [model.target for model in record.models]
        assert sorted(set(targets)) == sorted(targets)

    def test_launch_options_change_no_bits(self, options: frozenset[str]) -> None:
        """What a candidate may set beside the kernel's own knobs are words that choose no arithmetic."""
        assert [option for option in options if not (isinstance(option, str) and option.isidentifier())] == []
        assert options & ARITHMETIC == set()

    # --- candidates and vetoes ------------------------------------------------------------------------------------

    def test_candidates_set_only_what_they_may(
        self, plugins: Plugins, models: tuple[DeviceModel, ...], options: frozenset[str]
    ) -> None:
        """Every configuration the plugins propose sets schedule knobs and launch options only, and leaves none out."""
        from kalign_core.tuner.space import illegal

        for kernel, problem, model, proposed in self._proposals(plugins, models):
            reference = kernel.reference_config(problem)
            wrong = {config: illegal(kernel, options, reference, config) for config in proposed}
            assert {c: why for c, why in wrong.items() if why} == {}, f"{kernel} on {model.target}"

    def test_candidates_are_the_same_again(self, plugins: Plugins, models: tuple[DeviceModel, ...]) -> None:
        """Asked twice about the same problem, plugins propose the same in the same order."""
        first = [proposed for *_, proposed in self._proposals(plugins, models)]
        assert first == [proposed for *_, proposed in self._proposals(plugins, models)]

    def test_the_reference_is_not_vetoed(self, plugins: Plugins, models: tuple[DeviceModel, ...]) -> None:
        """The launch that defines a kernel's bits is legal on every device the platform names."""
        for kernel, problem in self.problems():
            for model in models:
                asked: dict[str, Any] = {"kernel": kernel, "problem": problem, "model": model}
                asked["config"] = kernel.reference_config(problem)
                answers = list(plugins.ask("kalign_veto", platform=self._said("name"), **asked))
                assert [(a.plugin, a.value, a.error) for a in answers if a.value or a.error] == []

    def problems(self) -> list[tuple[Kernel, Problem]]:
        """The kernels that plugins are asked about, with a problem each; the shared operators' by default."""
        return shipped_problems()

    def _proposals(
        self, plugins: Plugins, models: tuple[DeviceModel, ...]
    ) -> list[tuple[Kernel, Problem, DeviceModel, list[Config]]]:
        found = []
        for kernel, problem in self.problems():
            for model in models:
                asked: dict[str, Any] = {"kernel": kernel, "problem": problem, "model": model}
                answers = list(plugins.ask("kalign_candidates", platform=self._said("name"), **asked))
                assert [answer.error for answer in answers if answer.error] == []
                found.append((kernel, problem, model, [config for answer in answers for config in answer.value]))
        return found


def assert_sane(model: DeviceModel) -> None:
    """Assert that ``model`` can be a device."""
    assert model.backend.isidentifier()
    assert model.arch
    assert model.arch.isascii()
    assert not set(model.arch) & set(" :\n")
    assert model.warp_size >= 1
    assert model.warp_size & (model.warp_size - 1) == 0
    assert model.max_warps >= 1
    limits = ("shared_bytes", "registers_per_block", "registers_per_thread", "units", "last_level_bytes")
    for name in (*limits, "tmem_columns", "max_ctas"):
        value = getattr(model, name)
        assert type(value) is int, f"{name} is {value!r}"
        assert value >= 0, f"{name} is {value!r}"
