"""Reading and writing the small fields of a block: bytes, variable-length integers and single bits, bounds-checked.

Zstandard frames declare their size before they are unpacked, so hostile bytes cannot make the reader allocate memory.
"""

from __future__ import annotations

import zstandard


class DeltaError(ValueError):
    """The bytes are not a delta, or not one for these weights; the message gives the reason. Nothing was written."""


VARINT_BYTES = 7
"""Greatest length of an integer, which is below 2**49."""


def varint(value: int) -> bytes:
    """Encode a non-negative integer below 2**49, seven bits per byte, lowest first; a set top bit means more bytes."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class WireReader:
    """Reader of fields from the beginning of some bytes; a field beyond their end raises DeltaError."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise DeltaError(f"a field of {size} bytes exceeds the {len(self._data) - self._at} bytes that remain")
        self._at += size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        """Read the next variable-length integer, which must have its shortest form."""
        value = 0
        for place in range(VARINT_BYTES):
            byte = self.byte()
            value |= (byte & 127) << 7 * place
            if byte < 128:
                if byte == 0 and place:
                    raise DeltaError("an integer is not in its shortest form")
                return value
        raise DeltaError(f"an integer of more than {VARINT_BYTES} bytes")

    def rest(self) -> memoryview:
        return self.take(len(self._data) - self._at)


class BitWriter:
    """Writer of small integers of given widths as bytes, lowest bits first."""

    def __init__(self) -> None:
        self._value = 0
        self._width = 0

    def put(self, value: int, width: int) -> None:
        """Append `value`, below 2**width."""
        self._value |= value << self._width
        self._width += width

    def getvalue(self) -> bytes:
        """Return all bits so far, padded with zeros to whole bytes."""
        return self._value.to_bytes(-(-self._width // 8), "little")


class BitReader:
    """Reader of the integers that a `BitWriter` wrote; reads a byte from a `WireReader` only when it is needed."""

    def __init__(self, source: WireReader) -> None:
        self._source = source
        self._value = 0
        self._width = 0

    def get(self, width: int) -> int:
        """Read the next integer of `width` bits."""
        while self._width < width:
            self._value |= self._source.byte() << self._width
            self._width += 8
        value = self._value & ((1 << width) - 1)
        self._value >>= width
        self._width -= width
        return value

    def close(self) -> None:
        """Raise DeltaError unless the padding of the last byte is zero."""
        if self._value:
            raise DeltaError("the padding after the last bit is not zero")


LEVEL = 3


def compress(data: bytes) -> bytes:
    """Compress to one frame that declares its content's size."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(data)


def decompress(frame: memoryview, expected: int) -> memoryview:
    """Unpack a frame, which must declare `expected` bytes before it is unpacked, and then contain them.

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
        raise DeltaError(f"the payload has {len(unpacked)} bytes where the block's header says {expected}")
    return memoryview(unpacked)
