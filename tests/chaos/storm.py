"""A storm: which faults hit which roles and brokers, and when; drawn from a seed before anything runs.

Invariants: the same seed and shape give the same storm, on any machine; the counts of a kind of fault on its targets
differ by at most one; a storm that is written to a file is read back equal. The moment of a fault is a step of the run
and a delay after it, not a time: a slow machine gets the same storm, and a storm is never ahead of the loop that it
hits.
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
    """Kinds of faults."""

    KILL = "kill"
    """SIGKILL; the role's process manager starts it again."""
    RANK_KILL = "rank-kill"
    """SIGKILL of one rank of a role with several; the others detect it, the role ends and is started again."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT some time later."""
    PARTITION = "partition"
    """No data passes between the role and the brokers for some time, in either direction; connections stay open."""
    DISK = "disk"
    """No file may grow (a used-up quota), until the role ends and is started again."""
    BROKER_KILL = "broker-kill"
    """SIGKILL of a broker, which is started again some time later."""
    BROKER_PAUSE = "broker-pause"
    """SIGSTOP of a broker, and SIGCONT some time later."""


LASTING = frozenset({FaultKind.PAUSE, FaultKind.PARTITION, FaultKind.BROKER_KILL, FaultKind.BROKER_PAUSE})
"""Faults with a duration."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a storm."""

    number: int
    kind: FaultKind
    target: str
    """The name of a role, or `broker-N`."""
    after_step: int
    """The fault waits for this optimizer step in the log."""
    delay_s: float
    """Seconds after that step and after the previous fault."""
    lasts_s: float
    """Seconds until it is undone; 0 for a fault that ends by itself."""


@dataclass(frozen=True, slots=True)
class Share:
    """The number, the targets and the duration of one kind of fault."""

    kind: FaultKind
    count: int
    targets: Sequence[str]
    seconds: tuple[float, float] = (2.0, 12.0)
    """Shortest and longest duration, for the kinds that last."""


@dataclass(frozen=True, slots=True)
class Storm:
    """Faults in order, with the seed that they were drawn from."""

    seed: int
    faults: tuple[Fault, ...]

    def save(self, path: Path) -> None:
        """Write the storm as JSON."""
        document = {"seed": self.seed, "faults": [asdict(fault) for fault in self.faults]}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> Storm:
        """Read a file that `save` wrote. Raises ValueError if it contains no storm."""
        try:
            document = json.loads(path.read_text("utf-8"))
            faults = [Fault(**{**each, "kind": FaultKind(each["kind"])}) for each in document["faults"]]
            return cls(int(document["seed"]), tuple(faults))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no storm: {error!r}; --plan takes a file that an earlier run wrote"
            ) from error


def draw(seed: int, shares: Sequence[Share], *, last_step: int, gap_s: float) -> Storm:
    """Return the storm of a seed.

    Args:
        last_step: the faults are spread evenly over the steps from 1 to this one. Each waits for its step: before the
            first step, the run has nothing to lose.
        gap_s: longest delay of a fault after its step and after the previous fault, in seconds.

    Raises ValueError for a share with faults and without targets.
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
    """Count faults by kind and target."""
    found: dict[FaultKind, dict[str, int]] = {}
    for fault in storm.faults:
        targets = found.setdefault(fault.kind, {})
        targets[fault.target] = targets.get(fault.target, 0) + 1
    return found


def _targets(share: Share, chance: random.Random) -> list[str]:
    """Return `share.count` targets; their counts differ by at most one, and those with one more are random."""
    if share.count and not share.targets:
        raise ValueError(f"{share.count} faults of kind {share.kind}, and nobody to bear them")
    rounds = -(-share.count // len(share.targets)) if share.targets else 0
    shuffled = (chance.sample(list(share.targets), len(share.targets)) for _ in range(rounds))
    return list(islice(chain.from_iterable(shuffled), share.count))
