"""The coder that comes within a few per cent of what a block's changes must cost: geometric gaps, fitted steps, rANS.

models     u1 for each class with changes: its gaps' model (`kernels.gap_models`)
tables     bits: for each class with changes, 1 and a table of steps (`kernels.step_tables`), or 0: as before
words      how many 16-bit words, a varint; both states, 5 bytes each; the words
low bits   what is not entropy-coded (`kernels.rans`)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tidemill.kernels import gap_models, rans, step_tables
from tidemill.kernels.classes import ClassStreams, Counts
from tidemill.kernels.coder import Coder
from tidemill.kernels.compiled import compiled
from tidemill.kernels.elements import DeltaError, Values
from tidemill.kernels.gap_models import ALL_ZERO, MODELS, gap_tables, low_bits, model_of, table_of
from tidemill.kernels.rans import Reciprocals, reciprocals
from tidemill.kernels.step_tables import StepTable, fit_tables
from tidemill.kernels.wire import BitReader, BitWriter, WireReader, varint

STATE_BYTES = 5
PROBLEMS = {rans.TRUNCATED: "ends early", rans.OVERLONG: "leaves its block", rans.LEFT_OVER: "has bytes to spare"}


class RansCoder(Coder):
    """rANS over computed and fitted tables."""

    code: ClassVar[int] = 1

    def encode(self, streams: ClassStreams) -> bytes:
        counts = streams.counts[streams.counts > 0]
        ends = np.cumsum(counts).tolist()
        begins = [0, *ends[:-1]]
        models = [model_of(int(_sum(streams.gaps[a:b])), b - a) for a, b in zip(begins, ends, strict=True)]
        tables = fit_tables(streams.steps, counts)
        plan = _Plan.of(models, tables)
        common = streams.gaps, streams.steps, counts, plan.tables, plan.low_bits, plan.directed, gap_tables().last
        raw = np.empty(streams.gaps.size + 2, np.uint64)
        n_raw = -(-rans.write_low_bits(*common, raw) // 8)
        words = np.empty(2 * streams.gaps.size, np.uint16)
        step_codes = reciprocals(plan.step_start, plan.step_frequency, step_tables.TOTAL)
        first, *states = rans.encode_symbols(*common, _gap_codes(), step_codes, words)
        stored = raw.astype("<u8", copy=False).view(np.uint8)[:n_raw]
        return write_fields(models, tables, states, words[first:], stored.tobytes())

    def decode(self, payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
        source = WireReader(payload)
        used = counts[counts > 0]
        models = list(source.take(used.size))
        if any(model >= MODELS and model != ALL_ZERO for model in models):
            raise DeltaError(f"unknown gap models among {models}")
        bits = BitReader(source)
        tables = [StepTable.read(bits) if bits.get(1) else None for _ in range(used.size)]
        bits.close()
        if tables and tables[0] is None:
            raise DeltaError("the first class has no table of steps")
        plan = _Plan.of(models, tables)
        n_words = source.varint()
        gap_state = int.from_bytes(source.take(STATE_BYTES), "little")
        step_state = int.from_bytes(source.take(STATE_BYTES), "little")
        words = _padded(source.take(2 * n_words), "<u2")
        low_bits_read = source.rest()
        raw = _padded(low_bits_read, "<u8")
        gaps, steps = np.empty(int(used.sum()), np.uint32), np.empty(int(used.sum()), np.uint32)
        problem = rans.decode_changes(
            words, raw, n_words, len(low_bits_read), gap_state, step_state, used, plan.tables, plan.low_bits,
            plan.directed, gap_tables(), plan.step_start, plan.step_frequency, plan.step_symbol, n_elements,
            gaps, steps,
        )  # fmt: skip
        if problem != rans.GOOD:
            raise DeltaError(f"an entropy-coded stream {PROBLEMS[problem]}")
        return ClassStreams(counts, gaps, steps)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What the loops need to know of each class with changes."""

    tables: Counts
    low_bits: Counts
    directed: npt.NDArray[np.uint8]
    step_start: npt.NDArray[np.uint64]
    step_frequency: npt.NDArray[np.uint64]
    step_symbol: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, models: list[int], tables: list[StepTable | None]) -> _Plan:
        n = len(models)
        plan = cls(
            np.array([rans.NO_GAPS if model == ALL_ZERO else table_of(model) for model in models], np.int64),
            np.array([0 if model == ALL_ZERO else low_bits(model) for model in models], np.int64),
            np.zeros(n, np.uint8),
            np.zeros((n, step_tables.TOKENS), np.uint64),
            np.zeros((n, step_tables.TOKENS), np.uint64),
            np.zeros((n, step_tables.TOTAL), np.uint8),
        )
        for which, table in enumerate(tables):
            plan._set(which, table)
        return plan

    def _set(self, which: int, table: StepTable | None) -> None:
        rows = self.directed, self.step_start, self.step_frequency, self.step_symbol
        if table is None:
            for row in rows:
                row[which] = row[which - 1]
            return
        frequencies = table.frequencies()
        self.directed[which] = table.directed
        self.step_frequency[which, : frequencies.size] = frequencies
        self.step_start[which, : frequencies.size] = np.cumsum(frequencies) - frequencies
        self.step_symbol[which] = np.repeat(np.arange(frequencies.size), frequencies)


def write_fields(
    models: list[int], tables: list[StepTable | None], states: list[int], words: npt.ArrayLike, raw: bytes
) -> bytes:
    """All fields in their order."""
    stream = np.asarray(words, "<u2")
    out = BitWriter()
    for table in tables:
        out.put(int(table is not None), 1)
        if table is not None:
            table.write(out)
    return b"".join(
        (
            bytes(models),
            out.getvalue(),
            varint(stream.size),
            *(state.to_bytes(STATE_BYTES, "little") for state in states),
            stream.tobytes(),
            raw,
        )
    )


@cache
def _gap_codes() -> Reciprocals:
    return reciprocals(gap_tables().start, gap_tables().frequency, gap_models.TOTAL)


def _padded(data: memoryview, kind: str) -> npt.NDArray[Any]:
    """Little-endian numbers, the last of them filled up with zeros, and `rans.PADDING` zeros more, to be read here."""
    stored = np.dtype(kind)
    row = np.zeros(-(-len(data) // stored.itemsize) + rans.PADDING, stored)
    row.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return row.astype(stored.newbyteorder("="), copy=False)


@compiled
def _sum(values: Values) -> int:
    total = np.uint64(0)
    for i in range(values.size):
        total += np.uint64(values[i])
    return int(total)
