"""The README's examples run: written to files and executed in a fresh process, at sizes an interpreter can bear."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from kalign_core.verifier.checks import SUITE
from tests.bad_kernels import BAD

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
(LAUNCH,) = re.findall(r"`([\w.]+)\.launch\(halve_kernel,", (ROOT / "README.md").read_text(encoding="utf-8"))
CALL = """
import importlib, torch, kalign_core as kalign
launch = importlib.import_module("{module}").launch
x = torch.arange(5.0); out = torch.empty_like(x)
for mode in ("off", "tune", "read"):
    with kalign.using(mode=mode):
        launch(halve_kernel, x, out, 5)
    assert torch.equal(out, x / 2), (mode, out)
print("halved")
""".replace("{module}", LAUNCH)


def small(code: str) -> str:
    """``code`` on the CPU platform, at sizes that take it milliseconds."""
    return code.replace('device="cuda"', 'device="cpu"').replace("4096, 4096", "4, 64").replace("4096", "64")


def test_the_readme_has_two_examples() -> None:
    """One shows operators, one a kernel of one's own."""
    assert len(BLOCKS) == 2


@pytest.mark.parametrize(("number", "behind", "said"), [(0, "", "rms_norm T<=4 H=64"), (1, CALL, "halved")])
def test_examples_run(
    child: Callable[..., CompletedProcess[str]], tmp_path: Path, number: int, behind: str, said: str
) -> None:
    """Each example, pasted into a file, does what the text around it says."""
    lines = ["import kalign_core.hal", small(BLOCKS[number]), behind]
    (tmp_path / "example.py").write_text("\n".join(lines), encoding="utf-8")
    ran = child("import example", tmp_path, KALIGN_CACHE_DIR=str(tmp_path / "cache"))
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout


def test_the_two_commands_are_written_out() -> None:
    """The README gives the commands for a fresh machine word for word, and CI runs the second."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "
    assert command + "demo" in text
    assert command + "tests" in text
    assert command + "tests" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


RESULTS = ROOT / "benchmarks" / "results"
ROW = re.compile(r"^\| (?:`(\w+)`[^|]*)?\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def measured(operator: str, shape: str) -> list[float]:
    """Cold microseconds of tuned, reference and torch for a row of the README, from what was kept."""
    file = "matmul" if operator == "matmul" else "main-job"
    problems = json.loads((RESULTS / f"h200-triton-3.6-{file}.json").read_text(encoding="utf-8"))["use"]["problems"]
    sizes = [int(size) for size in re.findall(r"\d+", shape)]
    (found,) = (p for p in problems if p["op"] == operator and list(p["sizes"].values())[: len(sizes)] == sizes)
    return [found["times"]["cold"][name]["us"] for name in ("tuned", "off", "torch")]


def test_the_gains_are_those_that_were_measured() -> None:
    """Every time in the README's table is a kept result's, rounded to the digits shown."""
    rows = ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) == 7
    operator = ""
    for name, shape, *shown in rows:
        operator = name or operator
        for text, value in zip(shown, measured(operator, shape), strict=True):
            digits = len(text.partition(".")[2])
            assert abs(float(text) - value) <= 0.5 * 10**-digits + 1e-9, (operator, shape, text, value)


def test_the_refuted_kernels_are_those_that_were_counted() -> None:
    """The README's counts of bad kernels are the kept result's, whose kernels are those of the store."""
    kept = json.loads((RESULTS / "h200-triton-3.6-bad-kernels.json").read_text(encoding="utf-8"))
    counts, names = kept["counts"], {kernel["name"] for kernel in kept["kernels"]}
    assert len(names) == counts["strict"]["of"] == counts["quick"]["of"]
    assert names == {bad.name for bad in BAD}
    said = (
        f"Of {len(names)} deliberately bad kernels run on an H200 the quick suite refutes {counts['quick']['refuted']}"
    )
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{said}, the strict one all {counts['strict']['refuted']} (suite {kept['suite']})" in text


def test_what_the_readme_says_of_a_result_is_kept() -> None:
    """Candidates compared, kernels that fall short and what a call costs the host are those of the kept results."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    summary = json.loads((RESULTS / "h200-triton-3.6-bit-classes.json").read_text(encoding="utf-8"))["summary"]
    equal = [summary["kinds"][kind] for kind in ("known equal", "operator")]
    own = [kernel["compared"] for kernel in summary["kernels"] if kernel["kind"] == "operator"]
    first, second = (
        {name: ratio["median"] for name, ratio in json.loads(
            (RESULTS / f"h200-triton-{version}-dispatch.json").read_text(encoding="utf-8"))["ratios"].items()}
        for version in ("3.6", "3.9")
    )  # fmt: skip
    over_triton = [
        found[f"{op}(out=) over triton's launch"] for found in (first, second) for op in ("swiglu", "matmul")
    ]
    over_add = [found["swiglu(out=) over torch.add(out=)"] for found in (first, second)]
    assert sum(kind["refuted"] for kind in equal) == 0
    for said in (
        f"of {sum(kind['compared'] for kind in equal):,} candidates whose bits are the reference's",
        f"at least {min(own)} candidates of every operator kernel",
        f"{min(over_triton):.2f} to {max(over_triton):.2f} of Triton's own launch",
        f"{over_add[0]:.2f} times `torch.add` ({over_add[1]:.2f} under Triton 3.9)",
    ):
        assert said in text, said
    verdicts = " ".join((ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8").split())
    assert f"Of {sum(kind['compared'] for kind in equal):,} candidates that have the reference's bits" in verdicts


@pytest.mark.parametrize(
    ("page", "said"),
    [("README.md", f"Of {len(BAD)} deliberately bad kernels run on an H200"), ("README.md", f"(suite {SUITE})"),
     ("docs/verdicts.md", f"`tests/bad_kernels/` holds {len(BAD)} deliberately bad kernels"),
     ("docs/cache.md", f'suite = "{SUITE}"')],
    ids=["README, kernels", "README, suite", "verdicts", "cache"],
)  # fmt: skip
def test_the_suite_on_the_page_is_today_s(page: str, said: str) -> None:
    """What pages say of the suite and of the kernels it has to refute is so of the code beside them."""
    assert said in " ".join((ROOT / page).read_text(encoding="utf-8").split())
