"""zstandard frames whose size is known before they are unpacked, so that hostile bytes cannot ask for memory."""

from __future__ import annotations

import zstandard

from tidemill.kernels.elements import DeltaError

LEVEL = 3


def compress(data: bytes) -> bytes:
    """One frame that states its content's size."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decompress(frame: memoryview, expected: int) -> memoryview:
    """The frame's content, which must say that it has `expected` bytes before it is unpacked, and then have them.

    Raises DeltaError.
    """
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != expected:
            raise DeltaError(f"the payload declares {declared} bytes where the block's header says {expected}")
        unpacked = zstandard.ZstdDecompressor().decompress(frame, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the payload is not a zstandard frame: {error}") from error
    if len(unpacked) != expected:
        raise DeltaError(f"the payload holds {len(unpacked)} bytes where the block's header says {expected}")
    return memoryview(unpacked)
