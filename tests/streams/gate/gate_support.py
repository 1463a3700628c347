"""Records that a gate reads, as a product and its replicas write them, and distributions to compare results with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from tests.records import build
from tidemill.schemas.config import RunSettings
from tidemill.schemas.records import (
    AckStatus,
    Anchor,
    GateDecision,
    GateVerdict,
    Group,
    GroupMember,
    Manifest,
    Mode,
    Outcome,
    Record,
    RolloutStatus,
    WeightAck,
)
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.controller import GateController
from tidemill.streams.gate.sequential import BETS

RUN = RunSettings(run_id="r")
SECOND = 1_000_000
START = 1_000 * SECOND
QUICK = GateSettings(
    outcomes_per_user=1, min_users=10, bench_rollouts=16, share=0.5, settle_s=1.0, bench_seconds=60.0, max_seconds=1e6,
    watch_seconds=1e6,
)  # fmt: skip


def manifest(version: int, run: RunSettings = RUN) -> Manifest:
    """Return the manifest of a version whose parent is the previous one; version 0 has an anchor."""
    return build(Manifest, run_id=run.run_id, branch=run.branch, version=version, learning_rate=1e-5, n_elements=1,
                 n_changed=1, delta_bytes=1, fingerprint="f", anchor=Anchor("a", 1) if version == 0 else None,
                 trained_at=version, published_at=version)  # fmt: skip


def bench(version: int, successes: int, rollouts: int = 16, name: str = "", run: RunSettings = RUN) -> Group:
    """Return a held-out group that one version sampled."""
    members = [
        GroupMember(
            rollout_id=f"{name}{version}-{number}", topic="rollouts", partition=0, offset=number,
            status=RolloutStatus.COMPLETED, reward=float(number < successes), advantage=0.0, success=number < successes,
            sampled_tokens=10, version_min=version, version_max=version,
        )
        for number in range(rollouts)
    ]  # fmt: skip
    group = f"{run.run_id}/eval-during/v{version}/{name}"
    return build(Group, group_id=group, run_id=run.run_id, mode=Mode.EVAL, expected_size=rollouts, members=members,
                 mean_reward=0.0)  # fmt: skip


def outcome(number: int, arm: str, version: int, at: int, reward: float | None, user: str = "", **fields) -> Outcome:
    """Return the outcome of one interaction. Without `user`, each interaction has a different user."""
    made = build(Outcome, interaction_id=f"i{number}", run_id=RUN.run_id, branch=RUN.branch,
                 user_id=user or f"u{number}", arm=arm, topic="interactions", offset=number, version_min=version,
                 version_max=version, sampled_tokens=40, latency_ms=900.0, reward=reward,
                 exclusion="" if reward is not None else "no_signal", observed={"edit_made": 1.0}, served_at=at,
                 feedback_at=at, closed_at=at)  # fmt: skip
    return replace(made, **fields)


def ack(replica: str, version: int, at: int, run: RunSettings = RUN, status: AckStatus = AckStatus.PROVED) -> WeightAck:
    """Return a replica's acknowledgement of a version."""
    return build(WeightAck, replica_id=replica, run_id=run.run_id, branch=run.branch, incarnation="i", version=version,
                 status=status, at=at)  # fmt: skip


def said(verdict: GateVerdict, version: int | None, at: int, by: str = "ada", reason: str = "seen") -> GateDecision:
    """Return a person's decision."""
    return GateDecision(RUN.run_id, RUN.branch, verdict, version, reason, by, {}, at)


class Product:
    """A gate, its log, and a product that serves its users the versions that the gate chose."""

    def __init__(self, gate: GateSettings = QUICK, seed: int = 0) -> None:
        self.gate = gate
        self.keeper = GateController(RUN, gate, 1.0)
        self.log: list[tuple[Record, int]] = []
        self.now = START
        self.random = np.random.default_rng(seed)
        self._interactions = 0

    @property
    def decisions(self) -> list[tuple[str, int | None]]:
        """Verdicts and versions in the log."""
        return [(r.verdict.value, r.version) for r, _ in self.log if isinstance(r, GateDecision)]

    def last(self) -> GateDecision:
        """The newest decision."""
        return next(record for record, _ in reversed(self.log) if isinstance(record, GateDecision))

    def write(self, record: Record, seconds: float = 0.001) -> list[GateDecision]:
        """Append a record and the decisions that follow from it. Returns these decisions."""
        self.now += int(seconds * SECOND)
        return self._append(record, self.now)

    def _append(self, record: Record, at: int) -> list[GateDecision]:
        self.log.append((record, at))
        made = []
        due = self.keeper.observe(record, at)
        while due:
            assert len(due) == 1 and len(made) < 10, "a gate that writes for ever"
            made += due
            self.log.append((due[0], due[0].at))
            due = self.keeper.observe(due[0], due[0].at)
        return made

    def publish(self, *versions: int) -> None:
        for version in versions:
            self.write(manifest(version))

    def serve(self, arm: str, version: int, reward: float | None, user: str = "", **fields) -> list[GateDecision]:
        """Write the outcome of one more interaction. Returns the decisions that follow."""
        self._interactions += 1
        return self.write(outcome(self._interactions, arm, version, self.now + 1_000, reward, user, **fields), 0.01)

    def traffic(self, candidate: float, baseline: float, versions: Sequence[int], most: int = 2_000, **fields) -> int:
        """Serve users in alternating arms, thumbs up with these chances, until a decision. Returns the user count."""
        for count in range(most):
            arm, chance, version = (
                ("canary", candidate, versions[0]) if count % 2 else ("stable", baseline, versions[1])
            )
            reward = 1.0 if self.random.random() < chance else -1.0
            if self.serve(arm, version, reward, **(fields if arm == "canary" else {})):
                return count + 1
        return most

    def start(self, baseline_successes: int = 12, candidate_successes: int = 12) -> None:
        """Publish baseline 0 and candidate 1, which passes its bench; its comparison starts."""
        self.publish(0)
        self.write(bench(0, baseline_successes))
        self.publish(1)
        self.write(bench(1, candidate_successes))


def exact_first_passage(
    up: float, down: float, bound: float, blocks: int, alpha: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute when a `Capital` against "the mean is at most `bound`" first passes, for observations of +1, -1 and 0.

    The capital depends only on the counts of +1 and -1, so the paths over counts can be summed exactly.

    Returns (f8[blocks + 1] chance to have passed by each block, f8[blocks + 1] chance to pass at that block).
    """
    bets = np.array(BETS) / (1.0 + bound)
    plus, minus, zero = np.log1p(bets * (1 - bound)), np.log1p(bets * (-1 - bound)), np.log1p(-bets * bound)
    alive = np.ones((1, 1))
    just = np.zeros(blocks + 1)
    for block in range(1, blocks + 1):
        counts = np.arange(block + 1)
        alive = np.pad(alive, ((0, 1), (0, 1)))
        moved = (1 - up - down) * alive
        moved[1:] += up * alive[:-1]
        moved[:, 1:] += down * alive[:, :-1]
        rest = block - counts[:, None] - counts[None, :]
        logs = counts[:, None, None] * plus + counts[None, :, None] * minus + rest[..., None] * zero
        over = np.logaddexp.reduce(logs, axis=2) - math.log(len(BETS)) >= -math.log(alpha)
        just[block] = moved[over].sum()
        alive = np.where(over, 0.0, moved)
    return np.cumsum(just), just


def peeked_t_test(candidate: Sequence[float], baseline: Sequence[float], level: float = 1.96, first: int = 10) -> bool:
    """Whether a fixed-horizon two-sample test, evaluated after every observation, ever reports a difference."""
    one, other = np.asarray(candidate), np.asarray(baseline)
    n = np.arange(1, min(len(one), len(other)) + 1)
    one, other = one[: len(n)], other[: len(n)]
    means = np.cumsum(one) / n, np.cumsum(other) / n
    spreads = (np.cumsum(a * a) / n - m * m for a, m in zip((one, other), means, strict=True))
    error = np.sqrt(np.maximum(sum(spreads), 1e-12) / n)
    return bool((np.abs(means[0] - means[1]) / error > level)[first:].any())


def arrivals(share: float, random: np.random.Generator) -> Iterator[int]:
    """Return the arms of users in the order of arrival: 0 the candidate's, 1 the baseline's."""
    while True:
        yield int(random.random() >= share)


def most_observations(law: Iterable[tuple[float, float]], bound: float, alpha: float) -> float:
    """Bound the expected number of observations until evidence of level `alpha` that the mean is above `bound`.

    By Wald's identity the best single bet l needs log(n_bets / alpha) / E[log(1 + l * (x - m))] observations on average
    to bring the mixture above 1/alpha without the other bets, up to its last gain; the other bets can only help.

    Args:
        law: the distribution of the observations, (value, probability).
        bound: the mean that the bets are against.

    Returns infinity if no bet grows.
    """
    known = list(law)
    rates = (
        math.fsum(chance * math.log1p(bet / (1.0 + bound) * (value - bound)) for value, chance in known) for bet in BETS
    )
    best = max(rates)
    return math.log(len(BETS) / alpha) / best if best > 0 else math.inf
