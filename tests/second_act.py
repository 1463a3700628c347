"""Settings that make the demonstration's second act quick, for the tests that run it."""

from __future__ import annotations

QUICK_SECOND_ACT = (
    "run.skip_no_signal=false",
    "feed.eval_tasks=4",
    "feed.eval_during_tasks=4",
    "trainer.online.simulated_groups_per_batch=1",
    "users.ordinary=400",
    "batches.min_members=12",
    "batches.max_wait_s=6",
    "gate.floor=0",
    "gate.bench_rollouts=12",
    "gate.bench_margin=1",
    "gate.min_users=3",
    "gate.margin=1",
)
"""Small batches, and a gate whose margin is so wide that little evidence is enough for a decision."""
