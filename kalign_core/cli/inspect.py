"""``kalign doctor``, ``plugins`` and ``ops``: what is here, what is chosen and why. They survive anything broken."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import click

from kalign_core import settings
from kalign_core.cli.output import emit, json_option, reporting_errors, table
from kalign_core.errors import BadArgument, KalignError, UnknownName
from kalign_core.records import join_facts


@click.command()
@json_option
@reporting_errors
def doctor(as_json: bool) -> None:
    """Say which platform is used and why, which devices and toolchain are here, and where decisions are kept.

    Exit code 3 if no platform can be used.
    """
    from kalign_core import hal

    selection = hal.selection
    platforms = [asdict(row) for row in selection.rows]
    data: dict[str, Any] = {
        "platform": selection.chosen,
        "why": selection.why,
        "platforms": platforms,
        "plugins": [_row(row) for row in hal.plugins.rows],
        "settings": _settings(),
    }
    tables: list[Any] = [
        f"platform: {selection.chosen or 'none'} ({selection.why})",
        table("platforms", ("name", "plugin", "usable", "reason"), [list(row.values()) for row in platforms]),
        table("plugins", ("name", "version", "state", "reason"),
              [[row[k] for k in ("name", "version", "state", "reason")] for row in data["plugins"]]),
        table("settings", ("variable", "value", "from", "purpose"), [list(row.values()) for row in data["settings"]]),
    ]  # fmt: skip
    if selection.chosen:
        tables += _devices(data)
    emit(as_json, data, *tables)
    sys.exit(0 if selection.chosen else 3)


def _devices(data: dict[str, Any]) -> list[Any]:
    """Add devices, toolchain and store to ``data``; what fails is said in place of a value."""
    from kalign_core import session

    here = session.current()
    data["devices"] = []
    try:
        for index in here.platform.devices():
            facts = here.facts(index)
            entries = here.store.entries(facts.identity)
            mine = [entry for entry in entries if entry.key.toolchain == facts.toolchain]
            data["devices"].append({
                "device": index,
                "identity": asdict(facts.identity),
                "storable": facts.identity.known and facts.toolchain.known,
                "toolchain": dict(facts.toolchain.facts),
                "model": asdict(facts.model),
                "condition": asdict(here.platform.condition(index)),
                "file": here.store.path(facts.identity),
                "entries": len(entries),
                "entries_of_other_toolchains": len(entries) - len(mine),
            })  # fmt: skip
    except (KalignError, RuntimeError, OSError) as error:
        data["devices_error"] = f"{type(error).__name__}: {error}"
        return [f"devices: {data['devices_error']}"]
    rows = [
        (d["device"], d["identity"]["name"], d["identity"]["key"], d["model"]["arch"], d["entries"],
         d["entries_of_other_toolchains"], d["file"]) for d in data["devices"]
    ]  # fmt: skip
    chains = [f"toolchain: {join_facts(d['toolchain'].items())}" for d in data["devices"][:1]]
    columns = ("device", "name", "key", "arch", "entries", "of other toolchains", "file")
    return [table("devices", columns, rows), *chains]


def _settings() -> list[dict[str, str]]:
    try:
        found = settings.read()
    except KalignError as error:
        return [{"variable": "", "value": "", "from": "", "purpose": f"cannot be used: {error}"}]
    return [
        {
            "variable": variable.name,
            "value": str(getattr(found, name)),
            "from": found.sources[name],
            "purpose": variable.purpose,
        }
        for name, variable in settings.VARIABLES.items()
    ]


@click.command()
@click.option("--traceback", "name", default=None, help="Show why this plugin is broken, in full.")
@json_option
@reporting_errors
def plugins(name: str | None, as_json: bool) -> None:
    """List plugins: distribution, version, API, state and the reason where one is not used."""
    from kalign_core import hal

    rows = hal.plugins.rows
    if name is not None:
        matching = [row for row in rows if row.name == name]
        if not matching:
            raise UnknownName("plugin", name, [row.name for row in rows])
        for row in matching:
            click.echo(row.traceback or f"{row.name} is {row.state}: {row.reason or 'nothing to show'}")
        return
    found = [_row(row) for row in rows]
    columns = ("name", "distribution", "version", "api", "state", "reason")
    emit(as_json, {"plugins": found}, table("", columns, [[row[c] for c in columns] for row in found]))


def _row(row: Any) -> dict[str, str]:
    return {field: getattr(row, field) for field in ("name", "distribution", "version", "api", "state", "reason")}


@click.command()
@json_option
@reporting_errors
def ops(as_json: bool) -> None:
    """List operators: kernels, contracts, reference launches, knobs, and how many candidates there are here."""
    import torch

    from kalign_core import ops as operators
    from kalign_core import session
    from kalign_core.api import recorded_forms

    here = session.current()
    device = torch.device(here.platform.device_type)
    first = here.platform.devices()[0]
    interpreted = here.platform.model(first).interpreted
    rows = []
    for op in operators.operators():
        sizes = (op.small_shapes if interpreted else op.shapes)[0]
        for call in recorded_forms(op, sizes, op.dtypes[0], device):
            found = here.space(call.kernel, call.problem, call.device)
            rows.append({
                "operator": op.name, "kernel": call.kernel.name, "contract": call.kernel.contract,
                "dims": ",".join(op.dims), "dtypes": ",".join(op.dtypes),
                "at": here.key(call.kernel, call.problem, call.device).problem,
                "reference": str(call.kernel.reference_config(call.problem)),
                "knobs": join_facts((k, "|".join(map(str, v))) for k, v in call.kernel.knobs.items()),
                "candidates": len(found.candidates), "refused": len(found.refused),
            })  # fmt: skip
    if not rows:
        raise BadArgument("no operator is known here")
    columns = ("operator", "kernel", "contract", "dims", "dtypes", "at", "reference", "candidates", "refused", "knobs")
    emit(as_json, {"operators": rows}, table("", columns, [[row[c] for c in columns] for row in rows]))
