"""A plan: the devices that are enough, the necessary changes if none are, and the output as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any

import typer

from tidemill.compose.output import print_rows
from tidemill.compose.plan.estimates import Estimate
from tidemill.compose.plan.memory import ReplicaCase, TrainerCase, replica_bytes, trainer_bytes
from tidemill.trainer.model_size import ModelSize

FURTHEST = 4096
"""Maximum number of devices in the search for a sufficient number."""
SHORT_ROW = 1024
"""Tokens of the rows that are proposed if longer rows do not fit."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """A trainer or a replica on a number of devices."""

    role: str
    case: TrainerCase | ReplicaCase
    bytes: dict[str, float]
    """Bytes of one device, by content."""

    @property
    def devices(self) -> int:
        return self.case.ranks

    @property
    def total(self) -> float:
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A proposed change, and the memory of a device after it."""

    role: str
    what: str
    gib: float
    fits: bool


@dataclass(frozen=True, slots=True)
class FitPlan:
    """The plan for one model on some devices."""

    trainers: list[RoleMemory]
    replicas: list[RoleMemory]
    trainer: RoleMemory | None
    """The trainer on the fewest devices on which it fits."""
    replica: RoleMemory | None
    """The replica on the fewest devices on which it fits."""
    replica_count: int
    """Replicas in addition to that trainer; 0 if there is no room for one."""
    shared: bool
    """Trainer and replica are on the same devices."""
    changes: list[PlanChange]

    @property
    def parts(self) -> list[RoleMemory]:
        return [*self.trainers, *self.replicas]

    @property
    def fits(self) -> bool:
        """Whether trainer and replica fit together."""
        return self.replica_count > 0


def fit(size: ModelSize, devices: Devices, trainer: TrainerCase, replica: ReplicaCase) -> FitPlan:
    """Find the division over the devices.

    Args:
        trainer: the trainer's case; the number of ranks is searched for.
        replica: the replica's case; its tensor parallel size is searched for if it is 0.

    Raises ValueError if the experts cannot be divided as the trainer's case says, or the attention heads as the
    replica's case says, or if the replica's case needs more devices than there are.
    """
    over = trainer.expert_parallel
    if over > 1 and (over > devices.count or not size.experts or size.expert_count % over):
        raise ValueError(
            f"trainer.expert_parallel is {over}: it must divide the {size.expert_count} experts of the model and the "
            f"number of ranks, at most {devices.count} here (one on each device); set it to 1 for a dense model"
        )
    trainers = [part_of(size, replace(trainer, ranks=over * n)) for n in _powers(devices.count // over)]
    splits = [replica.tensor_parallel] if replica.tensor_parallel else list(_divisors(size.heads, devices.count))
    if size.heads % splits[0]:
        raise ValueError(f"{splits[0]} ranks of an engine cannot share the {size.heads} attention heads of the model")
    tried = [
        case for case in (replace(replica, tensor_parallel=tensor) for tensor in splits) if case.ranks <= devices.count
    ]
    if not tried:
        raise ValueError(
            f"a replica with {replica.data_parallel} engines of {splits[0]} ranks needs a device for each rank, and "
            f"this is {devices}: name more devices, or fewer engines and ranks"
        )
    replicas = [part_of(size, case) for case in tried]
    best = next((part for part in trainers if part.total <= devices.usable), None)
    served = next((part for part in replicas if part.total <= devices.usable), None)
    count, shared = 0, False
    if best is not None and served is not None:
        count = (devices.count - best.devices) // served.devices
        pairs = ((one, other) for one in trainers for other in replicas)
        side = next((pair for pair in pairs if pair[0].total + pair[1].total <= devices.usable), None)
        if not count and side is not None:
            (best, served), count, shared = side, 1, True
    changes: list[PlanChange] = []
    if best is None:
        changes += _trainer_changes(size, devices, replace(trainer, ranks=trainers[-1].devices))
    if served is None:
        changes += _replica_changes(size, devices, tried[-1])
    if best is not None and served is not None and not count:
        needed = best.devices + served.devices
        changes.append(PlanChange("both", f"{needed} devices", max(best.total, served.total) / GIB, True))
    return FitPlan(trainers, replicas, best, served, count, shared, changes)


def part_of(size: ModelSize, case: TrainerCase | ReplicaCase) -> RoleMemory:
    if isinstance(case, TrainerCase):
        return RoleMemory("trainer", case, trainer_bytes(size, case))
    return RoleMemory("replica", case, replica_bytes(size, case))


def _trainer_changes(size: ModelSize, devices: Devices, case: TrainerCase) -> Iterator[PlanChange]:
    """Yield changes that make the trainer smaller, each by itself and all together, then a sufficient rank count."""
    over = gcd(size.expert_count, case.ranks)
    changes: list[tuple[bool, str, dict[str, Any]]] = [
        (case.reference, "trainer.kl.coefficient=0: no reference", {"reference": False}),
        (not case.checkpointed, "trainer.checkpoint_activations=true", {"checkpointed": True}),
        (case.gpu and case.on_device, "trainer.publish.on_device=false", {"on_device": False}),
        (case.older, "trainer.score_older_every=0: no older weights", {"older": False}),
        (case.row_tokens > SHORT_ROW, f"rows and rollouts of at most {SHORT_ROW:,} tokens", {"row_tokens": SHORT_ROW}),
        (case.expert_parallel == 1 < over, f"trainer.expert_parallel={over}", {"expert_parallel": over}),
    ]
    possible = {what: change for applies, what, change in changes if applies}
    smaller = {what: replace(case, **change) for what, change in possible.items()}
    if len(smaller) > 1:
        every = {name: value for change in possible.values() for name, value in change.items()}
        smaller["all of these together"] = replace(case, **every)
    for what, tried in smaller.items():
        yield _changed(devices, what, part_of(size, tried))
    most = FURTHEST // case.expert_parallel
    counts = (count for n in _powers(most) if (count := n * case.expert_parallel) > case.ranks)
    parts = (part_of(size, replace(case, ranks=count)) for count in counts)
    enough = next((part for part in parts if part.total <= devices.usable), None)
    if enough is not None:
        yield _changed(devices, f"{enough.devices} ranks, each on a device of its own", enough)


def _replica_changes(size: ModelSize, devices: Devices, case: ReplicaCase) -> Iterator[PlanChange]:
    """Yield the number of requests that fits, then the number of devices that is enough without a change."""
    engines = case.data_parallel
    least, two = (part_of(size, replace(case, requests=n * engines)).total for n in (1, 2))
    if least < devices.usable:
        requests = engines * (1 + int((devices.usable - least) / (two - least)))
        part = part_of(size, replace(case, requests=requests))
        yield _changed(devices, f"--requests {requests}, of {case.context:,} tokens each", part)
    splits = (tensor for tensor in _divisors(size.heads, size.heads) if tensor > case.tensor_parallel)
    parts = (part_of(size, replace(case, tensor_parallel=tensor)) for tensor in splits)
    enough = next((part for part in parts if part.total <= devices.usable), None)
    if enough is not None:
        yield _changed(devices, f"{enough.devices} devices for each replica", enough)


def _changed(devices: Devices, what: str, part: RoleMemory) -> PlanChange:
    return PlanChange(part.role, what, part.total / GIB, part.total <= devices.usable)


def _powers(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on below `most`, and last `most` itself."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def _divisors(number: int, most: int) -> Iterator[int]:
    return (divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)


GIB = 1 << 30
USABLE = 0.9
"""Share of a device's memory that a plan may fill: the rest is for fragmentation and for libraries."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one kind, each with memory of its own."""

    count: int
    gib: float
    """GiB of each."""
    gpu: bool
    """False: hosts without a GPU, whose memory is shared by all roles on them."""

    @property
    def usable(self) -> float:
        """Bytes of one device that a plan may fill."""
        return USABLE * self.gib * GIB

    def __str__(self) -> str:
        what = "GPU" if self.gpu else "host without a GPU"
        many = "GPUs" if self.gpu else "hosts without a GPU"
        return f"{self.count} {what if self.count == 1 else many} of {self.gib:g} GiB"


def devices_of(gpus: str | None, cpu: str | None) -> Devices:
    """Parse `8x80`: eight devices of 80 GiB each. Raises ValueError unless one argument is given, in this form."""
    if (gpus is None) == (cpu is None):
        raise ValueError("give one of --gpus and --cpu, for instance --gpus 8x80 (eight GPUs of 80 GiB each)")
    text = gpus if gpus is not None else cpu or ""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6}(?:\.\d+)?)", text.strip())
    if found is None or not int(found[1]) or not float(found[2]):
        raise ValueError(f"{text!r} is not a number of devices and the GiB of each: write for instance 8x80, or 1x23.5")
    return Devices(int(found[1]), float(found[2]), gpus is not None)


COLUMNS = 7
"""Maximum columns of a table, one for each number of devices; the greatest numbers are shown."""


def print_plan(size: ModelSize, devices: Devices, found: FitPlan, estimates: Sequence[Estimate]) -> None:
    """Print the tables on standard output, and the result in words on standard error."""
    experts = f", {size.active / 1e9:.3g} B of them for each token" if size.experts else ""
    typer.echo(f"{size.parameters / 1e9:.4g} B parameters{experts}; {devices}", err=True)
    for title, every in (("trainer", found.trainers), ("replica", found.replicas)):
        parts = every[-COLUMNS:]
        if parts:
            # GiB of one device: a row for each content, a column for each number of devices.
            names = [name for name in parts[0].bytes if any(part.bytes[name] for part in parts)]
            memory = [(name, *(round(part.bytes[name] / GIB, 3) for part in parts)) for name in names]
            memory.append(("total", *(round(part.total / GIB, 3) for part in parts)))
            memory.append(("share_of_device", *(round(part.total / (devices.gib * GIB), 3) for part in parts)))
            counts = [str(part.devices) for part in parts]
            print_rows((f"{title}_gib", *counts), memory, formats=dict.fromkeys(counts, ",.2f"))
            typer.echo()
    rows = ((each.name, float(f"{each.value:.4g}"), each.rests_on) for each in estimates)
    print_rows(("estimate", "value", "rests_on"), rows, formats={"value": ",.6g"})
    if found.changes:
        typer.echo()
        changes = ((each.role, each.what, round(each.gib, 2), each.fits) for each in found.changes)
        print_rows(("role", "change", "gib", "fits"), changes, formats={"gib": ",.2f"})
    typer.echo(verdict(devices, found), err=True)


def verdict(devices: Devices, found: FitPlan) -> str:
    """Return the result as a sentence."""
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
    where = "a replica on the same ones" if found.shared else f"beside {found.replica_count} replica(s) on {each} each"
    return f"fits: the trainer on {ranks} device(s), {where}"


def document(
    model: str, size: ModelSize, devices: Devices, found: FitPlan, estimates: Sequence[Estimate]
) -> dict[str, Any]:
    """Return the plan for JSON: bytes, and the same estimates and changes."""

    def memory_row(part: RoleMemory) -> dict[str, Any]:
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
        "trainer": [memory_row(part) for part in found.trainers],
        "replica": [memory_row(part) for part in found.replicas],
        "estimates": [asdict(each) for each in estimates],
        "changes": [asdict(each) for each in found.changes],
    }
