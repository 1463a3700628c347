"""Settings of a replica: a vLLM engine of one or more ranks with its HTTP server and its weight subscriber.

All settings are known before the process imports vLLM; the description of a version comes from the log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from tidemill.schemas.config import HttpSettings, Section
from tidemill.schemas.records import Arm

FETCH_BYTES = 4 << 20
"""Default limit of one response of the log, in bytes: four chunks."""


class KvPolicy(StrEnum):
    """Treatment of the keys and values that older weights computed for a running request."""

    STALE = "stale"
    """Keep them: no recomputation; later tokens attend to a slightly older prefix."""
    RECOMPUTE = "recompute"
    """Drop them: every running request is prefilled again with the new weights (one long step per update)."""


class EngineDtype(StrEnum):
    """Compute dtype of the engine. Both hold every bf16 value exactly, so that a version can be proved from them."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Pool(StrEnum):
    """The pool whose versions a replica serves, or none."""

    ALL = ""
    """Every published version within the gate's limits."""
    STABLE = Arm.STABLE.value
    """Versions that were promoted or rolled back to; before the first of them, the oldest that can be reached."""
    CANARY = Arm.CANARY.value
    """The version on trial; if there is none, the same as the stable pool."""


REFUSED: Mapping[str, str] = {
    "Tidemill sets it: see the other settings of [replica]": """
        model model-tag served-model-name host port dtype max-model-len max-num-seqs max-num-batched-tokens block-size
        kv-cache-memory-bytes worker-extension-cls generation-config enforce-eager enable-prefix-caching
        disable-uvicorn-access-log disable-fastapi-docs disable-log-stats tensor-parallel-size data-parallel-size
        enable-expert-parallel async-scheduling enable-return-routed-experts""",
    "a version is proved from whole, unquantized tensors, and written between two steps of all ranks": """
        quantization quantization-config allow-deprecated-quantization load-format model-loader-extra-config
        ignore-patterns hf-overrides hf-config-path config-format model-impl model-class-overrides worker-cls runner
        convert pooler-config enable-lora lora-* *-lora* *-loras speculative-config spec-* cpu-offload-* offload-*
        enable-sleep-mode sleep-* weight-transfer-config diffusion-config distributed-executor-backend nnodes node-rank
        master-addr master-port pipeline-parallel-size data-parallel-* dp-* dcp-*
        decode-context-parallel-size prefill-context-parallel-size enable-eplb eplb-config
        expert-placement-strategy enable-elastic-ep elastic-ep-* enable-ep-weight-filter enable-dbo ubatch-size
        enable-fault-tolerance fault-tolerance-config""",
    "recorded logprobs are those of the model's own distribution": """
        override-generation-config logprobs-mode logits-processors watermark-config""",
    "the tokenizer and the revision are those of the checkpoint": """
        tokenizer tokenizer-mode tokenizer-revision revision code-revision skip-tokenizer-init""",
    "chat is rendered and read as in training: see [chat]": """
        chat-template* trust-request-chat-template default-chat-template-kwargs response-role enable-auto-tool-choice
        exclude-tools-when-tool-choice-none tool-* reasoning-parser* reasoning-config""",
    "Tidemill runs the server": """
        help config headless api-server-count grpc grpc-port uds ssl-* enable-ssl-refresh uvicorn-log-level h11-*
        disable-access-log-for-endpoints shutdown-timeout root-path tokens-only""",
    "the router and the rollout workers send no key": "api-key",
}
"""Patterns of long names of vLLM's options that are refused, by reason: an option that Tidemill sets, or on which a
proved version or a recorded logprob depends, cannot be changed silently."""


def option_name(given: str) -> str:
    """Return the long option name for a key of the settings, without its dashes."""
    return given.strip().lstrip("-").replace("_", "-")


def refusal(given: str) -> str:
    """Return why an argument is refused; empty if it is accepted."""
    name = re.split("[.=]", option_name(given))[0]
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(each, pattern) for pattern in patterns.split() for each in (name, name.removeprefix("no-"))):
            return reason
    return ""


class ReplicaSettings(Section):
    """Settings of one replica: its server, its engine, and how it follows the weight versions of a branch."""

    replica_id: str = Field(default="replica-0", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the replica: key of its acknowledgements, value of the `x-tidemill-replica` header."""
    region: str = "local"
    """Region for which staleness is reported."""
    pool: Pool = Pool.ALL
    """Pool of the replica: empty (every published version), "stable" (promoted versions) or "canary" (the version on
    trial)."""
    host: str = "127.0.0.1"
    """Address that the HTTP server listens on; loopback unless the operator sets another."""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port of the HTTP server; with 0 the system chooses one, which the log line and the status contain."""
    http: HttpSettings = HttpSettings()
    """Limits of the HTTP server on clients' connections."""
    served_model: str = "tidemill"
    """Model name of the OpenAI-compatible endpoints."""
    dtype: EngineDtype = EngineDtype.FLOAT32
    """Compute dtype. Serving weights are bf16-valued: float32 holds them exactly and is faster on a CPU without AMX."""
    kv_cache_mb: int = Field(default=128, ge=4)
    """Size of the KV cache in MiB; committed memory on a CPU."""
    max_model_len: int = Field(default=512, ge=32)
    """Longest prompt plus completion, in tokens."""
    max_num_seqs: int = Field(default=128, ge=1)
    """Requests decoded in one engine step."""
    max_num_batched_tokens: int = Field(default=4096, ge=32)
    """Tokens computed in one engine step; limits how long a prefill delays decoding."""
    block_size: int = Field(default=32, multiple_of=32)
    """Tokens in a KV block: the unit of prefix caching. A CPU engine needs a multiple of 32."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes (on GPUs: devices) over which an engine's tensors are cut. The number of the model's attention heads
    must be divisible by it. The parts of all ranks are written and proved as one engine."""
    data_parallel: int = Field(default=1, ge=1)
    """Number of engines behind the one server, each with `tensor_parallel` ranks. For a dense model, each has whole
    weights, and a version is written between two of its own steps. For a mixture of experts, they share the experts
    (`expert_parallel`) and compute each step together: all are paused while a version is written."""
    expert_parallel: bool = False
    """Give each rank (`tensor_parallel` ranks in each of `data_parallel` engines) whole experts instead of a slice of
    every expert. On a CPU this saves no time: a rank multiplies by 0 for a token's experts on other ranks."""
    expert_ids: bool = False
    """Return, with each answer of `/v1/completions`, the experts of each layer to which its tokens were sent, so that
    the trainer can route them in the same way (trainer.routing). For mixtures of experts. An answer that ended at a
    stop string, not at a stop token, has no expert ids."""
    batch_invariant: bool = False
    """Compute each token so that its logprobs, to the last bit, do not depend on other requests in the batch. Also set
    by `numerics.batch_invariant`."""
    threads: int = Field(default=1, ge=1)
    """Compute threads of each rank."""
    kv_policy: KvPolicy = KvPolicy.STALE
    """Treatment of the older keys and values of running requests when the weights change."""
    log_stats: bool = False
    """Export vLLM's engine statistics on `/metrics`; costs a few percent of the server's time."""
    staging_dir: Path | None = None
    """Directory in which the process makes its private temporary directory, for remote anchors and whole checkpoints;
    the system's directory for temporary files if not set. Those of killed replicas are removed at the next start."""
    fetch_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time between the last chunk of a delta and the next, before the version is refused, in seconds. Chunks
    arrive `fetch_bytes` at a time."""
    move_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time for a change to another version, in seconds; after it the process is considered hung and ends."""
    fetch_connections: int = Field(default=4, ge=1)
    """Connections to the log over which the shards of a delta are read in parallel: one is slow over a long link."""
    fetch_bytes: int = Field(default=FETCH_BYTES, ge=1 << 20, le=1 << 26)
    """Limit of one response of the log over a connection, in bytes. A connection is idle for a round trip between two
    responses: the limit should be much larger than the link's rate times the round trip, and small enough to arrive
    over all connections at the same time in a part of `fetch_timeout_s`."""
    decode_threads: int = Field(default=2, ge=1)
    """Threads that decode the blocks of a delta, in addition to the engine's."""
    poll_interval_s: float = Field(default=0.05, gt=0, le=10)
    """How long one poll of `weights.manifests` and `gate.decisions` waits for a record, in seconds."""
    remembered_turns: int = Field(default=4096, ge=1)
    """Turns of chats whose token ids are kept, so that a conversation continues with the sampled ids; older turns are
    tokenised again. A token needs about 40 bytes; of more than 2**23 tokens, the older turns are not kept either."""
    vllm_args: dict[str, Any] = Field(default={})
    """vLLM's own server and engine arguments by their long option name, for instance `gpu-memory-utilization = 0.8`.
    Switches are true or false; tables and lists are written as TOML."""
    anchor_wait_s: float | None = Field(default=None, gt=0)
    """How long to wait at start for a first anchor, in seconds; without a limit if not set."""

    @field_validator("vllm_args")
    @classmethod
    def _taken(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        refused = [f"{name} cannot be set here: {reason}" for name in arguments if (reason := refusal(name))]
        if refused:
            raise ValueError("; ".join(refused))
        return arguments


def flags(arguments: Mapping[str, Any], repeats: Callable[[str], bool], takes_many: Callable[[str], bool]) -> list[str]:
    """Return vLLM's arguments of the settings as command-line flags.

    Args:
        arguments: values by option name: true and false are switches, tables become JSON.
        repeats: returns whether an option is repeated for each item of a list.
        takes_many: returns whether an option accepts several values; otherwise a list becomes JSON.
    """

    def text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    found: list[str] = []
    for name, value in arguments.items():
        option = f"--{option_name(name)}"
        if isinstance(value, bool):
            found.append(option if value else f"--no-{option_name(name)}")
        elif isinstance(value, list) and repeats(option):
            found += (f"{option}={text(item)}" for item in value)
        elif isinstance(value, list) and takes_many(option):
            found += (option, *map(text, value))
        else:
            found.append(f"{option}={text(value)}")
    return found
