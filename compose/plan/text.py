"""A plan for a person, and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from tidemill.compose.plan.fit import GIB, USABLE, Devices
from tidemill.compose.rows import print_rows

if TYPE_CHECKING:
    from tidemill.compose.plan.estimates import Estimate
    from tidemill.compose.plan.fit import FitPlan, RoleMemory
    from tidemill.trainer.model_size import ModelSize

COLUMNS = 7
"""Numbers of devices that a table has columns for; the greatest ones are shown."""


def print_plan(size: ModelSize, devices: Devices, found: FitPlan, estimates: Sequence[Estimate]) -> None:
    """Print the tables on standard output, and the result in words on standard error."""
    experts = f", {size.active / 1e9:.3g} B of them for each token" if size.experts else ""
    typer.echo(f"{size.parameters / 1e9:.4g} B parameters{experts}; {devices}", err=True)
    for title, parts in (("trainer", found.trainers), ("replica", found.replicas)):
        if parts:
            _print_memory(title, devices, parts[-COLUMNS:])
            typer.echo()
    rows = ((each.name, float(f"{each.value:.4g}"), each.rests_on) for each in estimates)
    print_rows(("estimate", "value", "rests_on"), rows, formats={"value": ",.6g"})
    if found.changes:
        typer.echo()
        changes = ((each.role, each.what, round(each.gib, 2), each.fits) for each in found.changes)
        print_rows(("role", "change", "gib", "fits"), changes, formats={"gib": ",.2f"})
    typer.echo(verdict(devices, found), err=True)


def verdict(devices: Devices, found: FitPlan) -> str:
    """The result in a sentence."""
    if found.trainer is None or found.replica is None:
        missing = " and ".join(
            f"a {name}" for name, part in (("trainer", found.trainer), ("replica", found.replica)) if part is None
        )
        return f"does not fit: {missing} would take more than {USABLE:.0%} of each device on {devices}"
    ranks, each = found.trainer.devices, found.replica.devices
    if not found.replica_count:
        return (
            f"does not fit: the trainer takes {ranks} of the {devices.count} devices, and a replica {each} more; "
            "side by side on the same devices they are too large"
        )
    where = "on the same devices" if found.shared else f"beside {found.replica_count} replica(s) on {each} each"
    return f"fits: the trainer on {ranks} device(s), {where}"


def document(
    model: str, size: ModelSize, devices: Devices, found: FitPlan, estimates: Sequence[Estimate]
) -> dict[str, Any]:
    """The plan for a program: bytes, and the same estimates and changes."""

    def told(part: RoleMemory) -> dict[str, Any]:
        return {
            "devices": part.devices,
            **asdict(part.case),
            "bytes": part.bytes,
            "total": part.total,
            "fits": part.total <= devices.usable,
        }

    return {
        "model": {"name": model, **asdict(size), "active": size.active},
        "devices": asdict(devices),
        "fits": found.fits,
        "verdict": verdict(devices, found),
        "trainer_devices": found.trainer.devices if found.trainer else None,
        "replica_devices": found.replica.devices if found.replica else None,
        "replicas_beside": found.replica_count,
        "same_devices": found.shared,
        "trainer": [told(part) for part in found.trainers],
        "replica": [told(part) for part in found.replicas],
        "estimates": [asdict(each) for each in estimates],
        "changes": [asdict(each) for each in found.changes],
    }


def _print_memory(title: str, devices: Devices, parts: Sequence[RoleMemory]) -> None:
    """GiB of one device: a row for what it holds, a column for a number of devices."""
    names = [name for name in parts[0].bytes if any(part.bytes[name] for part in parts)]
    rows = [(name, *(round(part.bytes[name] / GIB, 3) for part in parts)) for name in names]
    rows.append(("total", *(round(part.total / GIB, 3) for part in parts)))
    rows.append(("share_of_device", *(round(part.total / (devices.gib * GIB), 3) for part in parts)))
    counts = [str(part.devices) for part in parts]
    print_rows((f"{title}_gib", *counts), rows, formats=dict.fromkeys(counts, ",.2f"))
