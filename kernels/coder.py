"""Coders: from the class streams of a block to bytes and back, each with its code in the block.

A coder reads only gaps and steps, class by class, and no weights, so that its bytes can be checked and decoded before
the weights are available, or in another place. "auto" chooses rANS, whose size is within a few per cent of the least
possible for a block's changes, unless pcodec is smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pcodec import ChunkConfig, standalone

from tidemill.kernels import rans
from tidemill.kernels.block import CoderChoice
from tidemill.kernels.classes import ClassStreams
from tidemill.kernels.compiled import Counts, Values, compiled
from tidemill.kernels.models import (
    ALL_ZERO,
    BIT,
    GAP_TOTAL,
    MODELS,
    STEP_TOTAL,
    TOKEN_LANES,
    TOKENS,
    StepTable,
    choice_cost,
    fit_tables,
    gap_tables,
    kind_cost,
    low_bits,
    model_of,
    table_of,
    token_of,
)
from tidemill.kernels.rans import ClassPlan, Reciprocals, reciprocals
from tidemill.kernels.wire import BitReader, BitWriter, DeltaError, WireReader, compress, decompress, varint


class Coder(NamedTuple):
    """One way to code class streams."""

    code: int
    """Its number in a block."""
    encode: Callable[[ClassStreams], bytes]
    """Return the streams' gaps and steps as bytes; the decoder knows their counts."""
    decode: Callable[[memoryview, Counts, int], ClassStreams]
    """Invert `encode`; arguments: the bytes, the counts (i8[classes]) and the number of elements of the block.

    Memory is bounded by the counts. Raises only DeltaError: if the bytes do not contain exactly these streams, or a
    gap is longer than the block.
    """


ESCAPE = 255


def encode_zstd(streams: ClassStreams) -> bytes:
    """Encode streams by the portable coder: numpy and zstandard only. Larger than the others, readable anywhere.

    small      varint length, then one frame: u1 min(gap, 255) of every change, then u1 min(step, 255) of every change
    large      only if some are 255: one frame of u4 little-endian: for each of these, in order, the value minus 255
    """
    values = np.concatenate((streams.gaps, streams.steps))
    small = compress(np.minimum(values, ESCAPE).astype(np.uint8).tobytes())
    large = (values[values >= ESCAPE] - np.uint32(ESCAPE)).astype("<u4")
    return varint(len(small)) + small + (compress(large.tobytes()) if large.size else b"")


def decode_zstd(payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
    """Invert `encode_zstd`, as `Coder.decode`."""
    source, changed = WireReader(payload), int(counts.sum())
    values = np.frombuffer(decompress(source.take(source.varint()), 2 * changed), np.uint8).astype(np.uint32)
    escaped, rest = np.flatnonzero(values == ESCAPE), source.rest()
    if escaped.size:
        large = np.frombuffer(decompress(rest, 4 * escaped.size), "<u4").astype(np.uint64) + np.uint64(ESCAPE)
        if large.max() > np.uint64(2**32 - 1):
            raise DeltaError(f"a value of {large.max()} in a stream of 32-bit values")
        values[escaped] = large.astype(np.uint32)
    elif len(rest):
        raise DeltaError(f"{len(rest)} bytes follow the streams")
    return _checked(ClassStreams(counts, values[:changed], values[changed:]), n_elements)


def _checked(streams: ClassStreams, n_elements: int) -> ClassStreams:
    """Return the streams. Raises DeltaError if a gap is longer than the block."""
    if streams.gaps.size and int(streams.gaps.max()) >= n_elements:
        longest = streams.gaps.max()
        raise DeltaError(f"a gap of {longest} in a block of {n_elements} elements: a stream exceeds its block")
    return streams


def encode_pcodec(streams: ClassStreams) -> bytes:
    """Encode streams by pcodec, for gaps of any distribution: it sends the bins that it finds.

    gaps       varint length, then a pcodec file of u4
    steps      a pcodec file of u4
    """
    gaps: bytes = standalone.simple_compress(streams.gaps, ChunkConfig())
    steps: bytes = standalone.simple_compress(streams.steps, ChunkConfig())
    return varint(len(gaps)) + gaps + steps


def decode_pcodec(payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
    """Invert `encode_pcodec`, as `Coder.decode`."""
    source, changed = WireReader(payload), int(counts.sum())
    gaps = _numbers(source.take(source.varint()), changed)
    return _checked(ClassStreams(counts, gaps, _numbers(source.rest(), changed)), n_elements)


def _numbers(data: memoryview, n: int) -> Values:
    """Decode exactly `n` numbers, into memory that is allocated here."""
    numbers = np.zeros(n, np.uint32)
    try:
        progress = standalone.simple_decompress_into(bytes(data), numbers)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not even an Exception
        raise DeltaError(f"not a pcodec stream: {error}") from error
    if progress.n_processed != n or not progress.finished:
        raise DeltaError(f"a pcodec stream of other than {n} numbers")
    return numbers


STATE_BYTES = 5
PROBLEMS = {rans.TRUNCATED: "ends early", rans.OVERLONG: "exceeds its block", rans.LEFT_OVER: "has extra bytes"}


def encode_rans(streams: ClassStreams) -> bytes:
    """Encode streams by rANS over computed and fitted tables (`kernels.models`).

    models     u1 for each class with changes: its gaps' model
    tables     bits: for each class with changes, 1 and a table of steps, or 0: the previous table
    words      number of 16-bit words, a varint; both states, 5 bytes each; the words
    low bits   the bits that are not entropy-coded (`kernels.rans`)
    """
    counts = streams.counts[streams.counts > 0]
    ends = np.cumsum(counts).tolist()
    begins = [0, *ends[:-1]]
    models = [model_of(int(streams.gaps[a:b].sum(dtype=np.uint64)), b - a) for a, b in zip(begins, ends, strict=True)]
    tables = fit_tables(streams.steps, counts)
    plan = _plan(counts, models, tables)
    common = streams.gaps, streams.steps, plan, gap_tables().last
    raw = np.empty(streams.gaps.size + 2, np.uint64)
    n_raw = -(-rans.write_low_bits(*common, raw) // 8)
    words = np.empty(2 * streams.gaps.size, np.uint16)
    step_codes = reciprocals(plan.step_start, plan.step_frequency, STEP_TOTAL)
    first, *states = rans.encode_symbols(*common, _gap_codes(), step_codes, words)
    stored = raw.astype("<u8", copy=False).view(np.uint8)[:n_raw]
    return write_fields(models, tables, states, words[first:], stored.tobytes())


def decode_rans(payload: memoryview, counts: Counts, n_elements: int) -> ClassStreams:
    """Invert `encode_rans`, as `Coder.decode`."""
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
    n_words = source.varint()
    gap_state, step_state = (int.from_bytes(source.take(STATE_BYTES), "little") for _ in range(2))
    words, low_bits_read = _padded(source.take(2 * n_words), "<u2"), source.rest()
    gaps, steps = np.empty(int(used.sum()), np.uint32), np.empty(int(used.sum()), np.uint32)
    problem = rans.decode_changes(
        words, _padded(low_bits_read, "<u8"), n_words, len(low_bits_read), gap_state, step_state,
        _plan(used, models, tables), gap_tables(), n_elements, gaps, steps,
    )  # fmt: skip
    if problem != rans.GOOD:
        raise DeltaError(f"an entropy-coded stream {PROBLEMS[problem]}")
    return ClassStreams(counts, gaps, steps)


def _plan(counts: Counts, models: list[int], tables: list[StepTable | None]) -> ClassPlan:
    n = len(models)
    plan = ClassPlan(
        counts,
        np.array([rans.NO_GAPS if model == ALL_ZERO else table_of(model) for model in models], np.int64),
        np.array([0 if model == ALL_ZERO else low_bits(model) for model in models], np.int64),
        np.zeros(n, np.uint8),
        np.zeros((n, TOKENS), np.uint64),
        np.zeros((n, TOKENS), np.uint64),
        np.zeros((n, STEP_TOTAL), np.uint8),
    )
    for which, table in enumerate(tables):
        if table is None:
            for row in plan[3:]:
                row[which] = row[which - 1]
            continue
        frequencies = table.frequencies()
        plan.directed[which] = table.directed
        plan.step_frequency[which, : frequencies.size] = frequencies
        plan.step_start[which, : frequencies.size] = np.cumsum(frequencies) - frequencies
        plan.step_symbol[which] = np.repeat(np.arange(frequencies.size), frequencies)
    return plan


def write_fields(
    models: list[int], tables: list[StepTable | None], states: list[int], words: npt.ArrayLike, raw: bytes
) -> bytes:
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
    return reciprocals(gap_tables().start, gap_tables().frequency, GAP_TOTAL)


def _padded(data: memoryview, kind: str) -> npt.NDArray[Any]:
    """Return the data as native numbers, the last one filled with zero bytes, followed by `rans.PADDING` zeros."""
    stored = np.dtype(kind)
    row = np.zeros(-(-len(data) // stored.itemsize) + rans.PADDING, stored)
    row.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return row.astype(stored.newbyteorder("="), copy=False)


RANS, PCODEC = Coder(1, encode_rans, decode_rans), Coder(2, encode_pcodec, decode_pcodec)
ZSTD = Coder(3, encode_zstd, decode_zstd)
CODERS = {coder.code: coder for coder in (RANS, PCODEC, ZSTD)}
CHOICES: dict[CoderChoice, Coder] = {"auto": RANS, "rans": RANS, "pcodec": PCODEC, "zstd": ZSTD}
WORTH = 20
"""pcodec is tried if another model of the gaps would save more than 1 / 20 of the geometric model's bits."""


def encode_streams(streams: ClassStreams, choice: CoderChoice) -> tuple[int, bytes]:
    """Encode by the chosen coder, or with "auto" by the smallest found; return its code and the bytes."""
    coder = CHOICES[choice]
    coded = coder.encode(streams)
    if choice == "auto":
        geometric, binned = _gap_costs(streams.gaps, streams.counts, np.zeros((TOKEN_LANES, TOKENS), np.int64))
        if geometric - binned > geometric // WORTH:
            other = PCODEC.encode(streams)
            if len(other) < len(coded):
                return PCODEC.code, other
    return coder.code, coded


@compiled
def _gap_costs(gaps: Values, counts: Counts, lanes: Counts) -> tuple[int, int]:
    """Compute the gaps' cost, class by class, by a geometric model and by counts of their orders of magnitude."""
    geometric, binned = 0, 0
    i = np.uint64(0)
    for count in counts:
        lanes[:] = 0
        places, low_bits = np.uint64(count), np.uint64(0)
        for _ in range(count):
            token, low = token_of(np.uint64(gaps[i]))
            lanes[i % np.uint64(TOKEN_LANES), token] += 1
            low_bits += low
            places += np.uint64(gaps[i])
            i += np.uint64(1)
        geometric += choice_cost(int(places), count)
        binned += kind_cost(lanes.sum(axis=0)) + int(low_bits) * BIT
    return geometric, binned
