"""Master weights and their serving view: fp32 for the optimizer, bf16 values for everything else.

The model's parameters are fp32 tensors that contain only bf16 values: the serving view, exactly the numbers that the
replicas serve. If the serving format has fewer bits, the parameters contain the values of its codes and scales.
Gradients are computed at these parameters and applied to the fp32 masters (straight-through), which are then rounded
into the parameters again. So trainer and sampler have equal weights at one version, and an update too small for the
view is not lost. For a sharded model, each rank holds the masters of its own rows. If such a model is computed in bf16,
gathering a layer rounds it, so the parameters are the masters, which saves 4 bytes for each of them.

For comparison, `trainer.forward` can keep the parameters in bf16: then the view is made only while it is read.

At an interval of steps, a copy of the weights is kept for one step, and some tokens that these older weights sampled
are scored with them. If no token was sampled by the trainer's present weights, this separates the difference between
engines at equal weights from the effect of staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tidemill.kernels.quantise import BLOCK_FORMATS, CHOOSERS, BlockFormat, dequantise, quantise
from tidemill.kernels.weights.ranks import Ranks
from tidemill.trainer.batch import PackedRow, Trajectory, sampled_versions
from tidemill.trainer.choices import Forward, ServingFormat
from tidemill.trainer.config import OptimizerSettings
from tidemill.trainer.policy import frozen_logprobs
from tidemill.trainer.stored_model import own_rows


class MasterWeights:
    """fp32 master weights of `model`, with AdamW over them, on the same device as the model's weights.

    Args:
        gathered_in_bf16: the model is sharded, and its layers are gathered in bf16 before they are computed.

    Raises ValueError if the model has no weights that `serving_format` can represent.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: OptimizerSettings,
        serving_format: ServingFormat = ServingFormat.BF16,
        forward: Forward = Forward.MATCHED,
        *,
        gathered_in_bf16: bool = False,
    ) -> None:
        self._settings = settings
        self._form = BLOCK_FORMATS.get(serving_format.value)
        self._quantised = frozenset() if self._form is None else quantised_weights(model)
        self._in_parameters = gathered_in_bf16 and self._form is None
        self._matched = forward is Forward.MATCHED or self._in_parameters
        self._parameters = dict(model.named_parameters())
        self.rows = {name: own_rows(p) for name, p in self._parameters.items() if isinstance(p, DTensor)}
        """For each sharded weight, the first row that this rank holds and the row after the last."""
        own = {name: own_part(p) for name, p in self._parameters.items()}
        self._masters = own if self._in_parameters else {name: part.clone().float() for name, part in own.items()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._round()

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step` (first: 1): linear warm-up, then linear decay to the final share."""
        settings = self._settings
        rise = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
        fallen = min(1.0, (step - 1) / settings.decay_steps) if settings.decay_steps else 0.0
        return settings.learning_rate * rise * (1.0 - fallen * (1.0 - settings.final_learning_rate))

    def update(self, learning_rate: float) -> float:
        """Apply the gradients of the parameters, clear them and round; return the gradient norm before clipping.

        Raises RuntimeError if it is not finite; the weights are unchanged.
        """
        # Divided experts have other dimensions of ranks than the rest, so their gradients have a norm of their own.
        found: dict[DeviceMesh | None, list[Tensor]] = {}
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                found.setdefault(mesh, []).append(parameter.grad)
        norms = []
        for gradients in found.values():
            own = torch.nn.utils.get_total_norm(gradients, foreach=False)
            norms.append(own.full_tensor() if isinstance(own, DTensor) else own)
        norm = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
        if not norm.isfinite():
            raise RuntimeError(
                "the gradient of the next step is not finite, so the step was not taken: the weights have diverged, or "
                "a reward or a sampler's logprob in it is extreme (the newest step plan names its inputs). Begin a new "
                "run from the version before that: `tidemill weights checkout VERSION DIRECTORY`, then another "
                "run.run_id with trainer.model=DIRECTORY, and a lower trainer.optimizer.learning_rate or other rewards"
            )
        for name, parameter in self._parameters.items():
            self._masters[name].grad = None if parameter.grad is None else own_part(parameter.grad)
            parameter.grad = None
        if norm > self._settings.max_grad_norm:
            limit = self._settings.max_grad_norm
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), limit, norm, foreach=False)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round()
        return float(norm)

    def state(self) -> dict[str, Tensor]:
        """Return masters, moments and update counts under `kind/name` keys: everything that `load` needs."""
        state = {f"master/{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for kind, value in self._optimizer.state[master].items():
                state[f"{kind}/{name}"] = value
        return state

    def serving(self) -> dict[str, Tensor]:
        """Return a copy of the weights that the model computes with, in bf16; for sharded weights, the own rows."""
        return {name: own_part(p).to(torch.bfloat16, copy=True) for name, p in self._parameters.items()}

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other weights, in the form of `serving`, into the model; afterwards restore the rounded masters."""
        # Between two steps there are no gradients, which need as much memory as these copies.
        kept = {name: master.clone() for name, master in self._masters.items()} if self._in_parameters else {}
        try:
            self._hold(weights)
            yield
        finally:
            for name, master in kept.items():
                self._masters[name].copy_(master)
            self._round()

    @contextmanager
    def as_served(self) -> Iterator[None]:
        """Put the serving view into the model, on every rank; afterwards restore the weights that it computes with."""
        if self._matched:
            yield
            return
        try:
            self._hold(self._masters, self._quantised)
            yield
        finally:
            self._round()

    def restart(self, model: PreTrainedModel) -> None:
        """Load the weights of a whole model, without moments. Raises ValueError if it is another model."""
        whole = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
        self.load(
            {f"master/{name}": w[slice(*self.rows[name])] if name in self.rows else w for name, w in whole.items()}
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a saved state; for sharded weights, the own rows. Raises ValueError if it is of another model."""
        saved = {key.split("/", 1)[1]: value.shape for key, value in state.items() if key.startswith("master/")}
        own = {name: master.shape for name, master in self._masters.items()}
        if saved != own:
            odd = sorted(name for name in saved.keys() | own.keys() if saved.get(name) != own.get(name))
            raise ValueError(f"the saved state is of another model; tensors that differ: {', '.join(odd[:5])}")
        for name, master in self._masters.items():
            master.copy_(state[f"master/{name}"])
            moments = [key for key in state if key.split("/", 1)[1] == name and not key.startswith("master/")]
            moved = {key.split("/", 1)[0]: state[key].clone().to(master.device) for key in moments}
            self._optimizer.state[master] = moved
        self._round()

    def _round(self) -> None:
        if not self._in_parameters:
            self._hold(self._masters, self._quantised if self._matched else frozenset())

    @torch.no_grad()
    def _hold(self, weights: Mapping[str, Tensor], quantised: frozenset[str] = frozenset()) -> None:
        """Set the parameters to `weights` in bf16; those in `quantised` to the values of their codes and scales."""
        for name, parameter in self._parameters.items():
            own, values, form = own_part(parameter), weights[name], self._form
            if form is None or name not in quantised:
                own.copy_(values.to(torch.bfloat16))
            else:
                own.copy_(values)
                _hold_in(parameter, form)


@torch.no_grad()
def round_as_policy(model: PreTrainedModel, serving_format: ServingFormat, forward: Forward) -> None:
    """Round the weights of another model as `MasterWeights` rounds those of the policy; on every rank."""
    form = BLOCK_FORMATS.get(serving_format.value)
    quantised = frozenset() if form is None or forward is Forward.MASTERS else quantised_weights(model)
    # In the same order on all ranks, which gather the weights together.
    for name, parameter in model.named_parameters():
        if form is not None and name in quantised:
            _hold_in(parameter, form)
        else:
            own = own_part(parameter)
            own.copy_(own.to(torch.bfloat16))


def quantised_weights(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the weights that are stored in a format of few bits: those of linear layers and experts.

    Weights of the head, routers and gates are not included; routers and gates choose among few and are small. Raises
    ValueError for a model without such weights.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head, found = get_head() if get_head else None, set()
    for prefix, module in model.named_modules():
        linear = isinstance(module, torch.nn.Linear) and module is not head and not prefix.endswith(CHOOSERS)
        for name, parameter in module.named_parameters(prefix, recurse=False):
            # Experts are a stack of matrices.
            if (linear and parameter.dim() == 2) or parameter.dim() == 3:
                found.add(name)
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear weights: set trainer.serving_format to bf16")
    return frozenset(found)


def _hold_in(weight: Tensor, form: BlockFormat) -> None:
    own = own_part(weight)
    if form.rows > 1 and isinstance(weight, DTensor) and weight.dim() == 2:
        # A block may be split over two ranks, but its scale needs all of its rows.
        own.copy_(dequantise(quantise(weight.full_tensor(), form))[slice(*own_rows(weight))])
    else:
        own.copy_(dequantise(quantise(own, form)))


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory: its rows if sharded, otherwise all."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class OlderWeights:
    """A copy of the weights before a step, kept for the step after it, every `every` steps; 0: never."""

    def __init__(self, model: PreTrainedModel, masters: MasterWeights, ranks: Ranks, every: int) -> None:
        self._model, self._masters, self._ranks, self._every = model, masters, ranks, every
        self._kept: tuple[int, dict[str, Tensor]] | None = None
        self._due: tuple[int, dict[str, Tensor]] | None = None

    def begin(self, step: int, version: int) -> None:
        """Begin step `step`, before which the model has weight version `version`."""
        if not self._every:
            return
        self._due = self._kept if step % self._every == 0 else None
        self._kept = (version, self._masters.serving()) if (step + 1) % self._every == 0 else None

    def score(
        self, rows: Sequence[PackedRow], own: PackedRow, sampled: Sequence[Trajectory]
    ) -> tuple[int, Tensor] | None:
        """Score the first rows of a step after its update; None if it is not due, or no token is of the older version.

        Args:
            rows: the rows of all ranks; `own` is this rank's first row, on its device.
            sampled: the rollouts and interactions to which `PackedRow.sequence` refers.

        Returns:
            The version of the older weights, and f4[n]: the logprobs at these weights of the n sampled tokens of the
            rows, including tokens that another version sampled. On the first rank only.
        """
        due, self._due = self._due, None
        if due is None:
            return None
        version, weights = due
        first = rows[: self._ranks.size]
        records = {number for row in first for number in row.sequence.tolist()}
        if not any((sampled_versions(sampled[number]) == version).any() for number in records):
            return None
        with self._masters.holding(weights):
            logprobs = frozen_logprobs(self._model, own).cpu()
        # A rank without a row of its own computed the shortest row again: its result is left out.
        hands = self._ranks.gather(lambda: logprobs)
        return (version, torch.cat(list(hands[: len(first)]))) if self._ranks.is_first else None
