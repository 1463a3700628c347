"""A step taken apart on disk: its inputs, the weights that it starts from, and what it reports.

step-00000007/
  step.json       the record of the step
  groups.jsonl    one trained group a line, with its rollouts: tokens, masks, logprobs, rewards
  online.json     the online batch and its interactions, where there was one
  weights/        the weights before the step, as a Hugging Face checkpoint
  metrics.json    the step's metrics, recorded and replayed
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tidemill.kernels.weights.anchor import write_anchor
from tidemill.schemas.records import Interaction, Rollout, Segment
from tidemill.trainer.batch_builder import StepBatch
from tidemill.trainer.replay.steps import Halt, ReplayedStep
from tidemill.trainer.trainable import TrainableGroup


def write_halt(root: Path, halt: Halt) -> Path:
    """Write what a step is about to be made of into a folder of its own below `root`; the folder.

    Raises FileExistsError when the folder holds something.
    """
    folder = root / f"step-{halt.record.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give another --out")
    _write_json(folder / "step.json", dataclasses.asdict(halt.record))
    _write_inputs(folder, halt.batch)
    write_anchor(str((folder / "weights").absolute()), halt.base_model, halt.weights)
    return folder


def write_metrics(folder: Path, made: ReplayedStep) -> None:
    """Write what a step reported then and now."""
    document = {
        "recorded": {"fingerprint": made.record.fingerprint, **made.record.metrics},
        "replayed": {"fingerprint": made.fingerprint, **made.metrics},
    }
    _write_json(folder / "metrics.json", document)


def _write_inputs(folder: Path, batch: StepBatch) -> None:
    lines = [json.dumps(_group(group)) for group in batch.groups]
    (folder / "groups.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    if batch.online is not None:
        members = [_trajectory(interaction) for interaction in batch.online.interactions]
        document = {**dataclasses.asdict(batch.online.batch), "interactions": members}
        _write_json(folder / "online.json", document)


def _group(group: TrainableGroup) -> dict[str, Any]:
    return {
        "place": dataclasses.asdict(group.place),
        "group": dataclasses.asdict(group.group),
        "rollouts": [_trajectory(rollout) for rollout in group.rollouts],
    }


def _trajectory(sampled: Rollout | Interaction) -> dict[str, Any]:
    fields = {f.name: getattr(sampled, f.name) for f in dataclasses.fields(sampled) if f.name != "segments"}
    nested = {
        "rewards": [dataclasses.asdict(part) for part in fields.pop("rewards", [])],
        "claim": None if (claim := fields.pop("claim")) is None else dataclasses.asdict(claim),
    }
    return {**fields, **nested, "segments": [_segment(segment) for segment in sampled.segments]}


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "token_ids": segment.ids().tolist(),
        "loss_mask": segment.mask().tolist(),
        "logprobs": segment.sampled_logprobs().tolist(),
        "spans": [dataclasses.asdict(span) for span in segment.spans],
    }


def _write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
