"""All coders by their code, and which of them codes a block."""

from __future__ import annotations

import numpy as np

from tidemill.kernels.classes import ClassStreams, Counts
from tidemill.kernels.coder import Coder
from tidemill.kernels.coder_pcodec import PcodecCoder
from tidemill.kernels.coder_rans import RansCoder
from tidemill.kernels.coder_zstd import ZstdCoder
from tidemill.kernels.compiled import compiled
from tidemill.kernels.information import BIT, choice_cost, kind_cost
from tidemill.kernels.settings import CoderChoice
from tidemill.kernels.step_tables import LANES, TOKENS, token_of
from tidemill.kernels.ulp_steps import Values

RANS, PCODEC, ZSTD = RansCoder(), PcodecCoder(), ZstdCoder()
CODERS: dict[int, Coder] = {coder.code: coder for coder in (RANS, PCODEC, ZSTD)}
CHOICES: dict[CoderChoice, Coder] = {"auto": RANS, "rans": RANS, "pcodec": PCODEC, "zstd": ZSTD}
WORTH = 20
"""Another model of the gaps is tried where it promises to save 1 / 20 of the geometric one's bits."""


def encode_streams(streams: ClassStreams, choice: CoderChoice) -> tuple[int, bytes]:
    """The code of the coder that was chosen, or found to be the smallest, and its bytes."""
    coder = CHOICES[choice]
    coded = coder.encode(streams)
    if choice == "auto":
        geometric, binned = _gap_costs(streams.gaps, streams.counts, np.zeros((LANES, TOKENS), np.int64))
        if geometric - binned > geometric // WORTH:
            other = PCODEC.encode(streams)
            if len(other) < len(coded):
                return PCODEC.code, other
    return coder.code, coded


@compiled
def _gap_costs(gaps: Values, counts: Counts, lanes: Counts) -> tuple[int, int]:
    """What the gaps cost if they are geometric, class by class, and if their orders of magnitude are counted."""
    geometric, binned = 0, 0
    i = np.uint64(0)
    for count in counts:
        lanes[:] = 0
        places, low_bits = np.uint64(count), np.uint64(0)
        for _ in range(count):
            token, low = token_of(np.uint64(gaps[i]))
            lanes[i % np.uint64(LANES), token] += 1
            low_bits += low
            places += np.uint64(gaps[i])
            i += np.uint64(1)
        geometric += choice_cost(int(places), count)
        binned += kind_cost(lanes.sum(axis=0)) + int(low_bits) * BIT
    return geometric, binned
