"""The memory of a trainer's process and of a replica, from the model's size and the settings.

For a trainer, the peak of a step is counted: the backward pass of a row begins, gradients of the previous rows are in
memory, and the previous version is being published. On a CPU the sum is within 15 % of the measurements for one
process, two and four ranks (`tests/bench/bench_plan.py`). On one GPU it was within 3 %
(`tests/gpu/train_step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.kernels.block import BLOCK_ELEMENTS
from tidemill.kernels.encoder import SHARED_SHARE
from tidemill.kernels.weights.delta_shard import CHUNK_BYTES, CHUNKS_IN_FLIGHT, MEMORY_BYTES
from tidemill.trainer.model_size import ModelSize
from tidemill.trainer.policy import CHUNK_SCORES, keeps_scores

FP32, BF16 = 4, 2
PROCESS_BYTES = 0.86 * 2**30
"""Resident memory without a model: libraries, clients of the log; for a process on a CPU, where it is memory of the
device."""
SCORE_BUFFERS = 4
"""Arrays of scores in memory at the same time: in the head two of this chunk and two of the previous one, in attention
the scores, their exponentials and the gradients of both."""
ENCODED_BYTES, WAITING_BYTES = 36, 24
"""Bytes of a changed element in an encoded block, and of one that waits for a block: places, patterns, streams."""
CHUNK_COPIES = 3
"""Copies of a chunk that is being sent: the record, its serialised form, and the client's copy of that."""


@dataclass(frozen=True, slots=True)
class TrainerCase:
    """The properties of a trainer that determine its memory."""

    ranks: int
    row_tokens: int
    """Tokens of the longest row."""
    reference: bool
    """A reference model is in memory, for the KL term."""
    compute_bytes: int
    """Bytes of a number in the type in which a step is computed."""
    checkpointed: bool
    """Layers are computed a second time for their gradients, and keep only their inputs."""
    gpu: bool
    density: float
    """Share of the elements that a step changes."""
    delta_bytes: float
    """Bytes of the encoded delta, of all ranks."""
    beside: bool
    """A version is published at the same time as the next step."""
    on_device: bool
    """Versions are compared and encoded on the GPU (`trainer.publish.on_device`)."""
    older: bool
    """Some tokens are also scored at older weights, of which a copy is kept."""
    blocks: bool = False
    """The serving format has codes and scales (`trainer.serving_format`)."""
    expert_parallel: int = 1
    """Ranks over which the experts are divided (`trainer.expert_parallel`)."""

    @property
    def sharded(self) -> bool:
        """Layers are gathered before they are computed (FSDP2), possibly from one rank, because of the type."""
        return self.ranks > 1 or self.compute_bytes != FP32


def trainer_bytes(size: ModelSize, case: TrainerCase) -> dict[str, float]:
    """Return the bytes of one rank, by content."""
    share = size.parameters / case.ranks
    kept = kept_bytes(size, case.compute_bytes)
    activations = float(case.row_tokens * size.layers * kept)
    if case.checkpointed:
        activations = float(case.row_tokens * (case.compute_bytes * size.hidden * size.layers + kept))
    # Scores of a layer for a row that is one sequence: a CPU has a call that does not need them, a GPU for 16 bits.
    attention = float(SCORE_BUFFERS * FP32 * size.heads * case.row_tokens**2)
    head = _head(size, case)
    device = {
        # fp32 tensors of rounded masters, unless gathering a layer rounds it (trainer/master.py).
        "weights": FP32 * share * (case.compute_bytes == FP32 or case.blocks),
        "masters": FP32 * share,
        "moments": 2 * FP32 * share,
        "gradients": FP32 * share,
        "reference": (FP32 if case.blocks else case.compute_bytes) * share * case.reference,
        "older_weights": BF16 * share * case.older,
        "gathered": _gathered(size, case, activations + head) if case.sharded else 0.0,
        "activations": activations,
        "attention": attention if case.gpu and case.compute_bytes == FP32 else 0.0,
        "head": head,
    }
    if case.gpu:
        return {**device, "publication": _held(size, case) * case.on_device}
    more = max(0.0, _loading(size, case) - sum(device.values()))
    freed = sum(device[name] for name in ("gradients", "gathered", "activations", "head"))
    publication = _held(size, case) + max(0.0, _encoder(size, case) - (0.0 if case.beside else freed))
    return {**device, "loading": more, "publication": publication, "process": PROCESS_BYTES}


def trainer_host_bytes(size: ModelSize, case: TrainerCase) -> float:
    """Return bytes of host memory for one rank of a trainer on GPUs, while it loads its models or while it trains.

    Pages of mapped files are not counted: the system can reclaim them.
    """
    held = _held(size, case) * (not case.on_device)
    return PROCESS_BYTES + max(_loading(size, case), held + _encoder(size, case))


def kept_bytes(size: ModelSize, compute_bytes: int) -> int:
    """Return the bytes that a layer keeps for each token for its backward pass.

    These are: for each of two norms, the input in fp32, the normalised input and the output; queries, keys and values
    after the rotation and the attention's output; gate, activated gate, up and their product; for normalised heads,
    also their input in fp32 and the normalised input; for routed experts, their copy of the token and their output
    before it is weighted.
    """
    queries, keys = size.heads * size.head_width, size.kv_heads * size.head_width
    normed = 2 * size.hidden + (queries + keys if size.normed_heads else 0)
    others = 2 * size.hidden + 2 * queries + 2 * keys + 4 * size.feed_forward + 2 * size.used_experts * size.hidden
    return (FP32 + compute_bytes) * normed + compute_bytes * others


def _loading(size: ModelSize, case: TrainerCase) -> float:
    """Return the bytes of the starting checkpoint that are in memory at the start, in fp32.

    One process loads model and reference whole. A rank of a sharded model reads its rows of one weight at a time.
    """
    if case.sharded:
        return FP32 * max(size.head, size.expert_layer) / case.ranks
    return float(FP32 * size.parameters * (1 + case.reference))


def _held(size: ModelSize, case: TrainerCase) -> float:
    """Return the bytes of the version that is published, and of the publisher's copy of the previous version."""
    return 2 * BF16 * size.parameters / case.ranks


def _encoder(size: ModelSize, case: TrainerCase) -> float:
    """Return bytes for encoding and sending a delta: a block of the largest tensor, waiting small tensors, output."""
    own, output = size.parameters / case.ranks, case.delta_bytes / case.ranks
    block = min(BLOCK_ELEMENTS, max(size.head, size.expert_layer) / case.ranks)
    waiting = min(BLOCK_ELEMENTS / SHARED_SHARE, own)
    blocks = ENCODED_BYTES * case.density * block + (BF16 + WAITING_BYTES * case.density) * waiting
    return blocks + min(MEMORY_BYTES, output) + CHUNK_COPIES * min(CHUNKS_IN_FLIGHT * CHUNK_BYTES, output)


def _gathered(size: ModelSize, case: TrainerCase, backward_bytes: float) -> float:
    """Return the bytes that are gathered from the ranks and summed over them; `backward_bytes` belong to a
    backward pass that begins.

    The parameters outside the layers stay gathered from a row's first pass to its last, and those of the reference
    always. Two layers are gathered, and one has its gradients and the input of their sum. The gradients of the
    parameters outside the layers are computed last, when the other memory is free. Without a GPU, ranks communicate by
    gloo, which copies the data that it gathers and sums. Of divided experts, a rank gathers its own; the tokens that
    are sent to them are counted as if all experts were used equally.
    """
    value, copies = case.compute_bytes, 1 if case.gpu else 2
    layer = size.layer - size.expert_layer + size.expert_layer / case.expert_parallel
    outside = value * size.root * (1 + case.reference)
    layers = (2 * value + copies * (value + FP32)) * layer
    last = (value + copies * FP32) * size.root
    return float(outside + layers + max(0.0, last - backward_bytes))


def _head(size: ModelSize, case: TrainerCase) -> float:
    """Return the bytes of a chunk's scores, kept probabilities, outputs of the last layer and the head's gradient."""
    tokens = case.row_tokens
    scores = tokens * size.vocabulary
    kept = scores if keeps_scores(tokens, size.vocabulary) else 0
    chunk = min(max(CHUNK_SCORES, size.vocabulary), scores)
    outputs = case.compute_bytes * (2 * tokens * size.hidden + size.head)
    return float(FP32 * (SCORE_BUFFERS * chunk + kept) + outputs)


REPLICA_PROCESS_BYTES = 1.3 * 2**30
"""Resident memory of a replica's processes without weights; on a CPU, where it is memory of the device."""
CHANGE_BYTES = 12
"""Bytes of a changed element on its device while an update is applied: its place, its new value and its old one."""
STEP_SCORES = 3
"""fp32 arrays of the scores of the requests that are decoded in one step."""


@dataclass(frozen=True, slots=True)
class ReplicaCase:
    """The properties of a replica that determine its memory."""

    tensor_parallel: int
    """Ranks over which an engine's tensors are divided; whole experts on each rank (expert parallel) need the same."""
    data_parallel: int
    """Engines of the replica, each with a share of the requests and the whole model, except routed experts, which are
    divided over all ranks of the replica (`replica.expert_parallel`)."""
    requests: int
    """Requests at the same time."""
    context: int
    """Tokens of each request."""
    step_tokens: int
    """Maximum tokens that one engine step computes."""
    value_bytes: int
    """Bytes of a weight and of a number in the KV cache."""
    changed: float
    """Elements that an update changes."""
    gpu: bool

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.data_parallel


def replica_bytes(size: ModelSize, case: ReplicaCase) -> dict[str, float]:
    """Return the bytes of one rank, by content."""
    tensor = case.tensor_parallel
    held = (size.parameters - size.experts) / tensor + size.experts / case.ranks
    queries, keys = size.heads * size.head_width, size.kv_heads * size.head_width
    # Experts compute the tokens of all engines.
    gathered = case.data_parallel if size.experts else 1
    numbers = 2 * size.hidden * gathered + (queries + 2 * keys + 3 * size.feed_forward) / tensor
    scored = min(case.requests / case.data_parallel, case.step_tokens)
    device = {
        "weights": case.value_bytes * held,
        "kv_cache": kv_bytes(size, case),
        "step": case.value_bytes * case.step_tokens * numbers + 4 * STEP_SCORES * scored * size.vocabulary,
        "update": CHANGE_BYTES * case.changed * held / size.parameters,
    }
    return device if case.gpu else {**device, "mirror": replica_host_bytes(size), "process": REPLICA_PROCESS_BYTES}


def replica_host_bytes(size: ModelSize) -> float:
    """Return bytes of host memory for a replica: its copy of the served version, to which deltas are applied."""
    return float(BF16 * size.parameters)


def kv_bytes(size: ModelSize, case: ReplicaCase) -> float:
    """Return the bytes of one rank's KV cache; if there are fewer key/value heads than ranks, each rank has a copy."""
    heads = max(size.kv_heads / case.tensor_parallel, 1.0)
    tokens = case.context * case.requests / case.data_parallel
    return case.value_bytes * size.layers * 2 * heads * size.head_width * tokens
