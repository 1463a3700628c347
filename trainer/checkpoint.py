"""Checkpoints: safetensors files of a step, from which training goes on bit for bit, on any number of ranks.

A file holds the master weights and the optimizer's moments; its header holds where the log is used up. With several
ranks each writes a file with its own rows of them, and only the first rank's has that header: the rows of all files,
one after the other, are the whole tensors. A checkpoint appears whole or not at all: a file is written under another
name and then moved, the first rank's as the last one, and without that there is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import fsspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tidemill.kernels.weights.bits import as_weight
from tidemill.kernels.weights.checkpoint import file_pieces
from tidemill.kernels.weights.ranks import Ranks, SingleRank
from tidemill.trainer.trainable import TopicProgress

HEADER = "tidemill"
NAME = re.compile(r"step-(\d{8})\.safetensors")
OTHER_RANKS = re.compile(r"step-(\d{8})\.rank-\d+-of-\d+\.safetensors")

Rows = Mapping[str, tuple[int, int]]
"""Of each weight that this rank has rows of: the first one, and the one after the last."""


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

    def write(
        self,
        state: CheckpointState,
        tensors: Mapping[str, Tensor],
        pinned: Collection[int] = (),
        ranks: Ranks | None = None,
    ) -> str:
        """Store one checkpoint, drop the oldest beyond `keep` but for the steps in `pinned`; its path.

        Args:
            tensors: under `kind/name`: the whole ones, or of several `ranks`, which all call this, the rank's own rows.
        """
        ranks = ranks or SingleRank()
        parts = {} if ranks.size == 1 else {"ranks": ranks.size}
        header = {HEADER: json.dumps({**dataclasses.asdict(state), **parts})}
        path = self._path(state.step, ranks.rank, ranks.size)
        self._filesystem.makedirs(self._folder, exist_ok=True)
        ranks.gather(lambda: None if ranks.is_first else self._put(path, tensors, {}))
        ranks.on_first(lambda: self._put(path, tensors, header))
        ranks.on_first(lambda: self._drop(pinned))
        return path

    def _put(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write one file from where the tensors are: as one value it would take as much memory again."""
        with self._filesystem.open(f"{path}.partial", "wb") as file:
            for piece in file_pieces({name: as_weight(name, tensor) for name, tensor in tensors.items()}, metadata):
                file.write(piece)
        self._filesystem.mv(f"{path}.partial", path)

    def _drop(self, pinned: Collection[int]) -> None:
        for old in self.steps()[: -self._keep]:
            if old not in pinned:
                self._filesystem.rm(self._path(old))
        kept = self.steps()
        for name in self._names():
            # Also of a checkpoint that was not finished.
            if (match := OTHER_RANKS.fullmatch(name)) and int(match[1]) not in kept:
                self._filesystem.rm(f"{self._folder}/{name}")

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending."""
        return sorted(int(match[1]) for name in self._names() if (match := NAME.fullmatch(name)))

    def _names(self) -> list[str]:
        if not self._filesystem.isdir(self._folder):
            return []
        self._filesystem.invalidate_cache()
        return [str(path).rsplit("/", 1)[-1] for path in self._filesystem.ls(self._folder, detail=False)]

    def newest(self, last_step: int) -> int | None:
        """The newest checkpointed step not after `last_step`; None without one."""
        return max((step for step in self.steps() if step <= last_step), default=None)

    def read(self, step: int, rows: Rows | None = None) -> tuple[CheckpointState, dict[str, Tensor]]:
        """A checkpoint's state and tensors, of each weight in `rows` these rows alone.

        Raises TrainerCheckpointError when it is damaged.
        """
        path = self._path(step)
        payload: bytes = self._filesystem.cat_file(path)
        size = int.from_bytes(payload[:8], "little")
        try:
            header = json.loads(json.loads(payload[8 : 8 + size])["__metadata__"][HEADER])
            ranks = header.pop("ranks", 1)
            others = (self._filesystem.cat_file(self._path(step, rank, ranks)) for rank in range(1, ranks))
            # Checkpoints of runs before there were online batches do not speak of them.
            progress, online = _progress(header.pop("progress")), header.pop("online", None)
            online = TopicProgress() if online is None else _progress(online)
            state = CheckpointState(**header, progress=progress, online=online)
            return state, _joined(chain([payload], others), rows or {})
        except (ValueError, KeyError, TypeError, FileNotFoundError, SafetensorError) as error:
            raise TrainerCheckpointError(f"{path} is damaged: {error}; delete it, and an older one is used") from error

    def _path(self, step: int, rank: int = 0, ranks: int = 1) -> str:
        other = f".rank-{rank}-of-{ranks}" if rank else ""
        return f"{self._folder}/step-{step:08d}{other}.safetensors"


def _joined(files: Iterator[bytes], rows: Rows) -> dict[str, Tensor]:
    """The tensors whose rows `files` hold one after the other. One file is held at a time."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    passed: dict[str, int] = defaultdict(int)
    for payload in files:
        for key, part in load(payload).items():
            if not part.ndim:
                found[key] = [part]
                continue
            low, high = rows.get(key.split("/", 1)[1], (0, sys.maxsize))
            own = part[max(low - passed[key], 0) : max(high - passed[key], 0)]
            # A slice would keep the memory of the whole.
            found[key].append(own if len(own) == len(part) else own.clone())
            passed[key] += len(part)
    return {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in found.items()}


def _progress(fields: dict[str, Any]) -> TopicProgress:
    return TopicProgress(
        next_offsets={int(partition): offset for partition, offset in fields["next_offsets"].items()},
        ended_above={int(partition): offsets for partition, offsets in fields["ended_above"].items()},
        remembered=fields["remembered"],
    )
