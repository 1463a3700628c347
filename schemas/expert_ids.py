"""Expert ids in packed form: the experts that a mixture of experts sent each token to.

They are stored as one NumPy `.npy` array, u1 or u2[tokens, layers, top_k] (u2 above 256 experts), the format of vLLM.
`layers` counts all decoder layers; the ids of a layer without experts have no meaning. The last token of a context has
no ids: it was sampled, but not computed.

The ids of a rollout are those of its segments with sampled tokens, in order. For each segment, they cover the tokens
before its last sampled one: the logprobs depend on these.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[np.unsignedinteger]
"""u1 or u2[tokens, layers, top_k]."""
_KINDS = (np.dtype("u1"), np.dtype("<u2"))


def packed_ids(ids: ExpertIds) -> bytes:
    """Return the ids as an `.npy` array."""
    stream = io.BytesIO()
    np.save(stream, ids, allow_pickle=False)
    return stream.getvalue()


def unpacked_ids(payload: bytes) -> ExpertIds:
    """Return the ids in an `.npy` array. Raises ValueError for other bytes."""
    stream = io.BytesIO(payload)
    try:
        version = np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]  # NumPy has no types here
        if version != (1, 0):
            raise ValueError(f"its format is {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-untyped-call]
    except Exception as error:  # NumPy parses the header as Python, and raises errors of many types
        raise ValueError(f"expert ids are not an .npy array: {error}") from error
    if dtype not in _KINDS or len(shape) != 3 or by_columns:
        raise ValueError(f"expert ids are {dtype}{list(shape)}, expected u1 or u2[tokens, layers, top_k]")
    # The number of values is that of the bytes that exist: a header may claim any number.
    found = np.frombuffer(payload, dtype, offset=stream.tell())
    if found.size != np.prod(shape, dtype=object):
        raise ValueError(f"expert ids are truncated: {found.size} values for {list(shape)}")
    return found.reshape(shape)
