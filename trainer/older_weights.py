"""Some tokens of a step, scored at the older weights that sampled them.

It tells what the engines make of equal weights from what the weights learnt since, where no token is of the weights
that the trainer holds. Every so many steps a copy of the weights is kept for one step, and the first row of each rank
is scored at it, without gradient. The weights under training are as before afterwards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.kernels.weights.ranks import Ranks
from tidemill.trainer.batch import PackedRow, Trajectory, sampled_versions
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.policy import frozen_logprobs


@dataclass(frozen=True, slots=True)
class OlderScores:
    """The tokens of the first rows of a step, at older weights. Of all ranks, on the first one."""

    version: int
    """Of these weights."""
    logprobs: Tensor
    """f4[n]: of the n sampled tokens of the rows, whatever version sampled them."""


class OlderWeights:
    """Keeps the weights before a step for the step after it, every `every` steps; 0: never."""

    def __init__(self, model: PreTrainedModel, masters: MasterWeights, ranks: Ranks, every: int) -> None:
        self._model, self._masters, self._ranks, self._every = model, masters, ranks, every
        self._kept: tuple[int, dict[str, Tensor]] | None = None
        self._due: tuple[int, dict[str, Tensor]] | None = None

    def begin(self, step: int, version: int) -> None:
        """Step `step` begins, and the model holds weight version `version`."""
        if not self._every:
            return
        self._due = self._kept if step % self._every == 0 else None
        self._kept = (version, self._masters.serving()) if (step + 1) % self._every == 0 else None

    def score(self, rows: Sequence[PackedRow], own: PackedRow, sampled: Sequence[Trajectory]) -> OlderScores | None:
        """Score the first rows of a step whose masters hold its outcome; None where it is not due, or is of no use.

        Args:
            rows: of all ranks; `own` is this rank's first one, on its device.
            sampled: what the tokens of `rows` are of, by `PackedRow.sequence`.
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
        # A rank without a row of its own has the shortest one once more: what it found is left out.
        hands = self._ranks.gather(lambda: logprobs)
        return OlderScores(version, torch.cat(list(hands[: len(first)]))) if self._ranks.is_first else None
