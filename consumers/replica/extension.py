"""What the replica adds to each worker of vLLM: its rank's weights, staged in a thread, written between two steps.

vLLM mixes `ReplicaExtension` into its workers (`worker_extension_cls`); the engine core (`plugin`) calls the methods on
all ranks at once. A worker answers one call at a time and computes nothing meanwhile, so that long work is begun by one
call, goes on in a thread while tokens flow, and is asked for by others. A commit only stores: what goes where, and what
an undo would write, is worked out before.

Every method answers, with its fault where it has one. An exception would be worse than an answer: vLLM then leaves the
other ranks' answers unread, and takes them for answers to its next call.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from tidemill.consumers.replica.experts import ExpertCapture, apply_held, gather_rows, orders_of_experts, scatter_sums
from tidemill.consumers.replica.hand_over import taken_over
from tidemill.consumers.replica.holdings import HeldBoxes
from tidemill.consumers.replica.invariant import require_tokenwise
from tidemill.consumers.replica.live_weights import LiveWeights, WeightWrite, WholeWrite
from tidemill.consumers.replica.plugin import Answer, die_with, fixed_shapes, register
from tidemill.consumers.replica.weight_map import record_map
from tidemill.kernels.backend import backend_for
from tidemill.kernels.fingerprint import ZERO, TensorKey
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# A worker that vLLM started anew, without a fork, has not loaded its model yet: its linear layers stay unpacked too.
register()
CPUUnquantizedExperts.apply = apply_held
CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather_rows, scatter_sums


class RankWeights:
    """One rank's live weights, what is staged for them, their last update, and the thread that prepares and proves."""

    def __init__(self, live: LiveWeights) -> None:
        self.live = live
        self.staged: WeightWrite | WholeWrite | None = None
        self.undo: WeightWrite | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-rank")
        self.work: Future[Answer] | None = None

    def stage(self, path: str, digest: str) -> Answer:
        """Prepare a write of changes that were handed over."""
        return self._stage(lambda: self.live.prepare(taken_over(path, digest)))

    def load(self, directory: str) -> Answer:
        """Prepare a write of everything, from a checkpoint directory."""

        def read() -> WholeWrite:
            tensors = map_checkpoint(Path(directory))
            return self.live.prepare_whole((name, bits_in_memory(tensors, name)) for name in self.live.names)

        return self._stage(read)

    def prove(self) -> Answer:
        """Fingerprint what this rank holds, in the order of `boxes`: u8[boxes, 2]."""
        found: list[tuple[int, int]] = []
        for name in self.live.names:
            key = TensorKey.of(name)
            prints = dict.fromkeys(self.live.boxes(name), ZERO)
            for box, begin, bits in self.live.pieces(name):
                kernels = backend_for(bits)
                if box.dense:
                    prints[box] += kernels.fingerprint(bits, key, box.source + begin)
                else:
                    where = kernels.beside(box.indices(begin, len(bits)), bits)
                    prints[box] += kernels.fingerprint_at(bits, key, where)
            found += [(one.lo, one.hi) for one in prints.values()]
        return {"prints": np.array(found, dtype=np.uint64).reshape(-1, 2)}

    def boxes(self) -> HeldBoxes:
        """The elements of each tensor that this rank holds, as `holdings.HeldBoxes`."""
        rows: list[tuple[int, ...]] = []
        for number, name in enumerate(self.live.names):
            for box in self.live.boxes(name):
                # Neighbours are one row, whatever distance they have in this rank's storage.
                shape = (1, box.length, box.length) if box.dense else (box.rows, box.row, box.pitch)
                rows.append((number, box.source, *shape))
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def _stage(self, prepare: Callable[[], WeightWrite | WholeWrite]) -> Answer:
        started = time.monotonic()
        self.staged = prepare()
        return {"stage_ms": 1e3 * (time.monotonic() - started)}


def _answered(method: Callable[Concatenate[Any, P], Answer]) -> Callable[Concatenate[Any, P], Answer]:
    @wraps(method)
    def answer(worker: Any, /, *args: P.args, **kwargs: P.kwargs) -> Answer:  # noqa: ANN401 - vLLM's worker
        try:
            return {"fault": "", **method(worker, *args, **kwargs)}
        except Exception as error:  # noqa: BLE001 - it becomes the answer: see the module's docstring
            logger.warning("%s: %s", method.__name__, error)
            return {"fault": str(error) or type(error).__name__}

    return answer


class ReplicaExtension:
    """Methods mixed into vLLM's worker. Only the engine core's utilities call them, between two steps."""

    _tidemill: RankWeights
    _tidemill_capture: ExpertCapture

    @_answered
    def tidemill_map(self, tensors: list[tuple[str, list[int], str]]) -> Answer:
        """Record the map for checkpoint tensors (name, shape, dtype); says which `boxes` of them lie here."""
        if parent_process() is not None:
            die_with(os.getppid())
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        if fixed_shapes():
            require_tokenwise(model)
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        live = LiveWeights(model, record_map(model, specs, orders_of_experts(model)), specs)
        live.warm()
        self._tidemill = RankWeights(live)
        return {"boxes": self._tidemill.boxes()}

    @_answered
    def tidemill_capture(self) -> Answer:
        """Keep the expert ids of every token from now on: on the first rank, as the routers of all choose alike."""
        if self.rank == 0:  # type: ignore[attr-defined]
            self._tidemill_capture = ExpertCapture(self.model_runner)  # type: ignore[attr-defined]
        return {}

    @_answered
    def tidemill_expert_ids(self, requests: list[str]) -> Answer:
        """The expert ids of requests that the last step ended, `ids` by request; on the first rank."""
        if self.rank != 0:  # type: ignore[attr-defined]
            return {}
        return {"ids": {request: self._tidemill_capture.ids_of(request) for request in requests}}

    @_answered
    def tidemill_begin(self, work: str, arguments: list[str]) -> Answer:
        """Begin `stage`, `load` or `prove` in a thread. What was staged before is dropped by a new staging."""
        rank = self._tidemill
        if work != "prove":
            rank.staged = None
        rank.work = rank.thread.submit(_answered(getattr(RankWeights, work)), rank, *arguments)
        return {}

    def tidemill_answer(self) -> Answer | None:
        """What became of the work that was begun; None while it goes on."""
        work = self._tidemill.work
        if work is None:
            return {"fault": "nothing was begun"}
        return work.result() if work.done() else None

    @_answered
    def tidemill_commit(self) -> Answer:
        """Write what was staged, whole or not at all."""
        rank, begun = self._tidemill, time.monotonic()
        staged, rank.staged, rank.undo = rank.staged, None, None
        if isinstance(staged, WeightWrite):
            rank.live.commit(staged)
            rank.undo = staged
        elif staged is not None:
            rank.live.write_whole(staged)
        else:
            raise ValueError("nothing is staged that could be written")
        return {"apply_ms": 1e3 * (time.monotonic() - begun)}

    @_answered
    def tidemill_undo(self) -> Answer:
        """Take the last commit back."""
        rank = self._tidemill
        undo, rank.undo = rank.undo, None
        if undo is None:
            raise ValueError("there is no update to undo")
        rank.live.take_back(undo)
        return {}
