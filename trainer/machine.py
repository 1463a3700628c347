"""The machine that a step is computed on, as far as it shapes the bits of the result. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

MOST_RANKS = 1024
"""Ranks up to which a recorded hash is recognised."""
_DEVICES = {"cpu": "a CPU", "cuda": "a CUDA device"}


@dataclass(frozen=True, slots=True)
class StepMachine:
    """Kind of device, type of the computation, number of ranks. Within one of them a step can be repeated bit for bit;
    between two of them the weights differ in a few bits."""

    device: str = "cpu"
    compute: str = "float32"
    ranks: int = 1

    @property
    def is_sharded(self) -> bool:
        """Whether the model is laid over the ranks, be it over one for a computation in another type than float32."""
        return self.ranks > 1 or self.compute != "float32"

    def arithmetic(self) -> dict[str, Any]:
        """What of it belongs in a hash. Empty for one process on a CPU in float32, whose steps keep the hash that they
        had when there was no other machine."""
        plain = asdict(ONE_PROCESS)
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def __str__(self) -> str:
        ranks = "one process" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{ranks} on {_DEVICES.get(self.device, self.device)} in {self.compute}"


def all_machines() -> Iterator[StepMachine]:
    """Every machine that a step can have been computed on."""
    for ranks in range(1, MOST_RANKS + 1):
        for device in _DEVICES:
            for compute in ("float32", "bfloat16"):
                yield StepMachine(device, compute, ranks)


ONE_PROCESS = StepMachine()
