"""vLLM's own arguments in the replica's settings: those that cannot be taken, and the rest as command-line flags. Pure.

An argument that is not taken is refused by name: nothing that Tidemill decides, and nothing that a proved version or a
recorded logprob depends on, can be changed in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

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
"""Patterns of long option names, by the reason."""


def option_name(given: str) -> str:
    """The long option name of a key of the settings, without its dashes."""
    return given.strip().lstrip("-").replace("_", "-")


def refusal(given: str) -> str:
    """Why an argument is not taken; empty for one that is."""
    name = option_name(given).partition(".")[0]
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(each, pattern) for pattern in patterns.split() for each in (name, name.removeprefix("no-"))):
            return reason
    return ""


def flags(arguments: Mapping[str, Any], repeats: Callable[[str], bool], takes_many: Callable[[str], bool]) -> list[str]:
    """Command-line flags of the arguments.

    Args:
        arguments: values by option name: true and false are switches, tables are JSON.
        repeats: whether an option is given once for each item of a list.
        takes_many: whether it takes the items of a list one after the other; else a list is JSON.
    """

    def parts() -> Iterator[str]:
        for name, value in arguments.items():
            option = f"--{option_name(name)}"
            if isinstance(value, bool):
                yield option if value else f"--no-{option_name(name)}"
            elif isinstance(value, list) and repeats(option):
                yield from (f"{option}={_text(item)}" for item in value)
            elif isinstance(value, list) and takes_many(option):
                yield from (option, *map(_text, value))
            else:
                yield f"{option}={_text(value)}"

    return list(parts())


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
