"""How often each exponent occurs among some weights."""

from __future__ import annotations

import numpy as np

from tidemill.kernels.classes import SEGMENT, Active, Counts
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import ElementType, Form, form_of
from tidemill.kernels.fingerprint import Bits

LANES = 4
"""Counters of each exponent that take turns, so that none waits for itself."""


def count_exponents(kind: ElementType, bits: Bits) -> Counts:
    """i8[exponents]: how often each exponent occurs in `bits` (uN[n], contiguous)."""
    lanes = np.zeros((LANES, kind.exponents), np.int64)
    _count(bits, form_of(kind), lanes)
    counts: Counts = lanes.sum(axis=0)
    return counts


def count_active_exponents(kind: ElementType, bits: Bits, active: Active, run: int, every: int) -> Counts:
    """The same of the active segments of `bits` alone, and of those of the first `run` of each `run` * `every`."""
    lanes = np.zeros((LANES, kind.exponents), np.int64)
    _count_active(bits, active, form_of(kind), run, every, lanes)
    counts: Counts = lanes.sum(axis=0)
    return counts


@compiled
def _count(bits: Bits, form: Form, lanes: Counts) -> None:
    shift, mask = form[0], form[1]
    whole = bits.size // LANES * LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[np.uint64(lane), (np.uint64(bits[first + lane]) >> shift) & mask] += 1
    for i in range(whole, bits.size):
        lanes[np.uint64(0), (np.uint64(bits[i]) >> shift) & mask] += 1


@compiled
def _count_active(bits: Bits, active: Active, form: Form, run: int, every: int, lanes: Counts) -> None:
    met = 0
    for segment in range(active.size):
        if active[segment]:
            if met // run % every == 0:
                _count(bits[segment * SEGMENT : (segment + 1) * SEGMENT], form, lanes)
            met += 1
