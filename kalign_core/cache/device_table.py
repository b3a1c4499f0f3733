"""Who a device is, as it stands in a file, and whether the device that a file names is this one.

The key selects the file; everything else that names the device has to match too, so that neither a slice cut anew nor a
file carried to another machine passes. What is only recorded (clocks, power cap, names that drivers change) is never
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kalign_core.records import Identity


class Difference(NamedTuple):
    """One field in which what was wanted and what was found differ; ``(none)`` stands for an absent field."""

    field: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"{self.field} is {self.found}, here it is {self.wanted}"


def names_of(identity: Identity) -> tuple[tuple[str, str | int], ...]:
    """Every field that has to match for two devices to be one."""
    return (("key", identity.key), ("pci_device_id", identity.pci_device_id), *identity.must_match)


def device_table(identity: Identity) -> dict[str, Any]:
    """The device table of a new file: who it is, what has to match, and what is only recorded."""
    table: dict[str, Any] = {"vendor": identity.vendor, "name": identity.name}
    table |= {name: value for name, value in names_of(identity) if value != ""}
    table["must_match"] = sorted({name for name, _ in identity.must_match})
    return {**table, **{name: value for name, value in identity.provenance if name not in table and value != ""}}


def difference(table: Mapping[str, Any], identity: Identity) -> Difference | None:
    """The first field in which the device of ``table`` is not ``identity``, or None where it is the same device."""
    wanted = dict(names_of(identity))
    declared = table.get("must_match", [])
    for name in (*wanted, *(declared if isinstance(declared, list) else ())):
        here, there = wanted.get(name, ""), table.get(name, "")
        if here != there or type(here) is not type(there):
            return Difference(name, _shown(here), _shown(there))
    return None


def _shown(value: Any) -> str:
    return "(none)" if value == "" else str(value)
