"""The names that a configuration chooses from. Kept apart from the arithmetic, so that reading it imports no torch."""

from __future__ import annotations

from enum import StrEnum


class ObjectiveName(StrEnum):
    """Name of an objective."""

    COMPOSER2 = "composer2"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    GSPO = "gspo"
    CISPO = "cispo"
    RLOO = "rloo"
    REINFORCE = "reinforce"
    DECOUPLED_PPO = "decoupled_ppo"


class AdvantageKind(StrEnum):
    """Name of a way to turn a group's rewards into advantages."""

    CENTRED = "centred"
    STANDARDISED = "standardised"
    LEAVE_ONE_OUT = "leave_one_out"
    RAW = "raw"


class BaselineKind(StrEnum):
    """Name of what is subtracted from the rewards of an online batch."""

    NONE = "none"
    MEAN = "mean"
    LEAVE_ONE_OUT = "leave_one_out"
    ARM = "arm"


class CorrectionKind(StrEnum):
    """Name of a correction."""

    NONE = "none"
    TIS = "tis"
    MIS = "mis"
    SEQUENCE_TIS = "sequence_tis"
    SEQUENCE_MIS = "sequence_mis"
    GEOMETRIC = "geometric"


class Estimator(StrEnum):
    """Name of a KL estimator."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class Compute(StrEnum):
    """Name of the type that a step is computed in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Experts(StrEnum):
    """Name of an implementation of experts in transformers."""

    GROUPED = "grouped_mm"
    BATCHED = "batched_mm"
    EAGER = "eager"


class Routing(StrEnum):
    """Name of a way to route tokens to experts."""

    OFF = "off"
    OWN = "own"
    REPLAYED = "replayed"
    SHUFFLED = "shuffled"


class ServingFormat(StrEnum):
    """Name of a format of the serving weights."""

    BF16 = "bf16"
    FP8_BLOCKS = "fp8_blocks"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Forward(StrEnum):
    """Name of the weights that the trainer computes with."""

    MATCHED = "matched"
    MASTERS = "masters"


CORRECT_THEMSELVES = frozenset({ObjectiveName.DECOUPLED_PPO})
"""Objectives whose surrogate holds its own weight between sampler and trainer."""
