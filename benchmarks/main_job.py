"""The main job on a GPU, end to end: tune, use from another process, compare bits between modes, time against peers.

Prints one JSON object. ``python benchmarks/main_job.py [--cache DIR] [--only OP]`` runs three processes in turn, so
that what the second and third find is what the first left in the file:

1. ``kalign tune`` over the problems below;
2. modes off, read and tune: the bytes of every output, and which compiled function each launched, seen from Triton's
   launch hook; times beside torch and, for bytes per second, a copy;
3. a deliberately naive RMSNorm, whose candidates the gate has to refute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROBLEMS = [
    ("swiglu", {"T": 4096, "F": 12288}),
    ("rms_norm", {"T": 4096, "H": 4096}),
    ("rms_norm", {"T": 65536, "H": 128}),
    ("rms_norm", {"T": 1024, "H": 16384}),
    ("matmul", {"M": 16, "N": 4096, "K": 4096}),
    ("matmul", {"M": 1024, "N": 4096, "K": 4096}),
    ("matmul", {"M": 4096, "N": 4096, "K": 4096}),
]


def step(name: str, cache: Path, *arguments: str) -> dict[str, Any]:
    """Run one step of this file in a process of its own; gives what it printed."""
    environment = {**os.environ, "KALIGN_CACHE_DIR": str(cache)}
    started = time.monotonic()
    command = [sys.executable, str(HERE / "main_job.py"), "--step", name, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = {"error": f"exit {done.returncode}", "output": done.stdout[-2000:]}
    return {**result, "wall_s": round(time.monotonic() - started, 2)}


def tune(only: str) -> dict[str, Any]:
    """Step 1, through the command line as a user would."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        for op, sizes in PROBLEMS:
            if only in ("", op):
                file.write(f'[[problem]]\nop = "{op}"\n' + "".join(f"{k} = {v}\n" for k, v in sizes.items()))
    command = [sys.executable, "-m", "kalign_core", "tune", "--shapes", file.name, "--json"]
    first = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"first": json.loads(first.stdout), "again": json.loads(second.stdout)["summary"]}


def use(only: str) -> dict[str, Any]:
    """Step 2."""
    import replay_timing
    import torch

    watch_loading()
    bandwidth = replay_timing.copy_bandwidth()
    rows = [use_one(op, sizes, bandwidth) for op, sizes in PROBLEMS if only in ("", op)]
    return {"machine": replay_timing.machine(), "copy_tb_per_s": round(bandwidth / 1e12, 3), "problems": rows,
            "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}  # fmt: skip


def use_one(name: str, sizes: dict[str, int], bandwidth: float) -> dict[str, Any]:
    import replay_timing
    import torch

    import kalign_core as kalign
    from kalign_core.verifier.compare import digest

    op = kalign.ops.named(name)
    device = torch.device("cuda")

    def make(seed: int) -> tuple[Any, ...]:
        arguments = tuple(a.detach() for a in op.inputs(sizes, "bf16", 2 * seed, device))
        return (*arguments, torch.empty_like(op(*arguments)))

    arguments = make(0)[:-1]
    modes = {}
    for mode in ("off", "read", "tune"):
        with kalign.using(mode=mode):
            launched = launches(lambda: op(*arguments))
            modes[mode] = {"launched": launched, "digest": digest([op(*arguments)]), "launches": len(launched)}
    oracle = op.oracle(*arguments)
    error = ((op(*arguments).double() - oracle).norm() / oracle.norm()).item()
    del oracle

    def mode_call(mode: str) -> Any:
        def call(*given: Any) -> Any:
            with kalign.using(mode=mode):
                return op(*given[:-1], out=given[-1])

        return call

    calls = {"tuned": mode_call("read"), "off": mode_call("off"), "torch": peer(name)}
    timed = {kind: replay_timing.compare_us(calls, make, kind == "cold") for kind in ("cold", "warm")}
    moved = sum(t.numel() * t.element_size() for t in make(0))
    row = {
        "op": name, "sizes": sizes, "modes": modes, "relative_error": error, "times": timed,
        "bits_equal": len({m["digest"] for m in modes.values()}) == 1,
        "launches_differ": modes["off"]["launched"] != modes["read"]["launched"],
        "gain_cold": ratio(timed["cold"], "off", "tuned"), "gain_warm": ratio(timed["warm"], "off", "tuned"),
        "torch_over_tuned_cold": ratio(timed["cold"], "torch", "tuned"),
        "torch_over_tuned_warm": ratio(timed["warm"], "torch", "tuned"),
        "times_copy_floor_cold": round(timed["cold"]["tuned"]["us"] / (moved / bandwidth * 1e6), 3),
    }  # fmt: skip
    if name == "matmul":
        flops = 2 * sizes["M"] * sizes["N"] * sizes["K"]
        row["tflops_cold"] = round(flops / timed["cold"]["tuned"]["us"] / 1e6, 1)
    return row


def ratio(times: dict[str, dict[str, float]], over: str, under: str) -> float:
    return round(times[over]["us"] / times[under]["us"], 3)


def peer(name: str) -> Any:
    """torch's own way to the same result."""
    import torch

    def swiglu(gate: Any, up: Any, out: Any) -> Any:
        return torch.mul(torch.nn.functional.silu(gate), up, out=out)

    def rms_norm(x: Any, weight: Any, out: Any) -> Any:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def matmul(a: Any, b: Any, out: Any) -> Any:
        return torch.mm(a, b, out=out)

    return {"swiglu": swiglu, "rms_norm": rms_norm, "matmul": matmul}[name]


def launches(call: Any) -> list[str]:
    """Name and compile hash of every kernel that ``call`` launches, seen from Triton's launch hook."""
    import triton

    seen: list[str] = []

    def hook(metadata: Any) -> None:
        found = metadata.get()
        seen.append(f"{found['name']}@{HASHES.get(found['function'], 'unknown')}")

    chain = triton.knobs.runtime.launch_enter_hook
    chain.add(hook)
    try:
        call()
    finally:
        chain.remove(hook)
    return seen


HASHES: dict[int, str] = {}


def watch_loading() -> None:
    """Remember the compile hash of every function that Triton loads, by the driver's handle."""
    import triton

    def loaded(module: Any, function: Any, name: str, metadata_group: Any, digest: str) -> None:
        HASHES[function] = digest[:12]

    triton.knobs.runtime.kernel_load_end_hook.add(loaded)


def naive() -> dict[str, Any]:
    """Step 3: every candidate of the naive kernel but the reference has to be refuted."""
    import torch
    from naive_rms_norm import naive_rms_norm_kernel as kernel

    from kalign_core import session
    from kalign_core.problems import problem_of

    here = session.current()
    rows = []
    for tokens, width in ((4096, 4096), (1024, 16384)):
        x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda")
        weight, out = torch.randn(width, dtype=torch.bfloat16, device="cuda"), torch.empty_like(x)
        rstd = torch.empty(tokens, device="cuda")
        problem = problem_of(kernel, (x, weight, out, rstd, tokens, width, width, width, 1e-6), "train")
        report, _ = here.tune(kernel, problem, 0)
        rows.append({
            "T": tokens, "H": width, "candidates": report.tally.timed - 1 + report.tally.refuted,
            "refuted": report.tally.refuted, "timed_beside_the_reference": report.tally.timed - 1,
            "refutations": [f"{config}: {why}" for config, why in report.refuted],
        })  # fmt: skip
    here.close()
    return {"naive": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", choices=("tune", "use", "naive"))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if given.step:
        made = {"tune": lambda: tune(given.only), "use": lambda: use(given.only), "naive": naive}[given.step]()
        print(json.dumps(made))
        return
    cache = given.cache or Path(tempfile.mkdtemp())
    result = {name: step(name, cache, "--only", given.only) for name in ("tune", "use", "naive")}
    result["files"] = {path.name: path.read_text() for path in cache.glob("*.toml")}
    print(json.dumps({"benchmark": "main_job", "command": " ".join(sys.argv[:1]), **result}, indent=1))


if __name__ == "__main__":
    main()
