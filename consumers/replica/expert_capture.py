"""Which experts an engine sent each token to, kept beside the token's keys and values. For CPU engines.

vLLM's own flag for it needs Triton. Here each router tells the ids of the tokens that it computes, and they are kept
under the slots of the KV cache into which those tokens' keys and values go. A request reads them from its blocks when
it has ended. So a prefix that was found in the cache has the ids of its computation, whichever request that was; a
prompt computed in pieces has those of every piece; and where a version came in the middle, each token has the ids of
the version that computed its keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.schemas.expert_ids import ExpertIds


class ExpertCapture:
    """The expert ids of every token in the KV cache of one rank.

    Args:
        runner: vLLM's model runner (V1).

    Raises UnsupportedModelError for a model without experts, with routers that tell no ids, or with several KV caches.
    """

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - vLLM is read without its types
        model, caches = runner.model_config, runner.kv_cache_config.kv_cache_groups
        experts = model.get_num_experts()
        if not experts:
            raise UnsupportedModelError("replica.expert_ids: the model has no experts; set it to false")
        if len(caches) != 1:
            raise UnsupportedModelError(
                f"replica.expert_ids: the layers keep {len(caches)} kinds of KV cache, and the ids go with one; set it "
                "to false"
            )
        self._runner = runner
        self._block = int(caches[0].kv_cache_spec.block_size)
        # One more for tokens that have no slot (-1), which pad a batch.
        slots = runner.kv_cache_config.num_blocks * self._block + 1
        shape = (slots, model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        self._ids = np.zeros(shape, np.uint8 if experts <= 256 else np.uint16)
        try:
            bind_routed_experts_capturer(runner.model, self)
        except ValueError as error:
            raise UnsupportedModelError(f"replica.expert_ids: {error}") from error

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep the ids [tokens, top_k] of a layer for the tokens that are being computed; vLLM's routers call it."""
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[: len(topk_ids)]
        self._ids[slots.numpy(), layer_id] = topk_ids.numpy()

    def ids_of(self, request_id: str) -> ExpertIds:
        """The ids of all tokens but the last of a request that has ended, from `routed_experts_prompt_start` on.

        To be asked for between the engine step that ended the request and the next one. Raises KeyError later.
        """
        request = self._runner.requests[request_id]
        places = np.arange(request.sampling_params.routed_experts_prompt_start, request.num_tokens - 1)
        blocks = np.array(request.block_ids[0], np.int64)
        found: ExpertIds = self._ids[blocks[places // self._block] * self._block + places % self._block]
        return found
