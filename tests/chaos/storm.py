"""A storm: which faults befall which roles and brokers when, drawn from a seed before anything runs.

What it keeps true: the same seed and shape give the same storm, on any machine; each kind of fault falls on its
targets evenly, to within one; a storm is written to a file as it is, and read back equal. The moment of a fault is a
step of the run and a delay after it, not a time: a slow machine gets the same storm, and a storm cannot outrun the loop
that it falls on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path


class FaultKind(StrEnum):
    """What is done to a target."""

    KILL = "kill"
    """SIGKILL; whoever supervises the role starts it again."""
    RANK_KILL = "rank-kill"
    """SIGKILL of one rank of a role that has several; the others notice, the role ends and is started again."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT a while later."""
    PARTITION = "partition"
    """Nothing passes between the role and the brokers for a while, in either direction; connections stay open."""
    DISK = "disk"
    """No file may grow (a quota that is used up), until the role ends and is started again."""
    BROKER_KILL = "broker-kill"
    """SIGKILL of a broker, which is started again a while later."""
    BROKER_PAUSE = "broker-pause"
    """SIGSTOP of a broker, and SIGCONT a while later."""


LASTING = frozenset({FaultKind.PAUSE, FaultKind.PARTITION, FaultKind.BROKER_KILL, FaultKind.BROKER_PAUSE})
"""Faults that go on for a time of their own."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a storm."""

    number: int
    kind: FaultKind
    target: str
    """Name of a role, or `broker-N`."""
    after_step: int
    """It waits for this optimizer step in the log."""
    delay_s: float
    """Seconds after that, and after the fault before it."""
    lasts_s: float
    """Seconds until it is taken back; 0 for a fault that ends by itself."""


@dataclass(frozen=True, slots=True)
class Share:
    """How often one kind of fault comes, on whom, and for how long."""

    kind: FaultKind
    count: int
    targets: Sequence[str]
    seconds: tuple[float, float] = (2.0, 12.0)
    """Shortest and longest, for the kinds that last."""


@dataclass(frozen=True, slots=True)
class Storm:
    """Faults in their order, with the seed that they were drawn from."""

    seed: int
    faults: tuple[Fault, ...]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        document = {"seed": self.seed, "faults": [asdict(fault) for fault in self.faults]}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Storm:
        """Read what `save` wrote. Raises ValueError for a file that holds no storm."""
        try:
            document = json.loads(path.read_text("utf-8"))
            faults = [Fault(**{**each, "kind": FaultKind(each["kind"])}) for each in document["faults"]]
            return cls(int(document["seed"]), tuple(faults))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no storm: {error!r}; --plan takes a file that an earlier run wrote"
            ) from error


def draw(seed: int, shares: Sequence[Share], *, last_step: int, gap_s: float) -> Storm:
    """The storm of a seed.

    Args:
        last_step: the faults are spread over the steps from 1 to this one, evenly. Each waits for its step: before the
            first there is nothing to lose.
        gap_s: longest delay of a fault after its step and after the fault before it, in seconds.

    Raises ValueError for a share with faults and nobody to bear them.
    """
    chance = random.Random(seed)
    drawn = [(share, target) for share in shares for target in _targets(share, chance)]
    chance.shuffle(drawn)
    faults = [
        Fault(
            number=number,
            kind=share.kind,
            target=target,
            after_step=1 + number * last_step // len(drawn),
            delay_s=round(chance.uniform(0.0, gap_s), 3),
            lasts_s=round(chance.uniform(*share.seconds), 3) if share.kind in LASTING else 0.0,
        )
        for number, (share, target) in enumerate(drawn)
    ]
    return Storm(seed, tuple(faults))


def counted(storm: Storm) -> Mapping[FaultKind, Mapping[str, int]]:
    """Faults by kind and target."""
    found: dict[FaultKind, dict[str, int]] = {}
    for fault in storm.faults:
        targets = found.setdefault(fault.kind, {})
        targets[fault.target] = targets.get(fault.target, 0) + 1
    return found


def _targets(share: Share, chance: random.Random) -> list[str]:
    """`share.count` targets, each as often as any other to within one, which of them comes once more at random."""
    if share.count and not share.targets:
        raise ValueError(f"{share.count} faults of kind {share.kind}, and nobody to bear them")
    rounds = -(-share.count // len(share.targets)) if share.targets else 0
    shuffled = (chance.sample(list(share.targets), len(share.targets)) for _ in range(rounds))
    return list(islice(chain.from_iterable(shuffled), share.count))
