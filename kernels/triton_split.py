"""The class split of `kernels.classes` on a GPU: gaps within a class and folded steps, class by class.

The rank of an element is the number of elements of its class before it, in active segments. A rank is the sum of three
counts of elements of the class, so that only one pass reads the whole block:

- in earlier tiles: a scan of the tiles' totals;
- in earlier rows of the same tile: 16-bit counts, four per word, stored for each row;
- in the same row, before the element: counted again for each changed element.

The changed elements are then sorted by class, stably, by a count, a scan and a write; a gap is computed from two
neighbouring ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl  # type: ignore[import-untyped]

from tidemill.kernels.classes import SEGMENT, Active, ClassTable
from tidemill.kernels.elements import ElementType, flat_row
from tidemill.kernels.triton_rows import check_places, flat_patterns, kernel, tiles

CLASSES_IN_WORD = 4
BLOCK_LIMIT = (1 << 32) - 1
"""Greatest number of elements of a block: ranks have 32 bits."""
EXPONENT_TILE = 2048
EXPONENT_PROGRAMS = 512
LEAST_BINS = 32
"""A histogram has at least one bin for each lane of a warp."""


@dataclass(frozen=True, slots=True)
class SplitTiling:
    """Sizes of the parts of the work; powers of two. The result is the same for all values."""

    row: int = 128
    """Number of elements of a row; it divides a segment."""
    rows: int = 32
    """Number of rows of a tile; a tile has less than 2**16 elements."""
    ranked: int = 32
    """Number of changed elements whose rows one program counts."""
    placed: int = 1024
    """Number of changed elements that one program sorts, less than 2**16."""


GPU_TILING = SplitTiling()


@kernel
def class_of(pattern: tl.tensor, table_pointer: tl.tensor, SHIFT: tl.constexpr, EXPONENTS: tl.constexpr) -> tl.tensor:
    """Return the class of each pattern, i4."""
    exponent = (pattern.to(tl.uint32) >> SHIFT) & (EXPONENTS - 1)
    return tl.load(table_pointer + exponent.to(tl.int32)).to(tl.int32)


@kernel
def place_of(pattern: tl.tensor, BITS: tl.constexpr, ORDER: tl.constexpr) -> tl.tensor:
    """Return a pattern's place by value among all patterns of `BITS` bits, u4. `ORDER` is `kernels.elements.Order`."""
    place = pattern.to(tl.uint32)
    if ORDER == 0:
        negative = (place >> (BITS - 1)) != 0
        place = place ^ tl.where(negative, (1 << BITS) - 1, 1 << (BITS - 1)).to(tl.uint32)
    if ORDER == 1:
        place = place ^ (1 << (BITS - 1))
    return place


@kernel
def folded_step(old: tl.tensor, new: tl.tensor, BITS: tl.constexpr, ORDER: tl.constexpr) -> tl.tensor:
    """Return the step between two places modulo 2**BITS, folded: +1, -1, +2, -2 ... become 0, 1, 2, 3 ..., u4."""
    step = (place_of(new, BITS, ORDER) - place_of(old, BITS, ORDER)) & ((1 << BITS) - 1)
    down = (step >> (BITS - 1)) != 0
    return tl.where(down, ((((1 << BITS) - 1) - step) << 1) | 1, (step - 1) << 1)


@kernel
def one_in_field(held: tl.tensor, group: tl.tensor, word: tl.constexpr) -> tl.tensor:
    """Return a 1 in the class's 16-bit field if the class belongs to `word` and `held` is set, otherwise 0, u8."""
    one = tl.full(group.shape, 1, tl.uint64) << ((group % 4) * 16).to(tl.uint64)
    return tl.where(held & (group // 4 == word), one, 0)


@kernel
def field_of(packed: tl.tensor, group: tl.tensor) -> tl.tensor:
    """Return the 16-bit field of a class in the word that contains it, u8."""
    return (packed >> ((group % 4) * 16).to(tl.uint64)) & 0xFFFF


@kernel
def store_totals(
    totals_pointer: tl.tensor, packed: tl.tensor, word: tl.constexpr, column: tl.tensor, columns: tl.tensor
) -> None:
    """Unpack the four counts of a word into a column of `totals` (i4[4 * words, columns])."""
    field = tl.arange(0, 4)
    counts = (packed >> (field * 16).to(tl.uint64)) & 0xFFFF
    tl.store(totals_pointer + (word * 4 + field) * columns + column, counts.to(tl.int32))


@kernel
def count_rows(
    old_pointer: tl.tensor,
    table_pointer: tl.tensor,
    active_pointer: tl.tensor,
    rows_pointer: tl.tensor,
    totals_pointer: tl.tensor,
    n: tl.int64,
    n_tiles: tl.int64,
    SHIFT: tl.constexpr,
    EXPONENTS: tl.constexpr,
    WORDS: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Count, in one tile, the elements of each class in the rows before each row, and in the whole tile."""
    tile = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, ROWS * ROW)
    left = n - tile * (ROWS * ROW)
    inside = lanes < left
    if left >= ROWS * ROW:
        pattern = tl.load(old_pointer + tile * (ROWS * ROW) + lanes)
    else:
        pattern = tl.load(old_pointer + tile * (ROWS * ROW) + lanes, mask=inside, other=0)
    group = class_of(pattern, table_pointer, SHIFT, EXPONENTS)
    row = tile * ROWS + tl.arange(0, ROWS)
    active = tl.load(active_pointer + row * ROW // SEGMENT, mask=row * ROW < n, other=0) != 0
    for word in tl.static_range(WORDS):
        counts = tl.sum(tl.reshape(one_in_field(inside, group, word), (ROWS, ROW)), axis=1)
        counts = tl.where(active, counts, 0)
        tl.store(rows_pointer + row * WORDS + word, (tl.cumsum(counts, 0) - counts).to(tl.int64, bitcast=True))
        store_totals(totals_pointer, tl.sum(counts, axis=0), word, tile, n_tiles)


@kernel
def rank_changed(
    old_pointer: tl.tensor,
    indices_pointer: tl.tensor,
    table_pointer: tl.tensor,
    rows_pointer: tl.tensor,
    begins_pointer: tl.tensor,
    ranks_pointer: tl.tensor,
    n_changed: tl.int64,
    n_tiles: tl.int64,
    SHIFT: tl.constexpr,
    EXPONENTS: tl.constexpr,
    WORDS: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    RANKED: tl.constexpr,
) -> None:
    """Write the rank of each changed element, u4. `begins` (i8[classes, tiles]) are the ranks at which tiles begin."""
    at = tl.program_id(0).to(tl.int64) * RANKED + tl.arange(0, RANKED)
    inside = at < n_changed
    index = tl.load(indices_pointer + at, mask=inside, other=0)
    group = class_of(tl.load(old_pointer + index, mask=inside, other=0), table_pointer, SHIFT, EXPONENTS)
    row = index // ROW
    lane = tl.arange(0, ROW)
    before = (lane[None, :] < (index - row * ROW)[:, None]) & inside[:, None]
    others = tl.load(old_pointer + (row * ROW)[:, None] + lane[None, :], mask=before, other=0)
    alike = before & (class_of(others, table_pointer, SHIFT, EXPONENTS) == group[:, None])
    packed = tl.load(rows_pointer + row * WORDS + group // 4, mask=inside, other=0).to(tl.uint64, bitcast=True)
    begin = tl.load(begins_pointer + group * n_tiles + row // ROWS, mask=inside, other=0)
    rank = begin + field_of(packed, group).to(tl.int64) + tl.sum(alike.to(tl.int32), axis=1)
    tl.store(ranks_pointer + at, rank.to(tl.uint32), mask=inside)


@kernel
def count_changed(
    old_pointer: tl.tensor,
    indices_pointer: tl.tensor,
    table_pointer: tl.tensor,
    totals_pointer: tl.tensor,
    n_changed: tl.int64,
    n_tiles: tl.int64,
    SHIFT: tl.constexpr,
    EXPONENTS: tl.constexpr,
    WORDS: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    """Count the elements of each class in one tile of changed elements."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * PLACED + tl.arange(0, PLACED)
    inside = at < n_changed
    index = tl.load(indices_pointer + at, mask=inside, other=0)
    group = class_of(tl.load(old_pointer + index, mask=inside, other=0), table_pointer, SHIFT, EXPONENTS)
    for word in tl.static_range(WORDS):
        store_totals(totals_pointer, tl.sum(one_in_field(inside, group, word), axis=0), word, tile, n_tiles)


@kernel
def place_changed(
    old_pointer: tl.tensor,
    new_pointer: tl.tensor,
    indices_pointer: tl.tensor,
    table_pointer: tl.tensor,
    ranks_pointer: tl.tensor,
    begins_pointer: tl.tensor,
    placed_pointer: tl.tensor,
    steps_pointer: tl.tensor,
    n_changed: tl.int64,
    n_tiles: tl.int64,
    SHIFT: tl.constexpr,
    EXPONENTS: tl.constexpr,
    BITS: tl.constexpr,
    ORDER: tl.constexpr,
    WORDS: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    """Write ranks and steps sorted by class. `begins` (i8[classes, tiles]) are the places at which tiles begin."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * PLACED + tl.arange(0, PLACED)
    inside = at < n_changed
    index = tl.load(indices_pointer + at, mask=inside, other=0)
    old = tl.load(old_pointer + index, mask=inside, other=0)
    new = tl.load(new_pointer + at, mask=inside, other=0)
    group = class_of(old, table_pointer, SHIFT, EXPONENTS)
    within = tl.zeros((PLACED,), tl.uint64)
    for word in tl.static_range(WORDS):
        one = one_in_field(inside, group, word)
        within = tl.where(group // 4 == word, field_of(tl.cumsum(one, 0) - one, group), within)
    place = tl.load(begins_pointer + group * n_tiles + tile, mask=inside, other=0) + within.to(tl.int64)
    tl.store(placed_pointer + place, tl.load(ranks_pointer + at, mask=inside, other=0), mask=inside)
    tl.store(steps_pointer + place, folded_step(old, new, BITS, ORDER), mask=inside)


@kernel
def write_gaps(
    placed_pointer: tl.tensor,
    firsts_pointer: tl.tensor,
    gaps_pointer: tl.tensor,
    n_changed: tl.int64,
    CLASSES: tl.constexpr,
    PLACED: tl.constexpr,
) -> None:
    """Write gaps from ranks sorted by class. `firsts` (i8[classes]) are the places at which classes begin."""
    at = tl.program_id(0).to(tl.int64) * PLACED + tl.arange(0, PLACED)
    inside = at < n_changed
    first = at == 0
    for group in tl.static_range(CLASSES):
        first = first | (at == tl.load(firsts_pointer + group))
    rank = tl.load(placed_pointer + at, mask=inside, other=0)
    previous = tl.load(placed_pointer + at - 1, mask=inside & (at > 0), other=0)
    tl.store(gaps_pointer + at, tl.where(first, rank, rank - previous - 1), mask=inside)


@kernel
def count_patterns(
    bits_pointer: tl.tensor,
    counts_pointer: tl.tensor,
    n: tl.int64,
    SHIFT: tl.constexpr,
    EXPONENTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Count the elements of each exponent that this program reads, to a row of `counts` (i4[programs, BINS])."""
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    counts = tl.zeros((BINS,), tl.int32)
    for tile in range(first, (n + TILE - 1) // TILE, programs):
        inside = tile * TILE + lanes < n
        pattern = tl.load(bits_pointer + tile * TILE + lanes, mask=inside, other=0).to(tl.uint32)
        exponent = (pattern >> SHIFT) & (EXPONENTS - 1)
        counts += tl.histogram(exponent.to(tl.int32), BINS, mask=inside)
    tl.store(counts_pointer + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


def split_classes(
    kind: ElementType,
    old: torch.Tensor,
    old_at: torch.Tensor,
    new_at: torch.Tensor,
    indices: torch.Tensor,
    class_table: ClassTable,
    active_segments: Active,
    tiling: SplitTiling = GPU_TILING,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the counts (i8[classes]), gaps and steps (u4[changed]) of `kernels.classes.split_classes`.

    All tensors are on one device; `old_at` is not read.

    Raises ValueError for arrays that do not fit each other, and for more elements than ranks of 32 bits can count.
    """
    flat, new, places = flat_patterns(old), flat_patterns(new_at), flat_row(indices)
    check_places(places, new)
    if flat.dtype != new.dtype or flat.device != new.device:
        raise ValueError(f"{new.dtype} on {new.device} for {flat.dtype} on {flat.device}")
    if flat.numel() > BLOCK_LIMIT:
        raise ValueError(f"{flat.numel()} elements in a block; their ranks have 32 bits")
    if class_table.size != kind.exponents or active_segments.size != tiles(flat.numel(), SEGMENT):
        raise ValueError(f"{class_table.size} of {kind.exponents} exponents, {active_segments.size} segments")
    # Copies, because the numpy arrays may be read-only.
    table = torch.tensor(class_table, dtype=torch.uint8, device=flat.device)
    active = torch.tensor(active_segments, dtype=torch.uint8, device=flat.device)
    classes = int(class_table[-1]) + 1
    words = tiles(classes, CLASSES_IN_WORD)
    gaps, placed, steps = (torch.empty(new.numel(), dtype=torch.uint32, device=flat.device) for _ in range(3))
    totals = _counts(words, tiles(new.numel(), tiling.placed), flat.device)
    if new.numel():
        form = {"SHIFT": kind.mantissa_bits, "EXPONENTS": kind.exponents, "WORDS": words}
        ranks = _ranks(flat, places, table, active, tiling, form)
        grid, sizes = (totals.shape[1],), (new.numel(), totals.shape[1])
        count_changed[grid](flat, places, table, totals, *sizes, **form, PLACED=tiling.placed)
        begins = _begins(totals.view(1, -1)).view(totals.shape)
        form = {**form, "BITS": kind.width, "ORDER": int(kind.order), "PLACED": tiling.placed}
        place_changed[grid](flat, new, places, table, ranks, begins, placed, steps, *sizes, **form)
        firsts = begins[:, 0].contiguous()
        write_gaps[grid](placed, firsts, gaps, new.numel(), CLASSES=firsts.numel(), PLACED=tiling.placed)
    return totals.sum(dim=1)[:classes], gaps, steps


def count_exponents(kind: ElementType, bits: torch.Tensor) -> torch.Tensor:
    """Count the elements (i8[exponents]) of each exponent in `bits`, contiguous."""
    flat, bins = flat_patterns(bits), max(LEAST_BINS, kind.exponents)
    programs = min(EXPONENT_PROGRAMS, tiles(flat.numel(), EXPONENT_TILE))
    counts = torch.empty((programs, bins), dtype=torch.int32, device=flat.device)
    if programs:
        form = {"SHIFT": kind.mantissa_bits, "EXPONENTS": kind.exponents}
        count_patterns[(programs,)](flat, counts, flat.numel(), **form, BINS=bins, TILE=EXPONENT_TILE)
    return counts.sum(dim=0, dtype=torch.int64)[: kind.exponents]


def _ranks(
    flat: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    active: torch.Tensor,
    tiling: SplitTiling,
    form: dict[str, int],
) -> torch.Tensor:
    """Return the rank of each changed element (u4[changed]), in the order of `places`."""
    n_tiles = tiles(flat.numel(), tiling.row * tiling.rows)
    rows = torch.empty(n_tiles * tiling.rows * form["WORDS"], dtype=torch.int64, device=flat.device)
    totals = _counts(form["WORDS"], n_tiles, flat.device)
    cut = {**form, "ROW": tiling.row, "ROWS": tiling.rows}
    count_rows[(n_tiles,)](flat, table, active, rows, totals, flat.numel(), n_tiles, **cut, SEGMENT=SEGMENT)
    ranks = torch.empty(places.numel(), dtype=torch.uint32, device=flat.device)
    rank_changed[(tiles(places.numel(), tiling.ranked),)](
        flat, places, table, rows, _begins(totals), ranks, places.numel(), n_tiles, **cut, RANKED=tiling.ranked
    )
    return ranks


def _counts(words: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.empty((words * CLASSES_IN_WORD, columns), dtype=torch.int32, device=device)


def _begins(totals: torch.Tensor) -> torch.Tensor:
    """Return exclusive sums along each row, i8."""
    return torch.cumsum(totals, 1, dtype=torch.int64) - totals
