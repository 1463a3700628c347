"""Quantised activations: the inputs of the layers whose weights have a serving format are rounded, row by row.

A row is a token. The rounding is that of the replicas (`kernels.quantise.round_rows`), at the same places: the input of
each linear layer in `master.quantised_weights`, and in experts also the input of their second product. Gradients pass
the rounding unchanged (straight-through); those of the weights are computed from the rounded inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tidemill.kernels.quantise import BlockFormat, round_rows
from tidemill.trainer.attention import UntrainableModelError
from tidemill.trainer.choices import Experts


def quantise_activations(model: PreTrainedModel, quantised: Collection[str], form: BlockFormat) -> None:
    """Make `model` round its activations to `form`; call it once, after the model was checked and sharded.

    Args:
        quantised: names of the weights whose inputs are rounded (`master.quantised_weights`).

    Raises UntrainableModelError if the model has experts whose second product cannot be reached.
    """
    rounding = InputRounding(form)
    for prefix in sorted({name.rpartition(".")[0] for name in quantised}):
        layer = model.get_submodule(prefix)
        if not isinstance(layer, nn.Linear):
            # The input of the second product of stacked experts is the result of their gate, a method of transformers.
            gate, config = getattr(layer, "_apply_gate", None), getattr(layer, "config", None)
            used = getattr(config, "_experts_implementation", None)
            if gate is None or not getattr(layer, "has_gate", False) or used not in (Experts.GROUPED, Experts.BATCHED):
                raise UntrainableModelError(
                    f"trainer.serving_activations: the experts {prefix} ({type(layer).__name__}, computed by {used}) "
                    f"do not show the input of their second product; set trainer.experts to {Experts.GROUPED} or "
                    f"{Experts.BATCHED}, or trainer.serving_activations to none"
                )
            layer._apply_gate = partial(_rounded_gate, gate, rounding)
        layer.register_forward_pre_hook(rounding.before)


class InputRounding:
    """Rounds inputs to `form`. Layers that are called in turn with the same input, such as the projections of an
    attention layer, get the same rounded tensor: it is computed, and kept for the backward pass, only once."""

    def __init__(self, form: BlockFormat) -> None:
        self._form = form
        self._last: tuple[Tensor, int, bool, Tensor] | None = None
        """The last input, its version, whether gradients were recorded, and the rounded tensor."""

    def before(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs of a layer with the first one rounded: a forward pre-hook."""
        rows, recorded, last = inputs[0], torch.is_grad_enabled(), self._last
        if last is None or last[0] is not rows or last[1:3] != (rows._version, recorded):
            last = self._last = rows, rows._version, recorded, self.rounded(rows)
        return last[3], *inputs[1:]

    def rounded(self, rows: Tensor) -> Tensor:
        """Return rows [..., C] rounded, with a gradient."""
        made: Tensor = _StraightThrough.apply(rows, self._form)  # type: ignore[no-untyped-call]
        return made


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, rows: Tensor, form: BlockFormat) -> Tensor:  # noqa: ANN401 - torch's context
        return round_rows(rows, form)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return gradient, None


def _rounded_gate(gate: Any, rounding: InputRounding, product: Tensor) -> Tensor:  # noqa: ANN401 - a method
    return rounding.rounded(gate(product))
