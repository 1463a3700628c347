"""Coders decode to the same streams for any input; the tables of the entropy coder are valid."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.encoding import encode_tensor, resolve
from tests.kernels.reference import delta_bounds, rans_reference
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.classes import ClassStreams
from tidemill.kernels.coder import CODERS, PCODEC, RANS, encode_streams
from tidemill.kernels.delta import decode_blocks
from tidemill.kernels.elements import ELEMENT_TYPES, move
from tidemill.kernels.models import (
    ALL_ZERO,
    GAP_TOTAL,
    MODELS,
    TABLES,
    TOKENS,
    StepTable,
    fit_tables,
    gap_tables,
    length_of,
    low_bits,
    low_bits_of,
    model_of,
    table_of,
    token_of,
)
from tidemill.kernels.payload import Encoding
from tidemill.kernels.wire import BitReader, BitWriter, DeltaError, WireReader

ELEMENTS = 1 << 24


@st.composite
def streams(draw, max_size=300):
    """Draw streams of any distribution: geometric gaps of any mean, clustered gaps, extremes."""
    counts = np.array(draw(st.lists(st.integers(0, max_size), min_size=1, max_size=8)), np.int64)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    gaps, steps = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for count in counts:
        mean = 2.0 ** draw(st.integers(-8, 22))
        near = generator.geometric(1 / (1 + mean), count) - 1
        far = generator.integers(0, ELEMENTS, count)
        gaps.append(np.where(generator.random(count) < draw(st.sampled_from([0, 0, 0.1])), far, near))
        longest = 2 ** draw(st.integers(1, 32))
        steps.append((longest ** generator.random(count)).astype(np.int64) - 1)
    gap_row, step_row = np.concatenate(gaps), np.concatenate(steps)
    return ClassStreams(counts, np.minimum(gap_row, ELEMENTS - 1).astype(np.uint32), step_row.astype(np.uint32))


@pytest.mark.parametrize("code", CODERS)
@given(streams())
def test_round_trip(code, given_streams):
    if not given_streams.gaps.size:
        return
    coded = CODERS[code].encode(given_streams)
    decoded = CODERS[code].decode(memoryview(coded), given_streams.counts, ELEMENTS)
    np.testing.assert_array_equal(decoded.gaps, given_streams.gaps)
    np.testing.assert_array_equal(decoded.steps, given_streams.steps)


@settings(max_examples=40)
@given(streams(60))
def test_the_compiled_coder_equals_its_plain_twin(given_streams):
    if given_streams.gaps.size:
        assert RANS.encode(given_streams) == rans_reference(given_streams)


@pytest.mark.parametrize("code", CODERS)
@given(streams(40), st.integers(0, 10**6))
def test_truncated_streams_are_refused(code, given_streams, at):
    if given_streams.gaps.size:
        coded = CODERS[code].encode(given_streams)
        with pytest.raises(DeltaError):
            CODERS[code].decode(memoryview(coded)[: at % len(coded)], given_streams.counts, ELEMENTS)


@pytest.mark.parametrize("code", CODERS)
def test_a_gap_as_long_as_the_block_is_refused(code):
    one = ClassStreams(np.array([1]), np.array([500], np.uint32), np.array([0], np.uint32))
    coded = memoryview(CODERS[code].encode(one))
    assert CODERS[code].decode(coded, one.counts, 501).gaps.tolist() == [500]
    with pytest.raises(DeltaError, match="exceeds its block"):
        CODERS[code].decode(coded, one.counts, 500)


def test_gap_tables_are_valid():
    tables = gap_tables()
    for table in range(TABLES):
        used = tables.frequency[table, : tables.last[table] + 1].astype(np.int64)
        assert used.min() >= 1 and used.sum() == GAP_TOTAL
        np.testing.assert_array_equal(tables.start[table, : used.size], np.cumsum(used) - used)
        np.testing.assert_array_equal(np.bincount(tables.symbol[table], minlength=used.size), used)


GAP_TABLES_SUM = 7427782489


def test_gap_tables_never_change():
    """Blocks stay in the log permanently, so their tables must never change."""
    weights = np.arange(1, TABLES * 256 + 1, dtype=np.uint64).reshape(TABLES, 256)
    assert int((gap_tables().frequency * weights).sum()) == GAP_TABLES_SUM


def test_geometric_gaps_get_the_model_of_their_mean():
    for model in range(MODELS):
        mean = ((4 + table_of(model) % 4) / 4096 * 2 ** (table_of(model) // 4) + 0.5) * 2 ** low_bits(model) - 0.5
        mean = (4 + model % 4) / 4096 * 2 ** (model // 4) if model < TABLES else mean
        assert abs(model_of(round(mean * 10**6), 10**6) - model) <= 1
    assert model_of(0, 5) == ALL_ZERO


@given(st.integers(0, 2**31 - 1))
def test_tokens_keep_lengths(length):
    token, low = (int(x) for x in token_of(np.uint64(length)))
    assert token < TOKENS // 2 and low == int(low_bits_of(np.uint64(token)))
    assert int(length_of(np.uint64(token), np.uint64(length & ((1 << low) - 1)))) == length


@given(st.lists(st.integers(0, 63), min_size=1, max_size=128).filter(lambda levels: levels[-1] > 0), st.booleans())
def test_every_table_of_steps_has_valid_frequencies(levels, directed):
    table = StepTable(directed, np.array(levels, np.uint8))
    frequencies = table.frequencies()
    assert frequencies.sum() == 4096
    np.testing.assert_array_equal(frequencies > 0, table.levels > 0)
    out = BitWriter()
    table.write(out)
    if directed or len(levels) <= TOKENS // 2:
        again = StepTable.read(BitReader(WireReader(memoryview(out.getvalue()))))
        np.testing.assert_array_equal(again.levels, table.levels)


def test_classes_that_move_alike_share_a_table():
    generator = np.random.default_rng(0)
    alike = generator.geometric(0.7, 3000).astype(np.uint32)
    other = generator.integers(0, 100, 3000).astype(np.uint32)
    first, second, third = fit_tables(np.concatenate((alike, alike, other)), np.array([3000, 0, 3000, 3000]))
    assert first is not None and second is None and third is not None


def test_one_direction_costs_nothing():
    counts, gaps = np.array([4000]), np.zeros(4000, np.uint32)
    both = np.random.default_rng(0).integers(0, 2, 4000).astype(np.uint32)
    assert len(RANS.encode(ClassStreams(counts, gaps, both))) > 500
    assert len(RANS.encode(ClassStreams(counts, gaps, both & np.uint32(0)))) < 32


def test_gaps_that_are_not_geometric_use_another_coder():
    gaps = np.where(np.arange(20_000) % 20 == 0, 5000, 0).astype(np.uint32)
    lumpy = ClassStreams(np.array([gaps.size]), gaps, np.zeros(gaps.size, np.uint32))
    code, coded = encode_streams(lumpy, "auto")
    assert code == PCODEC.code and len(coded) < 0.7 * len(RANS.encode(lumpy))
    assert encode_streams(lumpy, "rans")[0] == RANS.code


def trained(n, scale):
    """Return bf16 weights that each moved by a similar amount: small weights change their pattern more often."""
    generator = np.random.default_rng(0)
    master = 0.02 * generator.standard_normal(n, dtype=np.float32)
    moved = master + np.float32(scale) * generator.standard_normal(n, dtype=np.float32)
    return tuple(((v.view(np.uint32) + 0x8000) >> 16).astype(np.uint16) for v in (master, moved))


@pytest.mark.parametrize("scale", [3e-7, 3e-6])
def test_size_is_within_five_per_cent_of_the_bound(scale):
    old, new = trained(1 << 21, scale)
    size = sum(map(len, encode_tensor("w", "bfloat16", old, new)))
    assert size < 1.05 * delta_bounds("bfloat16", old, new).exponent_class


@pytest.mark.parametrize("coder", ["auto", "rans", "pcodec", "zstd"])
def test_every_coder_can_code_a_whole_block(coder):
    old, new = trained(100_000, 1e-6)
    (data,) = encode_tensor("w", "bfloat16", old, new, settings=CodecSettings(coder=coder))
    (block,) = decode_blocks(data)
    change = resolve(block, old)
    assert block.header.encoding == Encoding.CLASSES
    np.testing.assert_array_equal(change.new_bits, new[change.indices])


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
def test_a_constant_costs_no_more_than_its_header(kind):
    old = np.random.default_rng(0).integers(0, 1 << kind.width, 50_000, kind.bits)
    for new in (np.full_like(old, 5), move(kind, old, 0), move(kind, old, 7)):
        (data,) = encode_tensor("w", kind.name, old, new)
        (block,) = decode_blocks(data)
        change = resolve(block, old)
        assert block.header.encoding == Encoding.CONSTANT and len(data) < 90
        np.testing.assert_array_equal(change.new_bits, new[change.indices])


def test_noise_is_stored():
    old, new = np.random.default_rng(0).integers(0, 1 << 16, (2, 50_000), np.uint16)
    (data,) = encode_tensor("w", "bfloat16", old, new)
    (block,) = decode_blocks(data)
    assert block.header.encoding == Encoding.RAW and len(data) < new.nbytes + 100
