"""Figures of learning from users, from real runs of `tidemill demo --act two`: satisfaction, its control, latency.

All runs start from one model: `--model DIRECTORY`, or one that the first run makes (mid-training and the first act).
Each run is one process tree with its own Kafka, vLLM and data directory; runs follow one another. One JSON line per
figure, with the values needed to interpret it: seed, control, answers on which a rate is based, learning rate.

    python tests/bench/bench_real_time.py learning --seeds 0 1 2
    python tests/bench/bench_real_time.py control --seeds 0
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

from measuring import demonstration, say

Summary = dict[str, Any]

KEPT = (
    "seed", "thumbs_shuffled", "satisfaction_before", "satisfaction_after", "satisfaction_answers",
    "held_out_before_online", "held_out_after_online", "held_out_online_rollouts", "held_out_online_noise",
    "trials_decided", "decided_on_evidence", "evidence_share", "feedback_to_served_s", "feedback_to_everyone_s",
    "online_batches", "promotions", "verdicts", "interactions", "rewarded", "exclusions", "corrections", "votes",
    "learning_rate", "online_fingerprints_equal", "online_seconds", "seconds",
)  # fmt: skip


def learnt_model(options: argparse.Namespace) -> Path:
    """Return the model that the users get: the given one, or the newest anchor of a first act."""
    if options.model is not None:
        return options.model
    model = options.data_dir / "model"
    if not model.exists():
        first = ("--act", "one", "--set", "trainer.publish.anchor_every=5")
        summary = demonstration(options.data_dir, "first-act", *first)
        anchors = Path(summary["data_dir"]).glob("store/*/anchors/main/v*")
        shutil.copytree(max(anchors, key=lambda path: int(path.name[1:])), model)
    return model


def runs(options: argparse.Namespace, name: str, *arguments: str) -> list[Summary]:
    """Run one second act for each seed, from one model."""
    model = learnt_model(options)
    more = ["--act", "two", "--model", str(model), *arguments, *options.demo]
    return [demonstration(options.data_dir, f"{name}-{seed}", "--seed", str(seed), *more) for seed in options.seeds]


def learning(options: argparse.Namespace) -> None:
    """Measure held-out users' satisfaction and the simulated skill, before and after, by seed."""
    summaries = runs(options, "learning")
    for summary in summaries:
        say("satisfaction", **{key: summary[key] for key in KEPT})
    names = ("satisfaction_before", "satisfaction_after", "held_out_before_online", "held_out_after_online")
    by_seed = {name: [summary[name] for summary in summaries] for name in names}
    latency = [summary["feedback_to_served_s"] for summary in summaries]
    say("satisfaction_by_seed", seeds=options.seeds, **by_seed, feedback_to_served_s=latency)


def control(options: argparse.Namespace) -> None:
    """Repeat the run with votes exchanged between users."""
    for summary in runs(options, "control", "--shuffle-thumbs"):
        say("shuffled_thumbs", **{key: summary[key] for key in KEPT})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = {"learning": learning, "control": control}
    parser.add_argument("figure", choices=what)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", type=Path, help="start from this checkpoint instead of making one")
    parser.add_argument("--data-dir", type=Path, default=Path(tempfile.gettempdir()) / "tidemill-bench-real-time")
    parser.add_argument("demo", nargs="*", help="after --: further arguments of `tidemill demo`")
    options = parser.parse_intermixed_args()
    options.data_dir.mkdir(parents=True, exist_ok=True)
    what[options.figure](options)


if __name__ == "__main__":
    main()
