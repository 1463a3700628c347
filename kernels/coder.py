"""What turns the class streams of a block into bytes and back: one base, one file and one code on the wire a coder.

A coder sees gaps and steps class by class and nothing of the weights, so that its bytes can be checked and decoded
before, or elsewhere than, the weights that they change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from tidemill.kernels.classes import ClassStreams, Counts


class Coder(ABC):
    """One way to code class streams."""

    code: ClassVar[int]
    """Its number in a block."""

    @abstractmethod
    def encode(self, streams: ClassStreams) -> bytes:
        """The streams' gaps and steps as bytes; their counts are known to the decoder."""

    @abstractmethod
    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        """The inverse of `encode`, for the `counts` (i8[classes]) of a block of `n_elements`.

        Memory is bounded by the counts. Raises DeltaError and nothing else when the bytes do not hold exactly that, or
        a gap is longer than the block.
        """
