"""The replica's extension of each vLLM worker: its rank's weights, staged in a thread, written between two steps.

vLLM mixes `ReplicaExtension` into its workers (`worker_extension_cls`); the engine core (`plugin`) calls its methods on
all ranks at the same time. A worker answers one call at a time and computes nothing meanwhile. So one call starts long
work, which continues in a thread while the engine samples, and later calls poll its result. A commit only stores: the
places, the new elements and those for an undo are computed before.

Every method returns an answer, with its fault if it failed. It must not raise: vLLM would leave the other ranks'
answers unread, and read them as answers to its next call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from tidemill.consumers.replica.activations import require_rounding_layers
from tidemill.consumers.replica.cpu_layers import (
    apply_held,
    gather_rows,
    orders_of_experts,
    pack_held,
    require_tokenwise,
    scatter_sums,
)
from tidemill.consumers.replica.live_weights import LiveWeights, RankWeights
from tidemill.consumers.replica.plugin import Answer, die_with, fixed_shapes, register
from tidemill.consumers.replica.weight_map import UnsupportedModelError, record_map
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.schemas.expert_ids import ExpertIds

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# A spawned worker has not loaded its model yet, so this call keeps its linear layers unpacked too.
register()
CPUUnquantizedExperts.apply = apply_held
CPUUnquantizedExperts.process_weights_after_loading = pack_held
CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = gather_rows, scatter_sums


def _without_name(start: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap the start of the shared memory of a CPU engine's ranks: delete a file's name after all ranks have mapped it.

    vLLM does not delete the file of a killed rank: each of them would leave 4 or 8 MiB in /dev/shm, which is small in a
    container.
    """

    @wraps(start)
    def started(group: Any) -> int:  # noqa: ANN401 - vLLM's group of ranks
        handle = start(group)
        Path("/dev/shm", f"{group.group_name}_{group.communicator.rank}").unlink(missing_ok=True)
        return handle

    return started


_CPUSHMDistributed._init_cpu_shm = _without_name(_CPUSHMDistributed._init_cpu_shm)


class ExpertCapture:
    """The expert ids of every token in the KV cache of one rank: the experts to which each token was sent.

    vLLM's own option for them needs Triton. Here each router reports the ids of the tokens that it computes, and they
    are stored under the slots of the KV cache for those tokens' keys and values. When a request has ended, its ids are
    read from its blocks. So a prefix from the cache has the ids of its computation, also if that was for another
    request; a prompt computed in pieces has those of every piece; and if the version changed in between, each token
    has the ids of the version that computed its keys and values.

    Raises UnsupportedModelError if the model has no experts, routers that report no ids, or several KV caches.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM's model runner (V1)
        model, caches = runner.model_config, runner.kv_cache_config.kv_cache_groups
        experts = model.get_num_experts()
        if not experts:
            raise UnsupportedModelError("replica.expert_ids: the model has no experts; set it to false")
        if runner.parallel_config.data_parallel_size > 1:
            raise UnsupportedModelError(
                "replica.expert_ids: with replica.data_parallel a CPU engine also computes tokens of other engines; "
                "set one of the two"
            )
        if len(caches) != 1:
            raise UnsupportedModelError(
                f"replica.expert_ids: the layers keep {len(caches)} kinds of KV cache, and the ids go with one; set it "
                "to false"
            )
        self._runner = runner
        self._block = int(caches[0].kv_cache_spec.block_size)
        # One more for the tokens that pad a batch, which have no slot (-1).
        slots = runner.kv_cache_config.num_blocks * self._block + 1
        shape = (slots, model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        self._ids = np.zeros(shape, np.uint8 if experts <= 256 else np.uint16)
        try:
            bind_routed_experts_capturer(runner.model, self)
        except ValueError as error:
            raise UnsupportedModelError(f"replica.expert_ids: {error}") from error

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Store the ids [tokens, top_k] of a layer for the tokens that are being computed; vLLM's routers call it."""
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[: len(topk_ids)]
        self._ids[slots.numpy(), layer_id] = topk_ids.numpy()

    def ids_of(self, request_id: str) -> ExpertIds:
        """Return the ids of all tokens of an ended request but the last, from `routed_experts_prompt_start` on.

        Call it between the engine step that ended the request and the next one. Raises KeyError later.
        """
        request = self._runner.requests[request_id]
        places = np.arange(request.sampling_params.routed_experts_prompt_start, request.num_tokens - 1)
        blocks = np.array(request.block_ids[0], np.int64)
        found: ExpertIds = self._ids[blocks[places // self._block] * self._block + places % self._block]
        return found


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
    """Methods that are mixed into vLLM's worker. Only the engine core's utilities call them, between two steps."""

    _tidemill: RankWeights
    _tidemill_capture: ExpertCapture

    @_answered
    def tidemill_map(self, tensors: list[tuple[str, list[int], str]]) -> Answer:
        """Record the map for checkpoint tensors (name, shape, dtype); return the `boxes` that this rank holds."""
        if parent_process() is not None:
            die_with(os.getppid())
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        if fixed_shapes():
            require_tokenwise(model)
        require_rounding_layers(model)
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        live = LiveWeights(model, record_map(model, specs, orders_of_experts(model)), specs)
        live.warm()
        self._tidemill = RankWeights(live)
        return {"boxes": self._tidemill.boxes()}

    @_answered
    def tidemill_capture(self) -> Answer:
        """Store the expert ids of every token from now on: on the first rank, because all ranks' routers agree."""
        if self.rank == 0:  # type: ignore[attr-defined]
            self._tidemill_capture = ExpertCapture(self.model_runner)  # type: ignore[attr-defined]
        return {}

    @_answered
    def tidemill_expert_ids(self, requests: list[str]) -> Answer:
        """Return the expert ids of requests that the last step ended, `ids` by request; on the first rank."""
        if self.rank != 0:  # type: ignore[attr-defined]
            return {}
        return {"ids": {request: self._tidemill_capture.ids_of(request) for request in requests}}

    @_answered
    def tidemill_begin(self, work: str, arguments: list[str]) -> Answer:
        """Start `stage`, `load` or `prove` in a thread. A new staging drops the staged write, and the undo."""
        rank = self._tidemill
        if work != "prove":
            rank.staged = rank.undo = None
        rank.work = rank.thread.submit(_answered(getattr(RankWeights, work)), rank, *arguments)
        return {}

    def tidemill_answer(self) -> Answer | None:
        """Return the result of the last work; None while it continues."""
        work = self._tidemill.work
        if work is None:
            return {"fault": "nothing was begun"}
        return work.result() if work.done() else None

    @_answered
    def tidemill_commit(self) -> Answer:
        """Write the staged elements, all or none."""
        return self._tidemill.commit()

    @_answered
    def tidemill_undo(self) -> Answer:
        return self._tidemill.take_back()
