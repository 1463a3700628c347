"""The named choices of a configuration, and the machine that computes a step.

Separate from the arithmetic, so that reading a configuration does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class ObjectiveName(StrEnum):
    COMPOSER2 = "composer2"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    RLOO = "rloo"
    REINFORCE = "reinforce"
    DECOUPLED_PPO = "decoupled_ppo"


class BaselineKind(StrEnum):
    """Name of the baseline that is subtracted from the rewards of an online batch."""

    NONE = "none"
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    ARM = "arm"


class CorrectionKind(StrEnum):
    NONE = "none"
    TIS = "tis"
    MIS = "mis"
    SEQUENCE_TIS = "sequence_tis"
    SEQUENCE_MIS = "sequence_mis"
    GEOMETRIC = "geometric"


class Estimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Compute(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Experts(StrEnum):
    GROUPED = "grouped_mm"
    BATCHED = "batched_mm"
    EAGER = "eager"


class Routing(StrEnum):
    OFF = "off"
    OWN = "own"
    REPLAYED = "replayed"
    SHUFFLED = "shuffled"


class ServingFormat(StrEnum):
    BF16 = "bf16"
    FP8_BLOCKS = "fp8_blocks"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class ServingActivations(StrEnum):
    NONE = "none"
    FP8_ROWS = "fp8_rows"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Forward(StrEnum):
    MATCHED = "matched"
    MASTERS = "masters"


CORRECT_THEMSELVES = frozenset({ObjectiveName.DECOUPLED_PPO})
"""Objectives whose surrogate contains its own weight between sampler and trainer."""


MOST_RANKS = 1024
"""Maximum number of ranks for which a recorded hash is recognised."""
_DEVICES = {"cpu": "a CPU", "cuda": "a CUDA device"}


@dataclass(frozen=True, slots=True)
class StepMachine:
    """Kind of device, type of the computation, number of ranks. On one machine a step can be repeated bit for bit;
    between two machines the weights differ in a few bits."""

    device: str = "cpu"
    compute: str = "float32"
    ranks: int = 1

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded over the ranks, possibly over one rank, for another type than float32."""
        return self.ranks > 1 or self.compute != "float32"

    def arithmetic(self) -> dict[str, Any]:
        """Return the fields for the hash. Empty for one process on a CPU in float32, so that such steps keep the hash
        that they had before other machines were supported.
        """
        plain = asdict(ONE_PROCESS)
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def __str__(self) -> str:
        ranks = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} on {_DEVICES.get(self.device, self.device)} in {self.compute}"


def all_machines() -> Iterator[StepMachine]:
    """Yield every machine that a step can have been computed on."""
    for ranks in range(1, MOST_RANKS + 1):
        for device in _DEVICES:
            for compute in ("float32", "bfloat16"):
                yield StepMachine(device, compute, ranks)


ONE_PROCESS = StepMachine()
