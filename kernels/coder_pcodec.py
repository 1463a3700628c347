"""The coder for gaps of any distribution: pcodec, which sends the bins that it finds.

gaps       varint length, then a pcodec file of u4
steps      a pcodec file of u4
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pcodec import ChunkConfig, standalone

from tidemill.kernels.classes import ClassStreams, Counts
from tidemill.kernels.coder import Coder
from tidemill.kernels.coder_zstd import checked
from tidemill.kernels.elements import DeltaError, Values
from tidemill.kernels.wire import WireReader, varint


class PcodecCoder(Coder):
    """pcodec over gaps and steps."""

    code: ClassVar[int] = 2

    def encode(self, streams: ClassStreams) -> bytes:
        """See `Coder.encode`."""
        gaps: bytes = standalone.simple_compress(streams.gaps, ChunkConfig())
        steps: bytes = standalone.simple_compress(streams.steps, ChunkConfig())
        return varint(len(gaps)) + gaps + steps

    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        """See `Coder.decode`."""
        source, changed = WireReader(payload), int(counts.sum())
        gaps = _numbers(source.take(source.varint()), changed)
        return ClassStreams(counts, *checked(gaps, _numbers(source.rest(), changed), n_elements))


def _numbers(data: memoryview, n: int) -> Values:
    """Exactly `n` numbers, in memory that is allocated here."""
    numbers = np.zeros(n, np.uint32)
    try:
        progress = standalone.simple_decompress_into(bytes(data), numbers)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not even an Exception
        raise DeltaError(f"not a pcodec stream: {error}") from error
    if progress.n_processed != n or not progress.finished:
        raise DeltaError(f"a pcodec stream of other than {n} numbers")
    return numbers
