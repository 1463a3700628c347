"""Figures of the whole loop, from real runs of `tidemill demo --act one`: learning, its control, and learning with each
serving format.

Each run is one process tree with its own Kafka, vLLM and data directory; runs follow one another. One JSON line per
figure, with the values needed to interpret it: seeds, learning rate, control, rollouts on which a rate is based.

    python tests/bench/bench_loop.py learning --seeds 0 1 2
    python tests/bench/bench_loop.py control --seeds 0
    python tests/bench/bench_loop.py formats --seeds 0 --model DIR
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from measuring import demonstration, say

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import ask
from tidemill.trainer.choices import ServingFormat

Summary = dict[str, Any]

KEPT = (
    "seed", "rewards_shuffled", "learning_rate", "held_out_before", "held_out_after", "held_out_rollouts", "versions",
    "max_policy_lag", "policy_lag_bound", "policy_lag_tokens", "rollouts_spanning_versions", "rollouts_trained",
    "pause_ms", "decode_step_ms", "step_to_served_s", "delta_bytes", "delta_density", "refusals", "fingerprints_equal",
    "loop_seconds", "seconds",
)  # fmt: skip


def kept(summary: Summary) -> Summary:
    """Return the part of a summary that a figure prints."""
    return {key: summary[key] for key in KEPT}


def learning(options: argparse.Namespace) -> None:
    """Measure held-out success before and after, by seed."""
    summaries = [run(options, f"seed-{seed}", seed) for seed in options.seeds]
    for summary in summaries:
        say("held_out_success", **kept(summary), **query(summary, PROCESSES))
    rates = {key: [s[key] for s in summaries] for key in ("held_out_before", "held_out_after", "loop_seconds")}
    say("held_out_success_by_seed", seeds=len(summaries), **rates)


def control(options: argparse.Namespace) -> None:
    """Repeat the run with rewards permuted within each group."""
    for seed in options.seeds:
        say("shuffled_control", **kept(run(options, f"shuffled-{seed}", seed, "--shuffle-rewards")))


def run(options: argparse.Namespace, name: str, seed: int, *arguments: str) -> Summary:
    """Do one run with the shared options."""
    steps = [] if options.steps is None else ["--steps", str(options.steps)]
    model = [] if options.model is None else ["--model", str(options.model)]
    return demonstration(options.data_dir, name, "--act", "one", "--seed", str(seed), *steps, *model, *arguments)


def formats(options: argparse.Namespace) -> None:
    """Measure learning with the serving weights in each format: the reward and the mismatch (k3) of every step."""
    for form in options.formats:
        for seed in options.seeds:
            summary = run(options, f"{form}-{seed}", seed, "--set", f"trainer.serving_format={form}")
            say("reward_curve", serving_format=form, **kept(summary), **query(summary, CURVE))


def query(summary: Summary, sql: str) -> dict[str, Any]:
    """Return the first row of a query on a run's tables."""
    answer = ask(SinkSettings(path=str(Path(summary["data_dir"]) / "clickhouse")), sql)
    return dict(zip(answer.columns, answer.rows[0], strict=True))


PROCESSES = """
SELECT countDistinct(replica_id) AS replicas, countDistinct(replica_id, pid, incarnation) AS replica_processes,
    countIf(status = 'proved') AS proofs, countIf(fingerprint != expected_fingerprint) AS unequal
FROM weights_acks
"""

CURVE = """
WITH steps AS (SELECT * FROM train_steps ORDER BY _offset LIMIT 1 BY run_id, step)
SELECT
    arrayMap(x -> round(x.2, 4), arraySort(groupArray((step, metrics['reward'])))) AS rewards,
    arrayMap(x -> round(x.2, 6), arraySort(groupArray((step, metrics['mismatch/k3'])))) AS k3
FROM steps
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {"learning": learning, "control": control, "formats": formats}
    parser.add_argument("figure", choices=what)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--formats", type=ServingFormat, nargs="+", default=list(ServingFormat), metavar="FORMAT",
                        help=f"serving formats of the figure formats: {', '.join(ServingFormat)}")  # fmt: skip
    parser.add_argument("--model", type=Path, help="start from this checkpoint instead of mid-training one")
    parser.add_argument("--data-dir", type=Path, default=Path(tempfile.gettempdir()) / "tidemill-bench")
    options = parser.parse_args()
    options.data_dir.mkdir(parents=True, exist_ok=True)
    what[options.figure](options)


if __name__ == "__main__":
    main()
