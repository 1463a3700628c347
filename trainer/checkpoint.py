"""Checkpoints: safetensors files of a step, from which training continues bit for bit, on any number of ranks.

A file contains the master weights and the optimizer's moments; its header contains the progress in the log. With
several ranks, each writes a file with its own rows and the number of the first row of each weight, and only the first
rank's file has the progress: the rows of all files, in the order of these numbers, are the whole tensors. A checkpoint
appears whole or not at all: each file is written under another name and then renamed, the first rank's file last;
without this file there is no checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from os import SEEK_END
from typing import IO, Any

import fsspec
import msgspec
import torch
from torch import Tensor

from tidemill.kernels.weights.bits import as_weight
from tidemill.kernels.weights.checkpoint import LENGTH_SIZE, file_pieces
from tidemill.kernels.weights.ranks import Ranks
from tidemill.trainer.trainable import TopicProgress

HEADER, FIRST_ROWS = "tidemill", "first_rows"
NAME = re.compile(r"step-(\d{8})\.safetensors")
PARTIAL = ".partial"
OTHER_RANKS = re.compile(r"step-(\d{8})\.rank-\d+-of-\d+\.safetensors")

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Rows = Mapping[str, tuple[int, int]]
"""For each weight of which this rank has rows: the first row, and the row after the last."""


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The fields of a checkpoint in addition to its tensors."""

    run_id: str
    branch: str
    step: int
    version: int
    fingerprint: str
    """Fingerprint of the serving view after the step, hexadecimal."""
    config_hash: str
    progress: TopicProgress
    """Progress in `groups`."""
    online: TopicProgress = field(default_factory=TopicProgress)
    """Progress in `online-batches`; missing in checkpoints from before these existed."""


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
        rows: Rows | None = None,
    ) -> str:
        """Store one checkpoint, delete the oldest beyond `keep` except those in `pinned`, and return its path.

        Args:
            tensors: under `kind/name`: whole tensors, or with several `ranks`, which all call this, the rank's rows.
            rows: the rank's rows of each weight; without them, the ranks hold the rows in rank order.
        """
        ranks = ranks or Ranks()
        parts = {} if ranks.size == 1 else {"ranks": ranks.size}
        first_rows = {FIRST_ROWS: json.dumps({name: first for name, (first, _) in rows.items()})} if rows else {}
        header = {HEADER: json.dumps({**dataclasses.asdict(state), **parts}), **first_rows}
        path = self._path(state.step, ranks.rank, ranks.size)
        self._filesystem.makedirs(self._folder, exist_ok=True)
        ranks.gather(lambda: None if ranks.is_first else self._put(path, tensors, first_rows))
        ranks.on_first(lambda: self._put(path, tensors, header))
        ranks.on_first(lambda: self._drop(state.step, pinned))
        return path

    def _put(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write one file in pieces from the tensors' own memory: as one value it would need the same memory again.

        Raises OSError, which names the file.
        """
        try:
            with self._filesystem.open(path + PARTIAL, "wb") as file:
                for piece in file_pieces({name: as_weight(name, tensor) for name, tensor in tensors.items()}, metadata):
                    file.write(piece)
            self._filesystem.mv(path + PARTIAL, path)
        except OSError as error:
            raise OSError(
                f"the checkpoint {path} cannot be written ({error}): make room below store.root, or lower "
                "trainer.keep_checkpoints, and start the trainer again: it goes on from the log"
            ) from error

    def _drop(self, newest: int, pinned: Collection[int]) -> None:
        # Later steps are of another log: a run's numbers only rise, so they do not count as its newest ones.
        for old in [step for step in self.steps() if step <= newest][: -self._keep]:
            if old not in pinned:
                self._filesystem.rm(self._path(old))
        kept = self.steps()
        for name in self._names():
            # Also files of a checkpoint that was interrupted while it was written.
            match = OTHER_RANKS.fullmatch(name)
            if name.endswith(PARTIAL) or (match and int(match[1]) not in kept):
                self._filesystem.rm(f"{self._folder}/{name}")

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        return sorted(int(match[1]) for name in self._names() if (match := NAME.fullmatch(name)))

    def _names(self) -> list[str]:
        if not self._filesystem.isdir(self._folder):
            return []
        self._filesystem.invalidate_cache()
        return [str(path).rsplit("/", 1)[-1] for path in self._filesystem.ls(self._folder, detail=False)]

    def newest(self, last_step: int) -> int | None:
        """Return the newest step with a checkpoint that is not after `last_step`; None if there is none."""
        return max((step for step in self.steps() if step <= last_step), default=None)

    def read(self, step: int, rows: Rows | None = None) -> tuple[CheckpointState, dict[str, Tensor]]:
        """Return a checkpoint's state and tensors; for each weight in `rows`, only these rows.

        Raises RuntimeError if it is damaged.
        """
        path = self._path(step)
        try:
            with self._filesystem.open(path, "rb") as file:
                header = _header(file)["__metadata__"][HEADER]
            state, ranks = msgspec.json.decode(header, type=CheckpointState), json.loads(header).get("ranks", 1)
            return state, self._joined([self._path(step, rank, ranks) for rank in range(ranks)], rows or {})
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise RuntimeError(f"{path} is damaged: {error}; delete it, and an older one is used") from error

    def _joined(self, paths: Iterable[str], rows: Rows) -> dict[str, Tensor]:
        """Read and concatenate the rows of the tensors in the files; only the wanted rows are read."""
        found: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        passed: dict[str, int] = defaultdict(int)
        for path in paths:
            with self._filesystem.open(path, "rb") as file:
                tensors = _header(file)
                start = file.tell()
                # Checkpoints from before the experts could be divided have the rows in rank order.
                first_rows = json.loads(tensors.pop("__metadata__").get(FIRST_ROWS, "{}"))
                for key, entry in tensors.items():
                    shape, dtype, begin = entry["shape"], _TYPES[entry["dtype"]], start + entry["data_offsets"][0]
                    before = first_rows.get(key.split("/", 1)[1], passed[key])
                    if shape:
                        n = shape[0]
                        passed[key] += n
                        own = rows.get(key.split("/", 1)[1], (0, sys.maxsize))
                        first, end = (min(max(at - before, 0), n) for at in own)
                        begin += first * prod(shape[1:]) * dtype.itemsize
                        shape = [end - first, *shape[1:]]
                    found[key].append((before, _read(file, begin, torch.empty(shape, dtype=dtype))))
        ordered = {key: [part for _, part in sorted(parts, key=itemgetter(0))] for key, parts in found.items()}
        held = {key: [part for part in parts if part.numel()] or parts for key, parts in ordered.items()}
        return {key: torch.cat(parts) if parts[0].ndim and len(parts) > 1 else parts[0] for key, parts in held.items()}

    def _path(self, step: int, rank: int = 0, ranks: int = 1) -> str:
        other = f".rank-{rank}-of-{ranks}" if rank else ""
        return f"{self._folder}/step-{step:08d}{other}.safetensors"


def _header(file: IO[bytes]) -> dict[str, Any]:
    """Read the header of a safetensors file. Raises ValueError if the file is too short for it."""
    end = file.seek(0, SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(LENGTH_SIZE), "little")
    if length > end:
        raise ValueError(f"it has {end} bytes, and its header should have {length}")
    header: dict[str, Any] = json.loads(file.read(length))
    return header


def _read(file: IO[bytes], begin: int, into: Tensor) -> Tensor:
    """Fill a tensor from byte `begin` on, and return it. Raises ValueError if the file is too short."""
    if into.numel():
        file.seek(begin)
        if file.readinto(into.reshape(-1).view(torch.uint8).numpy()) != into.nbytes:  # type: ignore[attr-defined]
            raise ValueError("it ends too early")
    return into
