"""How small a delta can get: what its positions and steps cost under two models of which elements change.

For N elements of which n change, p = n / N, with H the entropy in bits and h that of a yes-or-no choice:

    iid              N h(p) + n H(step)
    exponent class   sum over exponents e of the old patterns:  N_e h(n_e / N_e) + n_e H(step | e)

A step is how many representable values lie from the old pattern to the new one, signed (`kernels.elements`). The
second model uses what a receiver knows anyway: a small weight has close neighbours and changes more often. Types
without an exponent (integers) have one class, and both models agree.

Both are fitted to the very change they measure. A codec must also send what is fitted here for nothing (p_e and the
distributions of the steps), so on a small tensor it stays above; and a codec that knows more than the exponent may go
below. Neither counts names, fingerprints or digests. Counting streams: what is held is bounded by one part's changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.kernels.compare import changed_elements, count_exponents
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import Counts, Values, element_type, flat_bits, fold_steps
from tidemill.kernels.fingerprint import Bits
from tidemill.kernels.wire import DeltaError

EXACT_WIDTH = 16
"""Every step of patterns up to so many bits is told apart."""
LEADING_BITS = 12
"""Of the steps of wider patterns so many leading bits and the sign are, and the others taken as incompressible."""


@dataclass(frozen=True, slots=True)
class DeltaBounds:
    """The least cost of a change under each model."""

    elements: int
    changed: int
    iid: float
    """Bytes, when every element is equally likely to change."""
    exponent_class: float
    """Bytes, when that and the step depend on the old pattern's exponent."""

    def __add__(self, other: DeltaBounds) -> DeltaBounds:
        """The cost of two changes, each under a model of its own."""
        return DeltaBounds(
            self.elements + other.elements,
            self.changed + other.changed,
            self.iid + other.iid,
            self.exponent_class + other.exponent_class,
        )


NOTHING = DeltaBounds(0, 0, 0.0, 0.0)


class DeltaCounts:
    """How many elements of one type were seen and which steps they made, by the exponent of their old pattern.

    Memory: at most 8 bytes for each pair of exponent and step, of which only those seen are touched (bfloat16: 128 MiB
    if every step from every exponent occurs, some tens of KiB in training).
    """

    def __init__(self, dtype: str) -> None:
        """Start from nothing. Raises DeltaError for a type that a delta cannot carry."""
        self.kind = element_type(dtype)
        width = self.kind.width
        self._leading = width - 1 if width <= EXACT_WIDTH else LEADING_BITS
        classes = self.kind.exponents
        self._elements = np.zeros(classes, np.int64)
        # As many kinds of steps are told apart.
        kinds = 2 * (((width - 1 - self._leading) << (self._leading - 1)) + (1 << self._leading))
        self._steps = np.zeros((classes, kinds), np.int64)
        self._used = np.zeros(classes, np.int64)
        """How far each row of `_steps` is in use."""

    def count(self, old_bits: Bits, new_bits: Bits) -> None:
        """Count one tensor, or a part of one, before and after (uN, equal shapes). Raises DeltaError."""
        kind = self.kind
        old, new = flat_bits(old_bits, kind), flat_bits(new_bits, kind)
        if old.size != new.size:
            raise DeltaError(f"{old.size} elements became {new.size}: a delta keeps shapes")
        self._elements += count_exponents(kind, old)
        _, before, after = changed_elements(old, new)
        exponents = (before >> before.dtype.type(kind.mantissa_bits)) & before.dtype.type(kind.exponents - 1)
        _count(exponents, fold_steps(kind, before, after), self._leading, self._steps, self._used)

    def add(self, other: DeltaCounts) -> None:
        """Count what `other` has counted. Raises DeltaError for another element type."""
        if other.kind is not self.kind:
            raise DeltaError(f"counts of {other.kind.name} cannot be added to counts of {self.kind.name}")
        self._elements += other._elements
        np.maximum(self._used, other._used, out=self._used)
        for row in np.flatnonzero(other._used):
            self._steps[row, : other._used[row]] += other._steps[row, : other._used[row]]

    def bounds(self) -> DeltaBounds:
        n_all, n_changed, by_class = int(self._elements.sum()), 0, 0.0
        pooled = np.zeros(int(self._used.max()), np.int64)
        for row in np.flatnonzero(self._elements):
            steps = self._steps[row, : self._used[row]]
            changed = int(steps.sum())
            by_class += self._cost(int(self._elements[row]), changed, steps)
            n_changed += changed
            pooled[: steps.size] += steps
        return DeltaBounds(n_all, n_changed, self._cost(n_all, n_changed, pooled) / 8, by_class / 8)

    def _cost(self, elements: int, changed: int, steps: Counts) -> float:
        """Bits of which elements changed and by what, all drawn from one distribution."""
        where = _choice_bits(np.array([changed, elements - changed]))
        # Bits of the steps below their leading ones.
        below = np.maximum((np.arange(steps.size) >> self._leading) - 1, 0)
        return where + _choice_bits(steps) + float(np.dot(below, steps))


def _choice_bits(counts: Counts) -> float:
    """n H: bits to say which of some kinds each of n things is, when `counts` of each kind occur."""
    seen = counts[counts > 0].astype(np.float64)
    return float(seen.sum() * np.log2(seen.sum()) - np.sum(seen * np.log2(seen))) if seen.size else 0.0


@compiled
def _count(exponents: Bits, folded: Values, leading: int, steps: Counts, used: Counts) -> None:
    """Count steps by exponent and kind: a folded step's sign, and its length or the leading bits of that and place."""
    for i in range(folded.size):
        length, sign = np.int64(folded[i]) >> 1, np.int64(folded[i]) & 1
        below = 0
        while length >> below >= 1 << leading:
            below += 1
        kind = 2 * ((below << (leading - 1)) + (length >> below)) + sign
        exponent = np.int64(exponents[i])
        steps[exponent, kind] += 1
        used[exponent] = max(used[exponent], kind + 1)
