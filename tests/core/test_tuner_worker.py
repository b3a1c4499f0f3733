"""The real compile worker: no device, no torch, and the parent finds what it compiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Lowers the SwiGLU kernel, compiles it in a worker, then in this process, and shows what changed in the cache's folder.
COMPILE_TWICE = """
import json, os, sys
from pathlib import Path
from kalign_core.declare import lower
from kalign_core.kernels.swiglu import REFERENCE, swiglu_kernel
from kalign_core.records import Argument, Problem
from kalign_core.tuner.compile import CompilePool

target = {target!r}
rows = tuple(Argument(name, "bf16", (256, 1)) for name in ("gate", "up", "out"))
strides = tuple(Argument(f"{{name}}_stride", "int", value=256) for name in ("gate", "up", "out"))
problem = Problem("swiglu", (("T", 64), ("F", 256)), rows + strides)
lowered = lower(swiglu_kernel, problem, REFERENCE.replace(BLOCK=256, num_warps=4))
pool = CompilePool(1)
[(_, result)] = pool.compile([lowered], target, 600.0)
pool.close()
assert not result.failure, result.failure

def files():
    return {{str(p): p.stat().st_mtime_ns for p in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*") if p.is_file()}}

before = files()
from kalign_core.hal import triton_compat
compiled = triton_compat.compile_lowered(swiglu_kernel.fn, lowered, target)
print(json.dumps({{
    "hashes": [result.hash, compiled.hash], "codes": [result.code, triton_compat.code_digest(compiled)],
    "written": sorted(before), "changed": files() != before, "warps": result.num_warps,
}}))
"""


@pytest.mark.parametrize(
    ("target", "binary"), [(("cuda", 90, 32), "cubin"), (("hip", "gfx942", 64), "hsaco")], ids=["sm_90", "gfx942"]
)
def test_the_parent_finds_what_a_worker_compiled(
    child: Callable[..., Any], tmp_path: Path, target: tuple[str, int | str, int], binary: str
) -> None:
    """A kernel compiled in a worker for a device that is not here is cached under the hash the parent asks for."""
    done = child(COMPILE_TWICE.format(target=target), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["hashes"][0] == out["hashes"][1]
    assert out["codes"][0] == out["codes"][1]
    assert any(name.endswith(f".{binary}") for name in out["written"])
    assert out["changed"] is False
    assert out["warps"] == 4


ANSWERS = """
import json, sys
from kalign_core.tuner import worker
import triton
from kalign_core.hal import triton_compat
job = dict(kernel="k", signature=[], constants=[], divisible=[], options=[], target=["cuda", 90, 32])
found = [worker.answer(triton_compat, {**job, "import_path": path}) for path in json.loads(sys.argv[1])]
print(json.dumps([found, "torch" in sys.modules]))
"""


def answers(child: Callable[..., Any], folder: Path, *paths: str) -> tuple[list[dict[str, Any]], bool]:
    done = child(ANSWERS.replace("sys.argv[1]", repr(json.dumps(paths))), folder)
    assert done.returncode == 0, done.stderr
    found, torch = json.loads(done.stdout.splitlines()[-1])
    return found, torch


def test_a_module_that_cannot_be_imported_is_said_so(child: Callable[..., Any], tmp_path: Path) -> None:
    """A kernel that a fresh process does not find is marked, so that its parent compiles it itself."""
    (tmp_path / "raises.py").write_text("raise SystemExit('not without a device')")
    (tmp_path / "plain.py").write_text("kernel = 3")
    found, torch = answers(child, tmp_path, "no_such_module:kernel", "raises:kernel", "plain:other", "plain:kernel")
    assert all(answer["unimportable"] for answer in found)
    assert [answer["failure"].partition(" cannot be imported: ")[2] for answer in found] == [
        "ModuleNotFoundError: No module named 'no_such_module'",
        "SystemExit: not without a device",
        "AttributeError: module 'plain' has no attribute 'other'",
        "TypeError: it is 3, no kernel",
    ]
    assert torch is False


BROKEN = """
import triton, triton.language as tl
from kalign_core.declare import Config, cdiv, data, kernel, written

@kernel(name="broken", family="pointwise", contract="broken/1", dims=("T",), args={"x": data("T"), "y": written("T")},
        reference=Config(BLOCK=64, enable_fp_fusion=False), knobs={"BLOCK": (64,)}, grid=lambda p, c: (1,))
@triton.jit
def broken_kernel(x, y, T, BLOCK: tl.constexpr):
    tl.store(y + tl.arange(0, BLOCK), tl.load(x + tl.arange(0, 3)))
"""


def test_a_kernel_that_does_not_compile_is_a_failure(child: Callable[..., Any], tmp_path: Path) -> None:
    """What the compiler raises is the candidate's failure, with its class."""
    (tmp_path / "broken.py").write_text(BROKEN)
    signature = '[["x", "*fp32"], ["y", "*fp32"], ["T", "i32"], ["BLOCK", "constexpr"]], constants=[[3, 64]]'
    code = ANSWERS.replace("signature=[], constants=[]", f"signature={signature}")
    done = child(code.replace("sys.argv[1]", repr('["broken:broken_kernel"]')), tmp_path)
    assert done.returncode == 0, done.stderr
    ([answer], _) = json.loads(done.stdout.splitlines()[-1])
    assert answer.keys() == {"failure"}
    assert "CompilationError" in answer["failure"]


def test_a_worker_whose_parent_is_gone_ends_itself(child: Callable[..., Any]) -> None:
    """A worker that is compiling when its parent dies kills its group, which a hanging compiler would not do."""
    code = """
import os, signal, subprocess, sys, time
lonely = "from kalign_core.tuner import worker; worker.LOOK_SECONDS = 0.05; worker.die_with(os.getppid() + 1)"
done = subprocess.run([sys.executable, "-c", "import os; " + lonely], start_new_session=True, timeout=600)
print(done.returncode)
"""
    done = child(code)
    assert done.stdout.split() == ["-9"], done.stderr


def test_a_worker_does_not_look_in_the_current_folder(
    child: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that happens to be called like a module of ours is not imported because a worker was started beside it."""
    (tmp_path / "triton.py").write_text("raise RuntimeError('this is not the compiler')")
    monkeypatch.chdir(tmp_path)
    code = f"import sys; sys.path.remove(''){COMPILE_TWICE.format(target=('cuda', 90, 32))}"
    code = code.partition("def files")[0].replace("assert not result.failure, result.failure", "print(result.failure)")
    done = child(code, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
