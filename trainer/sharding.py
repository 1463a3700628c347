"""Models laid over the ranks of a job (FSDP2), and what that needs to know of their layers.

A sharded model is laid over the ranks layer by layer: each rank holds a run of rows of each weight, in float32. Before
a layer is computed its weights are gathered, in the type of the computation; its gradients are added up over the ranks
in float32. One rank needs none of it in float32; in bfloat16 it is sharded over itself alone, for the same arithmetic
as on many.
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
    """A model cannot be laid over ranks, or its layers cannot be computed twice."""


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """The model's layers. Raises ShardingError for a family that does not mark all of them as transformers does."""
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
    """Keep only the input of each layer for the backward pass, and compute the layer again there."""
    for layer in layers_of(model):
        # Not by transformers' own switch: that needs train mode, which would turn dropout on.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def lay_over_ranks(
    models: Sequence[PreTrainedModel],
    device: torch.device,
    compute: torch.dtype,
    stored: StoredModel | None,
    held: torch.dtype = torch.float32,
) -> None:
    """Lay models over all ranks of the job, on `device`; each rank calls this with the same models.

    Afterwards a model is to be called by `policy.sampled_logprobs` and `policy.frozen_logprobs` alone, on every rank as
    often.

    Args:
        models: whole ones, or outlines of `stored`; the first one is trained.
        compute: the type in which layers are computed.
        stored: from which each rank reads its rows.
        held: the type of the weights of models that are not trained.

    Raises ShardingError for a model whose layers cannot be told, and UntrainableModelError for one that is not right in
    packed rows.
    """
    for model in models:
        if stored is None:
            use_packed_attention(model)
        else:
            # Before it is sharded: transformers would look for the attention in the source of FSDP2's class.
            model.set_attn_implementation(PACKED_ATTENTION)
    if stored is not None:
        # The check compares numbers in float32, whatever type the steps are computed in.
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
        # The loss is divided by the totals of the whole batch already; gloo can add only.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    setattr(model, SCORING, MethodType(scored, model))
    register_fsdp_forward_method(model, SCORING)
