"""What an encoder may choose. Nothing here is needed to decode: a block says of itself how it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tidemill.kernels.elements import DeltaError

CoderChoice = Literal["auto", "rans", "pcodec", "zstd"]
DigestChoice = Literal["xxh3", "blake3"]

BLOCK_ELEMENTS = 1 << 24
"""Elements of the largest block; memory on both sides is bounded by it."""


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """How blocks are cut, coded and sealed. Raises DeltaError for a block size that no decoder takes."""

    block_elements: int = BLOCK_ELEMENTS
    """Largest number of elements of a block, 1 to `BLOCK_ELEMENTS`."""
    coder: CoderChoice = "auto"
    """Entropy coder of sparse blocks; "auto" takes the smallest."""
    digest: DigestChoice = "xxh3"
    """Digest over a block's bytes: xxh3-128 finds damage; blake3 also withstands malice."""

    def __post_init__(self) -> None:
        if not 0 < self.block_elements <= BLOCK_ELEMENTS:
            raise DeltaError(f"blocks have 1 to {BLOCK_ELEMENTS} elements, not {self.block_elements}")
