"""Sharding of models over the ranks of a job (FSDP2), and their division into layers.

A model is sharded layer by layer: each rank holds consecutive rows of each weight, in float32. Before a layer is
computed, its weights are gathered in the type of the computation; its gradients are summed over the ranks in float32.
A single rank does not shard a float32 computation; a bfloat16 computation is sharded over the one rank, so that the
arithmetic is the same as on several ranks.

With `trainer.expert_parallel` n, the experts of a layer are not gathered but divided over each n consecutive ranks, by
the expert-parallel plan of transformers: tokens are sent to the ranks that have their experts, and the results are sent
back. Ranks that have the same experts shard these among themselves. A rank takes part also without tokens for its
experts.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_expert_parallelism, replace_layer_number_by_wildcard
from transformers.modeling_layers import GradientCheckpointingLayer

from tidemill.trainer.job import backend
from tidemill.trainer.model import PACKED_ATTENTION, use_packed_attention
from tidemill.trainer.policy import SCORING, scored
from tidemill.trainer.stored_model import StoredModel

AXES = ("efsdp", "ep")
"""Dimensions of the ranks, named as in transformers: over those with the same experts, and over the experts."""


def layers_of(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the model's layers. Raises ValueError if not all of them are marked as in transformers."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    expected = model.config.get_text_config().num_hidden_layers
    if len(found) != expected:
        raise ValueError(
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
    divided: DeviceMesh | None = None,
) -> None:
    """Shard models over all ranks of the job, on `device`; each rank calls this with the same models.

    Afterwards, call a model only by `policy.sampled_logprobs` and `policy.frozen_logprobs`, equally often on every
    rank.

    Args:
        models: whole models, or outlines of `stored`; the first one is trained.
        compute: the type in which layers are computed.
        stored: the model from which each rank reads its rows.
        held: the type of the weights of models that are not trained.
        divided: the ranks as `expert_mesh` returns them, for models that passed `require_divisible`.

    Raises ValueError if the layers of a model cannot be identified, and UntrainableModelError if a model computes
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
        _shard(trial, device, torch.float32, divided)
        stored.fill(trial, device)
        use_packed_attention(trial)
        del trial
        # Sharded modules and their hooks refer to each other.
        gc.collect()
    for model in models:
        if model is not models[0]:
            for weight in model.parameters():
                weight.data = weight.data.to(held)
        _shard(model, device, compute, divided)
        if stored is not None:
            stored.fill(model, device)


def require_divisible(model: PreTrainedModel, expert_parallel: int, ranks: int) -> None:
    """Raise ValueError unless the experts of a whole model can be divided over `expert_parallel` of the ranks."""
    setting = f"trainer.expert_parallel is {expert_parallel}"
    if ranks % expert_parallel:
        raise ValueError(
            f"{setting} and the job has {ranks} rank(s): start {expert_parallel} or a multiple of it with torchrun, or "
            "set it to 1"
        )
    if expert_parallel == 1:
        return
    weights = [weight for module in _experts_of(model) for weight in module.parameters()]
    divided = [weight for name, weight in model.named_parameters() if _planned(model, name) == "grouped_gemm"]
    if not weights or {id(weight) for weight in weights} != {id(weight) for weight in divided}:
        raise ValueError(
            f"{setting} and transformers has no plan that divides the experts of {type(model).__name__} over ranks, "
            "each expert whole: set it to 1"
        )
    if odd := next((len(weight) for weight in weights if len(weight) % expert_parallel), 0):
        raise ValueError(
            f"{setting} and {type(model).__name__} has {odd} experts: set it to a number that divides both these and "
            f"the {ranks} ranks"
        )


def _planned(model: PreTrainedModel, name: str) -> str:
    """Return how the expert-parallel plan of transformers treats a module or weight; empty: as without it."""
    plan: dict[str, str] = model.ep_plan
    return plan.get(replace_layer_number_by_wildcard(name), "")


def _experts_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of experts to which tokens of other ranks are sent."""
    return [module for name, module in model.named_modules() if _planned(model, name) == "ep_dispatch_experts"]


def expert_mesh(device: torch.device, expert_parallel: int, timeout_s: float) -> DeviceMesh | None:
    """Return the ranks of the job in two dimensions (`AXES`), for experts; None if they are not divided.

    No rank waits longer than `timeout_s` for another one. Every rank calls this.
    """
    if expert_parallel == 1:
        return None
    shape = (dist.get_world_size() // expert_parallel, expert_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    # Flattened: a norm is then summed over all ranks at once, and not over one dimension after the other.
    for group in (mesh._flatten().get_group(), *mesh.get_all_groups()):
        # Otherwise PyTorch's own timeout would apply, whatever the job's is.
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def _shard(
    model: PreTrainedModel, device: torch.device, compute: torch.dtype, divided: DeviceMesh | None = None
) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(), store=store, rank=0, world_size=1)
    layers = layers_of(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if compute is torch.float32 else half
    units = [(module, mesh, policy) for module in (*layers, model)]
    if divided is not None:
        apply_expert_parallelism(model, divided["ep"], None, model.ep_plan)
        # The inputs of experts keep their types, as in a layer that is sharded with its experts.
        inner = replace(policy, cast_forward_inputs=False)
        units = [(module, divided["efsdp"], inner) for module in _experts_of(model)] + units
    for module, over, precision in units:
        sharded = fully_shard(module, mesh=over, mp_policy=precision)
        # The loss is already divided by the totals of the whole batch; gloo can only sum.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    setattr(model, SCORING, MethodType(scored, model))
    register_fsdp_forward_method(model, SCORING)
