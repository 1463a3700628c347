"""Lower bounds for the size of a delta: the cost of its positions and steps under two models of the changed elements.

For N elements of which n change, p = n / N, with H the entropy in bits and h that of a yes-or-no choice:

    iid              N h(p) + n H(step)
    exponent class   sum over exponents e of the old patterns:  N_e h(n_e / N_e) + n_e H(step | e)

A step is the signed number of representable values from the old pattern to the new one (`kernels.elements`). The
second model uses information that the receiver has: a small weight has close neighbours and changes more often. Types
without an exponent (integers) have one class, and both models agree.

Both are fitted to the same change that they measure. A codec must also send the fitted values (p_e and the
distributions of the steps), so for a small tensor its size is above the bound; a codec that uses more than the exponent
can be below it. Neither counts names, fingerprints or digests. Memory is bounded by the changes of one counted part.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.kernels.classes import count_exponents
from tidemill.kernels.compiled import Bits, Counts, Values, compiled
from tidemill.kernels.elements import changed_elements, element_type, flat_bits, fold_steps
from tidemill.kernels.wire import DeltaError

EXACT_WIDTH = 16
"""For patterns of up to this number of bits, every step is counted exactly."""
LEADING_BITS = 12
"""For wider patterns, this number of leading bits of a step and its sign are counted; the rest is incompressible."""


@dataclass(frozen=True, slots=True)
class DeltaBounds:
    """The least cost of a change under each model."""

    elements: int
    changed: int
    iid: float
    """Bytes, when every element is equally likely to change."""
    exponent_class: float
    """Bytes, when the probability of a change and the step depend on the old pattern's exponent."""

    def __add__(self, other: DeltaBounds) -> DeltaBounds:
        """Add the costs of two changes, each under its own model."""
        return DeltaBounds(
            self.elements + other.elements,
            self.changed + other.changed,
            self.iid + other.iid,
            self.exponent_class + other.exponent_class,
        )


NOTHING = DeltaBounds(0, 0, 0.0, 0.0)


class DeltaCounts:
    """Counts of the elements of one type and of their steps, by the exponent of the old pattern.

    Memory: at most 8 bytes for each pair of exponent and step; only pairs that occur use memory (bfloat16: 128 MiB
    if every step from every exponent occurs, some tens of KiB in training).
    """

    def __init__(self, dtype: str) -> None:
        """Start with zero counts. Raises DeltaError for a type that a delta cannot carry."""
        self.kind = element_type(dtype)
        width = self.kind.width
        self._leading = width - 1 if width <= EXACT_WIDTH else LEADING_BITS
        classes = self.kind.exponents
        self._elements = np.zeros(classes, np.int64)
        # The number of kinds of steps that are counted separately.
        kinds = 2 * (((width - 1 - self._leading) << (self._leading - 1)) + (1 << self._leading))
        self._steps = np.zeros((classes, kinds), np.int64)
        self._used = np.zeros(classes, np.int64)
        """Length of the used part of each row of `_steps`."""

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
        """Add the counts of `other`. Raises DeltaError for another element type."""
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
        """Compute the bits for positions and steps, all from one distribution."""
        where = _choice_bits(np.array([changed, elements - changed]))
        # Number of low bits of each kind of step, after the leading ones.
        below = np.maximum((np.arange(steps.size) >> self._leading) - 1, 0)
        return where + _choice_bits(steps) + float(np.dot(below, steps))


def _choice_bits(counts: Counts) -> float:
    """Compute n H: the bits that name the kind of each of n things, when `counts` of each kind occur."""
    seen = counts[counts > 0].astype(np.float64)
    return float(seen.sum() * np.log2(seen.sum()) - np.sum(seen * np.log2(seen))) if seen.size else 0.0


@compiled
def _count(exponents: Bits, folded: Values, leading: int, steps: Counts, used: Counts) -> None:
    """Count steps by exponent and kind: a folded step's sign, and its length or the length's leading bits and shift."""
    for i in range(folded.size):
        length, sign = np.int64(folded[i]) >> 1, np.int64(folded[i]) & 1
        below = 0
        while length >> below >= 1 << leading:
            below += 1
        kind = 2 * ((below << (leading - 1)) + (length >> below)) + sign
        exponent = np.int64(exponents[i])
        steps[exponent, kind] += 1
        used[exponent] = max(used[exponent], kind + 1)
