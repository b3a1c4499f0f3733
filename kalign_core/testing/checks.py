"""The suite for checks and input families: they find something, refute nothing that is right, and weaken nothing.

A check is tried on a model kernel whose launches are written in torch: one that is right, and a panel of faults that
the core suite is tried with as well. What holds there needs no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from kalign_core.hal.base import Launch
from kalign_core.plugins import BUILTIN, MANDATORY, Plugins
from kalign_core.records import Case, Check, InputFamily, Verdict
from kalign_core.testing.plugin import PluginConformance
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate, open_gate
from kalign_core.verifier.inputs import CORE_FAMILIES, TORCH_DTYPES, Request
from kalign_core.verifier.probes import ORDER_PROBE
from kalign_core.verifier.selftest import PANEL, faultless, panel_bench

CORE = {family.name: family for family in (*CORE_FAMILIES, ORDER_PROBE)}
MOST_CASES = 1000
DTYPES = ("bf16", "fp16", "fp32")


class CheckConformance(PluginConformance):
    """Everything that a plugin's checks and input families have to do::

        class TestChecks(CheckConformance):
            plugin = "my_package.plugin"

    ``bad_launches`` are the faults of which each check has to find one; a plugin made for another fault overrides the
    fixture with a launch that has it. Launches take ``(x, weight, out, total, ...)``, x and out: ``(T H)``, weight:
    ``(H)``, total: ``(T)``; the right one gives ``out = x`` and the row sums of ``x * weight``.
    """

    @pytest.fixture
    def bench(self, plugins: Plugins) -> Bench:
        """The bench of the model kernel, on the host."""
        return panel_bench({})

    @pytest.fixture
    def gate(self, plugins: Plugins, bench: Bench) -> Gate:
        """The gate as kalign opens it with this plugin, before the model kernel."""
        return open_gate(plugins, bench, Fixed(faultless))

    @pytest.fixture
    def checks(self, module: Any, plugins: Plugins, bench: Bench) -> list[Check]:
        """The checks of this plugin alone."""
        asked: dict[str, Any] = {"kernel": bench.kernel, "problem": bench.problem}
        return self._own(module, plugins, "kalign_checks", asked)

    @pytest.fixture
    def families(self, module: Any, plugins: Plugins, bench: Bench) -> list[InputFamily]:
        """The input families of this plugin alone."""
        model = bench.platform.model(bench.device)
        asked: dict[str, Any] = {"kernel": bench.kernel, "problem": bench.problem, "model": model}
        return self._own(module, plugins, "kalign_inputs", asked)

    @pytest.fixture
    def bad_launches(self) -> Mapping[str, Callable[[], Launch]]:
        """Launches that are wrong, by what is wrong with them; each made anew for every check."""
        return PANEL

    def _own(self, module: Any, plugins: Plugins, hook: str, asked: dict[str, Any]) -> list[Any]:
        name = plugins.manager.get_name(module)
        answers = [answer for answer in plugins.ask(hook, **asked) if answer.plugin == name]
        assert [answer.error for answer in answers if answer.error] == []
        return [given for answer in answers for given in answer.value]

    def examined(self, gate: Gate, check: Check, launch: Launch) -> Verdict:
        """What ``check`` alone says of ``launch``, with the families that the plugins give."""
        (verdict,) = Gate(gate.bench, Fixed(faultless), [check]).examine([Fixed(launch)])
        return verdict

    # --- the mandatory suite --------------------------------------------------------------------------------------

    def test_the_mandatory_suite_is_whole(self, gate: Gate) -> None:
        """With this plugin the gate has every check and every input family of the core, and believes itself."""
        assert gate.broken == ""
        assert [check for check in CORE_CHECKS if check not in gate.checks] == []
        assert {name: gate.bench.families.get(name) for name in CORE} == CORE

    def test_the_mandatory_suite_still_refutes(self, gate: Gate) -> None:
        """With this plugin every fault of the panel is refuted, and the kernel without a fault is not."""
        verdicts = gate.examine([Fixed(faultless), *(Fixed(make()) for make in PANEL.values())])
        assert [verdict.state for verdict in verdicts] == ["not refuted", *["refuted"] * len(PANEL)]

    # --- checks ---------------------------------------------------------------------------------------------------

    def test_checks_have_names_of_their_own(self, module: Any, checks: list[Check]) -> None:
        """Every check has a name that no other has, the core's included, and a stage to run in."""
        names = [check.name for check in checks]
        if module.__name__ != BUILTIN[MANDATORY]:
            names += [check.name for check in CORE_CHECKS]
        assert sorted(set(names)) == sorted(names)
        assert all(name.strip() for name in names)
        assert [check.name for check in checks if type(check.stage) is not int or check.stage < 1] == []

    def test_checks_give_cases(self, gate: Gate, checks: list[Check]) -> None:
        """A check gives a bounded number of cases, each of which says which check it is of."""
        for check in checks:
            cases = list(itertools.islice(check.cases(gate.bench), MOST_CASES + 1))
            assert len(cases) <= MOST_CASES
            assert [case for case in cases if not isinstance(case, Case)] == []
            assert {case.check for case in cases} <= {check.name}

    def test_checks_give_the_same_again(self, gate: Gate, checks: list[Check]) -> None:
        """A check's cases are the same every time, and asking for them draws no random numbers."""
        state = torch.get_rng_state()
        for check in checks:
            assert list(check.cases(gate.bench)) == list(check.cases(gate.bench))
        assert torch.equal(torch.get_rng_state(), state)

    def test_inputs_of_the_cases_can_be_made(self, gate: Gate, checks: list[Check]) -> None:
        """Each case names an input family, a variant and sizes that exist."""
        for check in checks:
            for case in check.cases(gate.bench):
                assert gate.bench.inputs(case)

    def test_the_reference_is_not_refuted_by_itself(self, gate: Gate, checks: list[Check]) -> None:
        """A kernel that equals its reference passes every check."""
        verdicts = {check.name: self.examined(gate, check, faultless) for check in checks}
        assert {name: str(v.refutation) for name, v in verdicts.items() if v.refutation} == {}

    def test_every_check_finds_something(
        self, gate: Gate, checks: list[Check], bad_launches: Mapping[str, Callable[[], Launch]]
    ) -> None:
        """A check that has cases for the model kernel refutes at least one launch that is wrong."""
        for check in checks:
            if any(True for _ in check.cases(gate.bench)):
                states = {name: self.examined(gate, check, make()).state for name, make in bad_launches.items()}
                assert "refuted" in states.values(), f"{check.name} lets all of these pass: {', '.join(states)}"

    # --- input families -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_families_fill_what_they_are_asked_for(self, families: list[InputFamily], dtype: str) -> None:
        """A family gives a tensor of the shape and dtype of the request."""
        for family in families:
            made = family.fill(_request(dtype, range(6)))
            assert (tuple(made.shape), made.dtype) == ((6, 32), TORCH_DTYPES[dtype]), family.name

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_families_are_the_same_again(self, families: list[InputFamily], dtype: str) -> None:
        """The same request gives the same bytes, and draws no random numbers."""
        state = torch.get_rng_state()
        for family in families:
            first, second = (family.fill(_request(dtype, range(6))) for _ in range(2))
            assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), family.name
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_are_the_same_in_any_company(self, families: list[InputFamily], dtype: str) -> None:
        """A row's numbers depend on which row it is and not on where it stands or what stands beside it."""
        order = [5, 0, 3]
        for family in families:
            whole, some = family.fill(_request(dtype, range(6))), family.fill(_request(dtype, order))
            assert torch.equal(whole[order].view(torch.uint8), some.view(torch.uint8)), family.name


def _request(dtype: str, rows: Any) -> Request:
    return Request("x", dtype, torch.tensor(list(rows), dtype=torch.int32), 32, 1, 32)
