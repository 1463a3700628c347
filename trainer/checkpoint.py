"""Checkpoints: one safetensors object a step, from which training goes on bit for bit.

The object holds the master weights and the optimizer's moments; its header holds where the log is used up. It appears
whole or not at all: it is written under another name and then moved, and only its final name is ever read.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tidemill.trainer.endings import TopicProgress

HEADER = "tidemill"
NAME = re.compile(r"step-(\d{8})\.safetensors")


class TrainerCheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a checkpoint says beside its tensors."""

    run_id: str
    branch: str
    step: int
    version: int
    fingerprint: str
    """Of the serving view after the step, hexadecimal."""
    config_hash: str
    progress: TopicProgress
    """Of `groups`."""
    online: TopicProgress = field(default_factory=TopicProgress)
    """Of `online-batches`."""


class CheckpointStore:
    """The checkpoints of one run and branch below `root` (a directory or fsspec URL)."""

    def __init__(self, root: str, run_id: str, branch: str, keep: int) -> None:
        self._filesystem, path = fsspec.core.url_to_fs(root)
        self._folder = f"{path.rstrip('/')}/{run_id}/checkpoints/{branch}"
        self._keep = keep

    def write(self, state: CheckpointState, tensors: Mapping[str, Tensor], pinned: Collection[int] = ()) -> str:
        """Store one checkpoint, drop the oldest beyond `keep` but for the steps in `pinned`; its path."""
        header = {HEADER: json.dumps(dataclasses.asdict(state))}
        payload = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header)
        self._filesystem.makedirs(self._folder, exist_ok=True)
        path = self._path(state.step)
        self._filesystem.pipe_file(f"{path}.partial", payload)
        self._filesystem.mv(f"{path}.partial", path)
        for old in self.steps()[: -self._keep]:
            if old not in pinned:
                self._filesystem.rm(self._path(old))
        return path

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        if not self._filesystem.isdir(self._folder):
            return []
        self._filesystem.invalidate_cache()
        names = (str(path).rsplit("/", 1)[-1] for path in self._filesystem.ls(self._folder, detail=False))
        return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))

    def newest(self, last_step: int) -> int | None:
        """The newest checkpointed step not after `last_step`; None without one."""
        return max((step for step in self.steps() if step <= last_step), default=None)

    def read(self, step: int) -> tuple[CheckpointState, dict[str, Tensor]]:
        """A checkpoint's state and tensors. Raises CheckpointError when it is damaged."""
        path = self._path(step)
        payload: bytes = self._filesystem.cat_file(path)
        try:
            return _state(_header(payload)), load(payload)
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise TrainerCheckpointError(f"{path} is damaged: {error}; delete it, and an older one is used") from error

    def _path(self, step: int) -> str:
        return f"{self._folder}/step-{step:08d}.safetensors"


def _header(payload: bytes) -> dict[str, Any]:
    size = int.from_bytes(payload[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"][HEADER])
    return header


def _state(header: dict[str, Any]) -> CheckpointState:
    # Checkpoints of runs before there were online batches do not speak of them.
    progress, online = header.pop("progress"), header.pop("online", None)
    return CheckpointState(
        **header, progress=_progress(progress), online=TopicProgress() if online is None else _progress(online)
    )


def _progress(fields: dict[str, Any]) -> TopicProgress:
    return TopicProgress(
        next_offsets={int(partition): offset for partition, offset in fields["next_offsets"].items()},
        ended_above={int(partition): offsets for partition, offsets in fields["ended_above"].items()},
        remembered=fields["remembered"],
    )
