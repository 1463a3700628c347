"""The summary of a demonstration, for a person and for scripts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.compose.demo.people import Satisfaction
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.schemas.clock import to_s


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class OnlineSummary:
    """The results of learning from users. Times in seconds."""

    satisfaction_before: float
    satisfaction_after: float
    satisfaction_answers: int
    """Held-out users' answers from which each of the two rates was computed (the smaller number)."""
    thumbs_shuffled: bool
    feedback_to_served_s: Percentiles
    """From an interaction's newest signal until some users were served a version that learnt from it."""
    feedback_to_everyone_s: Percentiles
    """The same until all users were served one."""
    online_batches: int
    """Batches that a step trained on."""
    online_versions: list[int]
    promoted: list[int]
    """Versions that all users were served, including the first."""
    promotions: int
    """Promotions of versions that learnt from users."""
    verdicts: dict[str, int]
    trials_decided: int
    """Versions whose trial ended with a decision."""
    decided_on_evidence: int
    """Trials that the gate's evidence decided; the others ended at a limit of time or traffic."""
    evidence_share: float
    """`decided_on_evidence` as a share of `trials_decided`; 0 if no trial was decided."""
    interactions: int
    rewarded: int
    exclusions: dict[str, int]
    corrections: int
    votes: int
    held_out_before_online: float
    held_out_after_online: float
    """Success of the last promoted version on held-out tasks."""
    held_out_online_rollouts: int
    """Held-out rollouts from which each of the two rates was computed (the smaller number)."""
    held_out_online_noise: float
    """A smaller difference of the two rates is within their 95 % interval."""
    online_fingerprints_equal: bool
    online_seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a demonstration. Times in the unit of their name."""

    run_id: str
    seed: int
    environments: list[str]
    held_out_before: float
    held_out_after: float
    held_out_rollouts: int
    """Rollouts from which each of the two rates was computed (the smaller number)."""
    held_out: list[dict[str, float]]
    """The curve: version, rate, rollouts, and the seconds of loop and the training rollouts before it."""
    rewards_shuffled: bool
    learning_rate: float
    """The greatest learning rate of the run's steps."""
    versions: int
    max_policy_lag: int
    policy_lag_bound: int
    policy_lag_tokens: dict[int, int]
    rollouts_spanning_versions: int
    rollouts_trained: int
    groups: int
    rollouts_per_s: float
    """Training rollouts in the groups of all steps, per second of training; evaluations are not counted."""
    refusals: int
    delta_bytes: Percentiles
    delta_density: Percentiles
    """Changed elements as a share of all; it depends on the learning rate."""
    pause_ms: Percentiles
    decode_step_ms: Percentiles
    step_to_served_s: Percentiles
    fingerprints_equal: bool
    loop_seconds: float
    """From the first weight version to the last proof."""
    seconds: float
    data_dir: Path
    online: OnlineSummary | None = None
    """None if there were no users."""
    audit_sound: bool = False
    """Whether every check of `tidemill audit --complete` passed."""
    audit: str = "not audited"
    """The verdict of the audit."""


def percentiles(values: list[float]) -> Percentiles:
    """Return the median and the 95th percentile; zeros if there are no values."""
    if not values:
        return Percentiles(0.0, 0.0)
    return Percentiles(*(round(float(v), 6) for v in np.percentile(values, [50, 95])))


def summarise(state: LoopState, *, seed: int, bound: int, seconds: float, data_dir: Path) -> Summary:
    held_out = state.held_out()
    first, last = (held_out[0], held_out[-1]) if held_out else (None, None)
    updates = state.updates()
    deltas = [m for m in state.manifests.values() if m.parent is not None]
    begins = [manifest.published_at for manifest in state.manifests.values()]
    ends = [ack.at for ack in state.served.values()]
    members = state.trained_members()
    lag = state.lag()
    return Summary(
        run_id=state.run_id,
        seed=seed,
        environments=sorted(state.environments),
        held_out_before=round(first.rate, 4) if first else 0.0,
        held_out_after=round(last.rate, 4) if last else 0.0,
        held_out_rollouts=min(first.rollouts, last.rollouts) if first and last else 0,
        held_out=[
            {
                "version": each.version,
                "rate": round(each.rate, 4),
                "rollouts": each.rollouts,
                "seconds": round(to_s(state.manifests[each.version].published_at - min(begins)), 1),
                "trained": state.taken_before(each.version),
            }
            for each in held_out
            if each.version in state.manifests
        ],
        rewards_shuffled=any(group.rewards_shuffled for group in state.train_groups()),
        learning_rate=max((m.learning_rate for m in deltas), default=0.0),
        versions=state.version,
        max_policy_lag=max(lag, default=0),
        policy_lag_bound=bound,
        policy_lag_tokens=dict(sorted(lag.items())),
        rollouts_spanning_versions=state.spanning(),
        rollouts_trained=len(members),
        groups=len(state.train_groups()),
        rollouts_per_s=round(state.rollouts_per_s(), 3),
        refusals=state.refusals,
        delta_bytes=percentiles([float(m.delta_bytes) for m in deltas]),
        delta_density=percentiles([m.n_changed / m.n_elements for m in deltas]),
        pause_ms=percentiles([ack.pause_ms for ack in updates]),
        decode_step_ms=percentiles([ack.decode_step_ms for ack in updates if ack.decode_step_ms > 0]),
        step_to_served_s=percentiles([ack.step_to_served_ms / 1000 for ack in updates]),
        fingerprints_equal=state.fingerprints_equal(),
        loop_seconds=round(to_s(max(ends) - min(begins)), 1) if begins and ends else 0.0,
        seconds=round(seconds, 1),
        data_dir=data_dir,
    )


def summarise_online(
    online: OnlineState,
    *,
    before: Satisfaction | None,
    after: Satisfaction | None,
    thumbs_shuffled: bool,
    seconds: float,
) -> OnlineSummary:
    """Return the summary of learning from users; `before` and `after` are the opinions of held-out users."""
    promoted = online.branch.served
    skill = {each.version: each for each in online.loop.held_out()}
    first, last = (skill.get(promoted[0]), skill.get(promoted[-1])) if promoted else (None, None)
    variance = 0.0
    for each in (first, last):
        if each is not None:
            # With two successes and two failures added, so that it is also correct for rates near 0 and 1.
            rate = (each.successes + 2) / (each.rollouts + 4)
            variance += rate * (1.0 - rate) / (each.rollouts + 4)
    return OnlineSummary(
        satisfaction_before=round(before.rate, 4) if before else 0.0,
        satisfaction_after=round(after.rate, 4) if after else 0.0,
        satisfaction_answers=min(before.answers, after.answers) if before and after else 0,
        thumbs_shuffled=thumbs_shuffled,
        feedback_to_served_s=percentiles(online.to_a_share_s()),
        feedback_to_everyone_s=percentiles(online.to_everyone_s()),
        online_batches=online.learnt_batches,
        online_versions=online.learnt_versions,
        promoted=promoted,
        promotions=len(online.branch.decided.intersection(online.learnt_versions, promoted)),
        verdicts=online.verdicts(),
        trials_decided=online.trials_decided,
        decided_on_evidence=online.decided_on_evidence,
        evidence_share=round(online.decided_on_evidence / max(1, online.trials_decided), 4),
        interactions=len(online.interactions),
        rewarded=online.rewarded,
        exclusions=online.exclusions(),
        corrections=online.corrections,
        votes=online.votes,
        held_out_before_online=round(first.rate, 4) if first else 0.0,
        held_out_after_online=round(last.rate, 4) if last else 0.0,
        held_out_online_rollouts=min(first.rollouts, last.rollouts) if first and last else 0,
        held_out_online_noise=round(1.96 * math.sqrt(variance), 4),
        online_fingerprints_equal=online.fingerprints_equal(),
        online_seconds=round(seconds, 1),
    )
