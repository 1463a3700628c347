"""What the engine reports of an update and of its live tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class WriteRefusedError(ValueError):
    """Ranks of the engine could not write a version; the message names them and the reasons."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one in-place update cost the engine; milliseconds."""

    apply_ms: float
    pause_ms: float
    """How long the engine's loop was held, between two steps."""
    decode_step_ms: float
    """The engine's own median time between steps over the last seconds; 0 when idle."""
    requests_in_flight: int
    stage_ms: float = 0.0
    """How long the slowest rank prepared its write before the engine was held, while tokens flowed."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Fingerprints computed from the engine's live tensors."""

    total: str
    """Sum over the tensors, hexadecimal; empty when an element is no version's value."""
    tensors: Mapping[str, str]
    damage: str
    """Why there is no fingerprint; empty when there is one."""
    proof_ms: float

    def objection(self, expected: str, tensors: Mapping[str, str]) -> str:
        """Why the live tensors are not the version with these fingerprints; empty when they are."""
        if self.damage:
            return self.damage
        wrong = sorted(name for name, value in tensors.items() if self.tensors.get(name) != value)
        if wrong:
            return f"{len(wrong)} live tensors are not the version's, the first is {wrong[0]}"
        return "" if self.total == expected else "the live tensors' fingerprints do not add up to the version's"
