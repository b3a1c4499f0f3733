"""Facts of the toolchain that every platform shares: versions, and the variables that change compiled code or bits.

A platform adds its driver, its run time and its devices' code generators; entries are valid for exactly these facts. A
flag that nobody here has heard of counts: a needless miss costs a tuning, a wrong hit is silent. Switches of torch
(``allow_tf32``, the float32 matmul precision, deterministic algorithms) are no facts, because none of them reaches a
Triton kernel: its precision is fixed by the declaration, which the source digest covers.

Nothing is imported to find a version: neither torch nor triton, and no driver library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from kalign_core.environment import installed_torch

UNKNOWN = "unknown"
FACT_LENGTH = 80
DIGEST_DIGITS = 16
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton", "triton-windows")

# Variables with one of these prefixes count, and so do the names below; from triton's knobs and its compiler's table.
COUNTED_PREFIXES = ("TRITON_", "AMDGCN_", "PTXAS_")
COUNTED_NAMES = frozenset(
    {
        "ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "DISABLE_LLVM_OPT", "DISABLE_MMA_V3", "DISABLE_MMA_V5",
        "DISABLE_OUTPUT_LANE_CG", "DISABLE_PTXAS_OPT", "LLVM_PASS_PLUGIN_PATH", "STORE_TMEM_TO_GLOBAL_BYPASS_SMEM",
        "SWAP_FOR_WS_KERNELS", "USE_IR_LOC",
    }
)  # fmt: skip
# Where files go, what is printed and profiled, how results are shared: none of it reaches the code.
IGNORED_NAMES = frozenset(
    {
        "AMDGCN_ENABLE_DUMP", "TRITON_ALWAYS_COMPILE", "TRITON_CACHE_AUTOTUNING", "TRITON_CACHE_DIR",
        "TRITON_CACHE_MANAGER", "TRITON_CUDACRT_PATH", "TRITON_CUDART_PATH", "TRITON_CUOBJDUMP_PATH",
        "TRITON_DUMP_DIR", "TRITON_DUMP_MIR", "TRITON_DUMP_PTXAS_LOG", "TRITON_ENABLE_HW_TRACE", "TRITON_ENABLE_NVTX",
        "TRITON_ENABLE_PYTHON_STACKTRACE", "TRITON_FRONT_END_DEBUGGING", "TRITON_HOME", "TRITON_INTERPRET",
        "TRITON_KERNEL_DUMP", "TRITON_LIBCUDA_PATH", "TRITON_LIBHIP_PATH", "TRITON_NVDISASM_PATH",
        "TRITON_OVERRIDE_DIR", "TRITON_PRINT_AUTOTUNING", "TRITON_PROFILE_BUFFER_SIZE",
        "TRITON_PROFILE_METRIC_BUFFER_SIZE", "TRITON_REMOTE_CACHE_BACKEND", "TRITON_REPRODUCER_PATH",
        "TRITON_STORE_BINARY_ONLY",
    }
)  # fmt: skip
IGNORED_PREFIXES = ("TRITON_CUPTI_", "TRITON_HSA_RUNTIME_", "TRITON_PROTON_", "TRITON_REDIS_", "TRITON_ROCPROFILER_",
                    "TRITON_ROCTRACER_", "TRITON_ROCTX_")  # fmt: skip
# These name tools and libraries; the file counts, not where it lies.
FILE_NAMES = frozenset(
    {
        "LLVM_PASS_PLUGIN_PATH", "TRITON_AMD_CODEGEN_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_PLUGIN_PATHS",
        "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH",
    }
)  # fmt: skip
# Code edited by hand takes the place of what the compiler makes: nothing measured under it is worth keeping.
OVERRIDES = frozenset({"TRITON_KERNEL_OVERRIDE", "TRITON_SWAP_MIR"})


def bit_flags(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables among ``variables`` that may change code or bits, as facts by name.

    Spellings of on and off are one value, files count by content, long values by digest. ``unknown``, which keeps
    decisions off the disk, stands for an override of compiled code and for a file that cannot be read.
    """
    return {name: _fact(name, text) for name, text in counted(variables)}


def counted(variables: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Those of ``variables`` that ``bit_flags`` makes facts of, by name, as they are set."""
    set_now = ((name, variables.get(name)) for name in variables)  # other threads may unset one meanwhile
    return tuple(sorted((name, text) for name, text in set_now if text is not None and _counts(name, text)))


def versions() -> dict[str, str]:
    """``torch``, ``triton`` and ``triton_build`` of this installation; what is not installed is left out.

    ``triton_build`` is a digest over the installed files, compiler and bundled assemblers among them, so that two
    builds of one version differ.
    """
    facts: dict[str, str] = {}
    torch = installed_torch()
    if torch is not None:
        facts["torch"] = torch.version
    folder = _triton_folder()
    if folder is not None:
        facts["triton"] = _triton_version(folder)
        facts["triton_build"] = _triton_build(folder)
    return facts


def file_digest(path: str | os.PathLike[str]) -> str:
    """Sixteen hexadecimal digits over the content of the file at ``path``; ``unknown`` where it cannot be read."""
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return UNKNOWN
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_DIGITS]
    except (OSError, ValueError):
        return UNKNOWN


def _counts(name: str, text: str) -> bool:
    if name in OVERRIDES:
        return _switch(text) != "0" and text != ""
    if name in IGNORED_NAMES or name.startswith(IGNORED_PREFIXES):
        return False
    return name in COUNTED_NAMES or name.startswith(COUNTED_PREFIXES)


def _fact(name: str, text: str) -> str:
    if name in OVERRIDES:
        return UNKNOWN
    if name in FILE_NAMES and text:
        digests = [file_digest(path) for path in text.split(os.pathsep)]
        return UNKNOWN if UNKNOWN in digests else " ".join(digests)
    value = _switch(text) or "empty"
    if len(value) > FACT_LENGTH or not value.isprintable() or value == UNKNOWN:
        return "sha256:" + _digest([text])
    return value


def _switch(text: str) -> str:
    """``text`` with triton's spellings of on and off made one."""
    return {"on": "1", "true": "1", "off": "0", "false": "0"}.get(text.lower(), text)


def _triton_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("triton")
    except (ImportError, ValueError, AttributeError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _triton_version(folder: Path) -> str:
    try:
        text = (folder / "__init__.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return UNKNOWN
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else UNKNOWN


def _triton_build(folder: Path) -> str:
    recorded = _recorded(folder)
    if recorded:
        return _digest(recorded)
    # Built in place: the compiler's libraries change size and time with every build.
    patterns = ("_C/*.so", "backends/*/bin/ptxas*", "backends/*/lib/*.so")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    try:
        facts = [(file.name, file.stat()) for file in files]
    except OSError:
        return UNKNOWN
    return _digest(f"{name} {found.st_size} {found.st_mtime_ns}" for name, found in facts) if facts else UNKNOWN


def _recorded(folder: Path) -> list[str]:
    """Lines of the installer's record for the files in ``folder``, each with its digest; none for other installs."""
    for name in TRITON_DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
            if Path(str(distribution.locate_file("triton"))).resolve() != folder.resolve():
                continue
            lines = (distribution.read_text("RECORD") or "").splitlines()
        except (importlib.metadata.PackageNotFoundError, OSError):
            continue
        return sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
    return []


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:DIGEST_DIGITS]
