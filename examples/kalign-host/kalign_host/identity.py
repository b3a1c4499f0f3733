"""Who this machine is. The one file of a backend to be slow and careful with.

The key must be another one for every device and the same in every process: a serial number or UUID, not the model's
name and not the device's number. Nothing here raises; what cannot be read is ``unknown``, and then kalign keeps its
decisions in memory.
"""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

from kalign_core.records import Identity

UNKNOWN = "unknown"


def identity(root: Path = Path("/")) -> Identity:
    """The identity of the machine whose files are below ``root``."""
    return Identity(
        vendor="host",
        name=processor(root),
        key=machine(root),
        # A machine whose processor or number of cores changed is another device, whatever its id says.
        must_match=(("processor", processor(root)), ("cores", os.cpu_count() or UNKNOWN)),
        provenance=(("kernel", platform.release() or UNKNOWN),),
    )


def machine(root: Path) -> str:
    """The machine's id, or its host name where it has none, as in containers."""
    text = read(root / "etc/machine-id")
    return text if text and text != "uninitialized" else socket.gethostname() or UNKNOWN


def processor(root: Path) -> str:
    """The processor's model name."""
    lines = read(root / "proc/cpuinfo").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine() or UNKNOWN


def read(path: Path) -> str:
    """The text of a file, empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
