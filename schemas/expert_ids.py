"""Expert ids: the experts that a mixture of experts sent each token to, packed.

They travel as one NumPy `.npy` array, u1 or u2[tokens, layers, top_k] (u2 above 256 experts), which is how vLLM gives
them. `layers` counts all decoder layers; the ids of a layer without experts mean nothing. The last token of a context
has none: it was sampled, and not computed.

The ids of a rollout are those of its segments with sampled tokens, in order: of each segment the tokens before its last
sampled one, which are those that a logprob depends on.
"""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

ExpertIds = npt.NDArray[np.unsignedinteger]
"""u1 or u2[tokens, layers, top_k]."""
_KINDS = (np.dtype("u1"), np.dtype("<u2"))


def packed_ids(ids: ExpertIds) -> bytes:
    """The ids as an `.npy` array."""
    stream = io.BytesIO()
    np.save(stream, ids, allow_pickle=False)
    return stream.getvalue()


def unpacked_ids(payload: bytes) -> ExpertIds:
    """The ids in an `.npy` array. Raises ValueError for bytes that are something else."""
    stream = io.BytesIO(payload)
    try:
        version = np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]  # NumPy has no types here
        if version != (1, 0):
            raise ValueError(f"its format is {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-untyped-call]
    except Exception as error:  # NumPy parses the header as Python, and raises errors of many types
        raise ValueError(f"expert ids are no .npy array: {error}") from error
    if dtype not in _KINDS or len(shape) != 3 or by_columns:
        raise ValueError(f"expert ids are {dtype}{list(shape)}, expected u1 or u2[tokens, layers, top_k]")
    # Cut from the bytes that are there: a header may speak of any number of them.
    found = np.frombuffer(payload, dtype, offset=stream.tell())
    if found.size != np.prod(shape, dtype=object):
        raise ValueError(f"expert ids are cut short: {found.size} values for {list(shape)}")
    return found.reshape(shape)
