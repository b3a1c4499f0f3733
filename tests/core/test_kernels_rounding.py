"""Products in float32 are rounded before they are added: no multiplication and addition becomes one instruction."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kalign_core import hal, ops
from kalign_core.declare import Kernel, lower
from kalign_core.tuner.targets import calls_of, session_for, target_named
from tests.core.test_kernels_compile import COMPILE, MODELS, TARGETS

ARCH = "sm_90"
# In float32: products of 16-bit numbers are exact, and would hide what is looked for.
CALLS: tuple[tuple[Any, dict[str, int]], ...] = (
    (ops.swiglu, {"T": 4, "F": 1024}),
    (ops.rope, {"T": 4, "HEADS": 4, "D": 64}),
    (ops.rms_norm, {"T": 4, "H": 1024}),
    (ops.rms_norm, {"T": 4, "H": 65537}),
    (ops.ratio_kl, {"B": 4, "S": 1024}),
    (ops.grpo_loss, {"B": 4, "S": 2048}),
    (ops.group_advantage, {"B": 4, "G": 16}),
    (ops.embedding, {"T": 4, "V": 4, "H": 512}),
    (ops.softmax, {"T": 4, "V": 512}),
    (ops.log_softmax, {"T": 4, "V": 512}),
    (ops.selected_logprob, {"T": 4, "V": 512}),
)
# The one contract that has fused products, and says which.
FUSED = "softmax/2"
# An instruction without its rounding may be fused with another by the assembler; one that names it never is.
LOOSE = re.compile(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32\b")


@pytest.fixture(scope="module")
def codes(child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Kernel, str]]:
    """Every kernel of the calls with its code for the device, before the assembler."""
    target = target_named(hal.plugins, MODELS[ARCH].target)
    calls = [call for op, sizes in CALLS for call in calls_of(session_for(target, hal.plugins), op, sizes, "fp32")]
    lowered = [lower(c.kernel, c.problem, c.kernel.reference_config(c.problem)) for c in calls]
    folder: Path = tmp_path_factory.mktemp("codes")
    (folder / "jobs.json").write_text(json.dumps([(dataclasses.asdict(job), TARGETS[ARCH]) for job in lowered]))
    code = COMPILE.format(path=str(folder / "jobs.json")).replace('compiled.asm["ttir"]', 'compiled.asm["ptx"]')
    done = child(code, TRITON_CACHE_DIR=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["ttir"] for line in done.stdout.splitlines()]
    return [(call.kernel, text) for call, text in zip(calls, texts, strict=True)]


def test_every_operation_names_its_rounding(codes: list[tuple[Kernel, str]]) -> None:
    """No product or sum of float32 is left for the assembler to fuse."""
    assert {kernel.name: LOOSE.findall(text) for kernel, text in codes if LOOSE.search(text)} == {}
    assert sum(text.count("mul.rn.f32") for _, text in codes) > 100


def test_products_are_fused_where_the_contract_says_so(codes: list[tuple[Kernel, str]]) -> None:
    """Fused products are those of softmax; every other kernel has none."""
    fused = {kernel.contract for kernel, text in codes if "fma.rn.f32" in text}
    assert fused == {FUSED}
    assert all("fma.rn.f32" in text for kernel, text in codes if kernel.contract == FUSED)
