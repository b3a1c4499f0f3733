"""How the cache holds under processes that are killed, write at once, and meet damaged or large files.

Prints one JSON object, to be kept as ``benchmarks/results/cache-durability-<cpu>.json``. Needs no device, no torch and
no triton; takes about three minutes on two cores. What the figures mean:

- ``kill``: decisions are reported when ``put`` accepted them and when ``flush`` said they are on disk; of the first,
  how long before the kill the oldest one was made that is lost, of the second, how many are lost.
- ``large``: ``put_us`` is what the caller waits, ``on_disk_s`` how long until the new file is in place, and
  ``longest_pause_ms`` the longest gap between two look-ups of the caller while it is being written.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import filelock  # noqa: F401  # so that killed children spend their short lives writing, not importing

from kalign_core.cache.device_table import device_table
from kalign_core.cache.document import Document, read, render
from kalign_core.cache.toml_store import TomlStore
from kalign_core.records import Config, Entry, EntryKey, Identity, Toolchain
from kalign_core.settings import Settings

DEVICE = Identity("nvidia", "NVIDIA H200", "GPU-0000", "10de:2335", (("arch", "sm_90"), ("memory_gib", 139)))
TOOLCHAIN = Toolchain.of(driver="580.159.04", cuda="13.0", triton="3.6.0", torch="2.11.0")
ARGS = "x:bf16:row:a16 weight:bf16:a16 out:bf16:row:a16 rstd:fp32:a16 x_stride:d16 out_stride:d16 eps:float index:32"


def entry(number: int) -> Entry:
    """A decision of the usual size, with a key of its own."""
    key = EntryKey(
        "rms_norm", "rms_norm/1", f"T<=4096 H={number}", ARGS, "train", TOOLCHAIN, "9c1e4d3a9c1e4d3a", "2026.1"
    )
    digests = tuple(f"{name}=1f3a4d3a9c1e4d3a" for name in ("normals", "spread", "cancel", "zeros"))
    return Entry(
        key,
        Config(ROWS=2, num_warps=8, num_stages=1, enable_fp_fusion=False),
        tuned_at="T=4096",
        cold_us=18.5,
        warm_us=17.9,
        reference_cold_us=20.4,
        reference_warm_us=19.8,
        mad_us=0.1,
        tried="refused=4 failed=0 refuted=0 timed=20",
        digests=digests,
        decided="2026-11-30T10:31:00Z",
    )


def store_in(folder: Path) -> TomlStore:
    return TomlStore(Settings(cache_dir=folder), lock_wait_s=60.0)


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork a child that runs ``work(pipe)``; gives its id and the pipe's other end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            work(writer)
        finally:
            os._exit(0)
    os.close(writer)
    return pid, reader


def write_from(folder: Path, first: int, seed: int) -> Callable[[int], None]:
    """Work of a child that decides without end and reports what was accepted, and what is on disk by its own word."""

    def work(pipe: int) -> None:
        store, numbers = store_in(folder), random.Random(seed)
        os.write(pipe, b"ready\n")
        for number in range(first, first + 10**6):
            made = time.monotonic()
            if store.put(DEVICE, entry(number)):
                os.write(pipe, b"put %d %.6f\n" % (number, made))
            if numbers.random() < 0.3:
                if store.flush():
                    os.write(pipe, b"disk %d 0\n" % number)
            else:
                time.sleep(numbers.uniform(0, 0.01))

    return work


def kills(folder: Path, times: int, longest_s: float, numbers: random.Random) -> dict[str, Any]:
    """Kill a writing process ``times`` times at random instants; count what is lost and files that do not parse."""
    made: dict[int, float] = {}
    promised: set[int] = set()
    broken = leftovers = 0
    for turn in range(times):
        first = turn * 10_000
        pid, pipe = in_child(write_from(folder, first, turn))
        report = os.read(pipe, 6)
        time.sleep(numbers.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        os.waitpid(pid, 0)
        while piece := os.read(pipe, 65536):
            report += piece
        os.close(pipe)
        for line in report.split(b"\n")[:-1]:
            kind, *words = line.split()
            if kind == b"put":
                made[int(words[0])] = killed - float(words[1])
            elif kind == b"disk":
                promised.update(range(first, int(words[0]) + 1))
        halves = list(folder.glob(".*.tmp"))
        leftovers += bool(halves)
        for path in halves:
            path.unlink()
        broken += not parses(folder)
    kept = {int(found.key.problem.rpartition("=")[2]) for found in store_in(folder).entries(DEVICE)}
    lost = made.keys() - kept
    return {
        "kills": times, "in_the_middle_of_writing": leftovers, "files_that_do_not_parse": broken,
        "accepted": len(made), "accepted_and_lost": len(lost),
        "oldest_of_the_lost_s": round(max((made[number] for number in lost), default=0.0), 3),
        "said_to_be_on_disk": len(promised), "said_to_be_on_disk_and_lost": len(promised - kept),
    }  # fmt: skip


def parses(folder: Path) -> bool:
    path = store_in(folder).path(DEVICE)
    if path is None or not path.exists():
        return True
    content = path.read_bytes()
    return tomllib.loads(content.decode())["schema"] == 1 and not read(content).damage


def write_forty(folder: Path, first: int) -> None:
    store = store_in(folder)
    for number in range(first, first + 40):
        store.put(DEVICE, entry(number))
        time.sleep(0.005)  # so that writes of all processes meet, and not one of each


def concurrency(folder: Path) -> dict[str, Any]:
    """Eight processes that write forty decisions each at once, started afresh."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_forty, args=(folder, 40 * n)) for n in range(8)]
    begun = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - begun
    return {"written": 320, "kept": len(store_in(folder).entries(DEVICE)), "seconds": round(seconds, 2)}


def damage(numbers: random.Random) -> dict[str, Any]:
    """Every prefix of a file of about 2,000 bytes and 500 flipped bits: entries that come back otherwise."""
    document = Document(device_table(DEVICE))
    for number in range(2):
        document.add(entry(number))
    content = render(document)
    original = {found.key: found for found in document.entries()}
    cases = [content[:length] for length in range(len(content))]
    for _ in range(500):
        flipped = bytearray(content)
        flipped[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        cases.append(bytes(flipped))
    wrong, exceptions = 0, []
    for case in cases:
        try:
            found = read(case).document
            wrong += sum(original.get(e.key) != e for e in (found.entries() if found else ()))
        except Exception as error:
            exceptions.append(repr(error)[:200])
    return {"bytes": len(content), "cases": len(cases), "wrong_entries": wrong,
            "exceptions": len(exceptions), "first_exception": next(iter(exceptions), "")}  # fmt: skip


def large(folder: Path, entries: int) -> dict[str, Any]:
    """A file of ``entries`` decisions: first look-up, a new decision, hits."""
    document = Document(device_table(DEVICE))
    for number in range(entries):
        document.add(entry(number))
    first = store_in(folder)
    first.put(DEVICE, entry(0))
    assert first.flush()
    path = first.path(DEVICE)
    assert path is not None
    path.write_bytes(render(document))
    loads, puts, writes, pauses = [], [], [], []
    for turn in range(9):
        store = store_in(folder)
        begun = time.perf_counter()
        assert store.lookup(DEVICE, entry(7).key) == entry(7)
        loads.append(time.perf_counter() - begun)
        put_s, on_disk_s, pause_s = new_decision(store, path, entry(entries + turn))
        puts.append(put_s), writes.append(on_disk_s), pauses.append(pause_s)
        time.sleep(0.5)
    return {
        "entries": entries, "bytes": path.stat().st_size, "load_s": round(statistics.median(loads), 3),
        "load_worst_s": round(max(loads), 3), "put_us": round(statistics.median(puts) * 1e6),
        "put_worst_us": round(max(puts) * 1e6), "on_disk_s": round(statistics.median(writes), 3),
        "on_disk_worst_s": round(max(writes), 3), "longest_pause_ms": round(max(pauses) * 1e3, 1),
        **hits(store), "system_calls_of_100_000_hits": system_calls(path.parent),
    }  # fmt: skip


def new_decision(store: TomlStore, path: Path, made: Entry) -> tuple[float, float, float]:
    """Seconds that ``put`` takes, until the file is another, and of the longest gap between look-ups meanwhile."""
    key, before = entry(7).key, path.stat().st_ino
    begun = time.perf_counter()
    assert store.put(DEVICE, made)
    put_s = time.perf_counter() - begun
    last, longest = time.perf_counter(), 0.0
    while path.stat().st_ino == before:
        for _ in range(100):
            store.lookup(DEVICE, key)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    return put_s, last - begun, longest


def hits(store: TomlStore) -> dict[str, Any]:
    """Nanoseconds of a hit in the store (not of a launch), and what a million hits leave in memory."""
    key = entry(7).key
    store.lookup(DEVICE, key)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter_ns()
    for _ in range(1_000_000):
        store.lookup(DEVICE, key)
    spent = time.perf_counter_ns() - begun
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"hit_ns": round(spent / 1e6), "grown_by_a_million_hits_kib": grown}


def system_calls(folder: Path) -> int | None:
    """System calls that a process makes while it hits 100,000 times, by strace; None where there is no strace."""
    if shutil.which("strace") is None:
        return None
    trace = folder / "trace.txt"
    command = ["strace", "-f", "-o", str(trace), sys.executable, __file__, "--only-hits", str(folder)]
    if subprocess.run(command, check=False).returncode != 0:
        return None
    lines = trace.read_text(errors="replace").splitlines()
    first, last = (number for number, line in enumerate(lines) if "getpriority(" in line)
    return last - first - 1


def only_hits(folder: Path) -> None:
    """Hit 100,000 times between two calls that stand out in a trace."""
    store, key = store_in(folder), entry(7).key
    store.lookup(DEVICE, key)
    os.getpriority(os.PRIO_PROCESS, 0)
    for _ in range(100_000):
        store.lookup(DEVICE, key)
    os.getpriority(os.PRIO_PROCESS, 0)


def machine(folder: Path) -> dict[str, Any]:
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu_name(), "cpus": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "file_system": kind.stdout.strip(),
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    names = ("filelock", "tomli-w", "platformdirs")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=300)
    options.add_argument("--entries", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=2026)
    options.add_argument("--only-hits", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.only_hits is not None:
        only_hits(chosen.only_hits)
        return
    numbers = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "benchmark": "cache_durability",
            "command": " ".join(("python benchmarks/cache_durability.py", *sys.argv[1:])),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(folder),
            "versions": versions(),
            "kill": kills(folder / "kill", chosen.kills, 0.5, numbers),
            "concurrency": concurrency(folder / "many"),
            "damage": damage(numbers),
            "large": large(folder / "large", chosen.entries),
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
