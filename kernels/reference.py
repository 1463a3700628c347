"""The fingerprint by its definition, in whole-array numpy: the plain twin that the compiled loops must equal.

Slow and memory-hungry (eight bytes a lane for each element), and free of compilers: it settles what is right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidemill.kernels.fingerprint import Bits, Fingerprint, Indices, TensorKey

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def fingerprint_reference(bits: Bits, key: TensorKey, indices: Indices) -> Fingerprint:
    """Sum over elements of PRF(key, index) * (bits + 1) mod 2**64, a lane at a time. `bits` uN[n], `indices` i8[n]."""
    weights = bits.reshape(-1).astype(np.uint64) + np.uint64(1)
    return Fingerprint(*(int(np.sum(_prf(lane, indices) * weights, dtype=np.uint64)) for lane in (key.lo, key.hi)))


def _prf(key: int, indices: Indices) -> npt.NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014): output number `index` of the generator that starts at `key`."""
    state = np.uint64(key) + (indices.astype(np.uint64) + np.uint64(1)) * GAMMA
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return mixed
