"""Settings that make the demonstration quick and its clients calm, for the tests that run it."""

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

CALM = ('kafka.client_options={"fetch.wait.max.ms": "500"}', "stream.fetch_wait_ms=500")
"""Longer waits of fetches without records: some thirty consumers with the default of 100 ms keep the broker, and
themselves, busy with empty answers. A record still ends a fetch at once."""
