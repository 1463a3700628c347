"""The memory of a replica, from the model's size and how it is divided over devices."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.trainer.model_size import ModelSize

BF16 = 2
PROCESS_BYTES = 1.3 * 2**30
"""Resident in a replica's processes before the weights; on a CPU, where that memory is the device's."""
CHANGE_BYTES = 12
"""Of a changed element on its device while an update is applied: its place, its new value and its old one."""
STEP_SCORES = 3
"""fp32 arrays of the scores of the requests that are decoded in one step."""


@dataclass(frozen=True, slots=True)
class ReplicaCase:
    """How a replica runs."""

    tensor_parallel: int
    """Ranks that an engine's tensors are cut over; whole experts on each rank (expert parallel) take as much."""
    data_parallel: int
    """Engines of the replica, each with the whole model, and a share of the requests."""
    requests: int
    """Requests at the same time."""
    context: int
    """Tokens of each of them."""
    step_tokens: int
    """Most tokens that one engine step computes."""
    value_bytes: int
    """Bytes of a weight and of a number in the KV cache."""
    changed: float
    """Elements that an update changes."""
    gpu: bool

    @property
    def ranks(self) -> int:
        """Devices of the replica."""
        return self.tensor_parallel * self.data_parallel


def replica_bytes(size: ModelSize, case: ReplicaCase) -> dict[str, float]:
    """Bytes of one rank, by what they hold."""
    tensor = case.tensor_parallel
    queries, keys = size.heads * size.head_width, size.kv_heads * size.head_width
    numbers = 2 * size.hidden + (queries + 2 * keys + 3 * size.feed_forward) / tensor
    scored = min(case.requests / case.data_parallel, case.step_tokens)
    device = {
        "weights": case.value_bytes * size.parameters / tensor,
        "kv_cache": kv_bytes(size, case),
        "step": case.value_bytes * case.step_tokens * numbers + 4 * STEP_SCORES * scored * size.vocabulary,
        "update": CHANGE_BYTES * case.changed / tensor,
    }
    return device if case.gpu else {**device, "mirror": replica_host_bytes(size), "process": PROCESS_BYTES}


def replica_host_bytes(size: ModelSize) -> float:
    """Bytes in the host's memory for a replica: its copy of the version that it serves, from which deltas go on."""
    return float(BF16 * size.parameters)


def kv_bytes(size: ModelSize, case: ReplicaCase) -> float:
    """Bytes of the KV cache of one rank; fewer heads of keys and values than ranks are copied to each rank."""
    heads = max(size.kv_heads / case.tensor_parallel, 1.0)
    tokens = case.context * case.requests / case.data_parallel
    return case.value_bytes * size.layers * 2 * heads * size.head_width * tokens
