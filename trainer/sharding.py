"""Sharding of models over the ranks of a job (FSDP2), and their division into layers.

A model is sharded layer by layer: each rank holds consecutive rows of each weight, in float32. Before a layer is
computed, its weights are gathered in the type of the computation; its gradients are summed over the ranks in float32.
A single rank does not shard a float32 computation; a bfloat16 computation is sharded over the one rank, so that the
arithmetic is the same as on several ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from types import MethodType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tidemill.trainer.device import backend
from tidemill.trainer.model import PACKED_ATTENTION, use_packed_attention
from tidemill.trainer.policy import SCORING, scored
from tidemill.trainer.stored_model import StoredModel


class ShardingError(ValueError):
    """A model cannot be sharded over ranks, or its layers cannot be computed twice."""


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the model's layers. Raises ShardingError if not all of them are marked as in transformers."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    expected = model.config.get_text_config().num_hidden_layers
    if len(found) != expected:
        raise ShardingError(
            f"{type(model).__name__} marks {len(found)} modules as layers (GradientCheckpointingLayer of transformers) "
            f"and has {expected}: it can be trained on one process only, with trainer.compute float32 and "
            "trainer.checkpoint_activations off"
        )
    return found


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the backward pass, in which the layer is computed again."""
    for layer in layers_of(model):
        # The option of transformers is not used: it needs train mode, which would enable dropout.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def lay_over_ranks(
    models: Sequence[PreTrainedModel],
    device: torch.device,
    compute: torch.dtype,
    stored: StoredModel | None,
    held: torch.dtype = torch.float32,
) -> None:
    """Shard models over all ranks of the job, on `device`; each rank calls this with the same models.

    Afterwards, call a model only by `policy.sampled_logprobs` and `policy.frozen_logprobs`, equally often on every
    rank.

    Args:
        models: whole models, or outlines of `stored`; the first one is trained.
        compute: the type in which layers are computed.
        stored: the model from which each rank reads its rows.
        held: the type of the weights of models that are not trained.

    Raises ShardingError if the layers of a model cannot be identified, and UntrainableModelError if a model computes
    packed rows incorrectly.
    """
    for model in models:
        if stored is None:
            use_packed_attention(model)
        else:
            # Before sharding: otherwise transformers would search for the attention in the source of FSDP2's class.
            model.set_attn_implementation(PACKED_ATTENTION)
    if stored is not None:
        # The check compares numbers in float32, even if steps are computed in another type.
        trial = stored.outline()
        _shard(trial, device, torch.float32)
        stored.fill(trial, device)
        use_packed_attention(trial)
        del trial
        # Sharded modules and their hooks refer to each other.
        gc.collect()
    for model in models:
        if model is not models[0]:
            for weight in model.parameters():
                weight.data = weight.data.to(held)
        _shard(model, device, compute)
        if stored is not None:
            stored.fill(model, device)


def _shard(model: PreTrainedModel, device: torch.device, compute: torch.dtype) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(), store=store, rank=0, world_size=1)
    layers = layers_of(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if compute is torch.float32 else half
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # The loss is already divided by the totals of the whole batch; gloo can only sum.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    setattr(model, SCORING, MethodType(scored, model))
    register_fsdp_forward_method(model, SCORING)
