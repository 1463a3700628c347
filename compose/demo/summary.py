"""The summary of a demonstration, for a person and for scripts. Times are in the unit of their name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.compose.demo.people import Satisfaction
from tidemill.compose.demo.state import LoopState, OnlineState
from tidemill.schemas.clock import to_s

Percentiles = dict[str, float]
"""The median, `p50`, and the 95th percentile, `p95`."""


def percentiles(values: list[float]) -> Percentiles:
    """Return the median and the 95th percentile; zeros if there are no values."""
    if not values:
        return {"p50": 0.0, "p95": 0.0}
    return {name: round(float(v), 6) for name, v in zip(("p50", "p95"), np.percentile(values, [50, 95]), strict=True)}


Summary = dict[str, Any]


def summarise(state: LoopState, *, seed: int, bound: int, data_dir: Path) -> Summary:
    """Return the results of the simulated loop."""
    held_out = state.held_out()
    first, last = (held_out[0], held_out[-1]) if held_out else (None, None)
    updates = state.updates()
    deltas = [m for m in state.manifests.values() if m.parent is not None]
    begins = [manifest.published_at for manifest in state.manifests.values()]
    ends = [ack.at for ack in state.served.values()]
    lag = state.lag()
    return {
        "run_id": state.run_id,
        "seed": seed,
        "environments": sorted(state.environments),
        "held_out_before": round(first.rate, 4) if first else 0.0,
        "held_out_after": round(last.rate, 4) if last else 0.0,
        # Rollouts from which each of the two rates was computed (the smaller number).
        "held_out_rollouts": min(first.rollouts, last.rollouts) if first and last else 0,
        # The curve, with the seconds of loop and the training rollouts before each version.
        "held_out": [
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
        "rewards_shuffled": any(group.rewards_shuffled for group in state.train_groups()),
        # The greatest of the run's steps.
        "learning_rate": max((m.learning_rate for m in deltas), default=0.0),
        "versions": state.version,
        "max_policy_lag": max(lag, default=0),
        "policy_lag_bound": bound,
        "policy_lag_tokens": dict(sorted(lag.items())),
        "rollouts_spanning_versions": state.spanning(),
        "rollouts_trained": len(state.trained_members()),
        "groups": len(state.train_groups()),
        # Training rollouts in the groups of all steps, per second of training; evaluations are not counted.
        "rollouts_per_s": round(state.rollouts_per_s(), 3),
        "refusals": state.refusals,
        "delta_bytes": percentiles([float(m.delta_bytes) for m in deltas]),
        # Changed elements as a share of all; it depends on the learning rate.
        "delta_density": percentiles([m.n_changed / m.n_elements for m in deltas]),
        "pause_ms": percentiles([ack.pause_ms for ack in updates]),
        "decode_step_ms": percentiles([ack.decode_step_ms for ack in updates if ack.decode_step_ms > 0]),
        "step_to_served_s": percentiles([ack.step_to_served_ms / 1000 for ack in updates]),
        "fingerprints_equal": state.fingerprints_equal(),
        # From the first weight version to the last proof.
        "loop_seconds": round(to_s(max(ends) - min(begins)), 1) if begins and ends else 0.0,
        "data_dir": str(data_dir),
    }


def summarise_online(
    online: OnlineState,
    *,
    before: Satisfaction | None,
    after: Satisfaction | None,
    thumbs_shuffled: bool,
    seconds: float,
) -> Summary:
    """Return the results of learning from users; `before` and `after` are the opinions of held-out users."""
    promoted = online.branch.served
    skill = {each.version: each for each in online.loop.held_out()}
    first, last = (skill.get(promoted[0]), skill.get(promoted[-1])) if promoted else (None, None)
    variance = 0.0
    for each in (first, last):
        if each is not None:
            # With two successes and two failures added, so that it is also correct for rates near 0 and 1.
            rate = (each.successes + 2) / (each.rollouts + 4)
            variance += rate * (1.0 - rate) / (each.rollouts + 4)
    return {
        "satisfaction_before": round(before.rate, 4) if before else 0.0,
        "satisfaction_after": round(after.rate, 4) if after else 0.0,
        # Held-out users' answers from which each of the two rates was computed (the smaller number).
        "satisfaction_answers": min(before.answers, after.answers) if before and after else 0,
        "thumbs_shuffled": thumbs_shuffled,
        # From an interaction's newest signal until some, or all, users were served a version that learnt from it.
        "feedback_to_served_s": percentiles(online.to_a_share_s()),
        "feedback_to_everyone_s": percentiles(online.to_everyone_s()),
        # Batches that a step trained on.
        "online_batches": online.learnt_batches,
        "online_versions": online.learnt_versions,
        # Versions that all users were served, including the first; then, those of them that learnt from users.
        "promoted": promoted,
        "promotions": len(online.branch.decided.intersection(online.learnt_versions, promoted)),
        "verdicts": online.verdicts(),
        # Versions whose trial ended with a decision; the gate's evidence, or a limit of time or traffic, decided.
        "trials_decided": online.trials_decided,
        "decided_on_evidence": online.decided_on_evidence,
        "evidence_share": round(online.decided_on_evidence / max(1, online.trials_decided), 4),
        "interactions": len(online.interactions),
        "rewarded": online.rewarded,
        "exclusions": online.exclusions(),
        "corrections": online.corrections,
        "votes": online.votes,
        # Success on held-out tasks of the first and of the last promoted version, with the number of rollouts of each
        # (the smaller one), and the half width of the 95 % interval of the difference.
        "held_out_before_online": round(first.rate, 4) if first else 0.0,
        "held_out_after_online": round(last.rate, 4) if last else 0.0,
        "held_out_online_rollouts": min(first.rollouts, last.rollouts) if first and last else 0,
        "held_out_online_noise": round(1.96 * math.sqrt(variance), 4),
        "online_fingerprints_equal": online.fingerprints_equal(),
        "online_seconds": round(seconds, 1),
    }
