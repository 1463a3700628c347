"""Writing an anchor from one rank or many: each rank writes files of its own, with the tensors that were dealt to it.

A tensor is gathered where it is written, one at a time, and goes to the store as it comes: a rank holds its own parts
of the weights and one whole tensor; a process alone holds nothing beside its weights. The first rank begins the
directory, writes the index and, last, the marker. The bytes of one rank are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

from tidemill.kernels.fingerprint import Bits
from tidemill.kernels.weights.anchor import AnchorFile, begin_anchor, compute_type, finish_anchor, put_file
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import (
    INDEX,
    data_pieces,
    file_header,
    file_names,
    file_order,
    index_of,
    split_files,
)
from tidemill.kernels.weights.exchange import exchange, spans_of_all
from tidemill.kernels.weights.ranks import Ranks, SingleRank
from tidemill.kernels.weights.tensor_parts import Parts, TensorLike, as_part, deal
from tidemill.schemas.records import Anchor

FILE_BYTES = 5 << 30
"""Weights in one file of an anchor, as Hugging Face splits checkpoints."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which rank writes which file, and what is in it; the same on every rank."""

    whole: Mapping[str, Weight]
    """Type and shape of every tensor."""
    files: Sequence[Mapping[str, Sequence[str]]]
    """By rank: its files, and the tensors of each in order."""

    def of_rank(self, rank: int) -> list[str]:
        """The tensors that a rank writes, in order."""
        return list(chain.from_iterable(self.files[rank].values()))

    def moves(self) -> Iterator[tuple[int, str]]:
        """Every tensor with the rank that writes it: each rank's in its order, the ranks in turn."""
        turns = zip_longest(*(self.of_rank(rank) for rank in range(len(self.files))))
        return ((rank, name) for turn in turns for rank, name in enumerate(turn) if name is not None)


def write_anchor(
    uri: str,
    base_model: Path,
    tensors: Mapping[str, TensorLike],
    file_bytes: int = FILE_BYTES,
    ranks: Ranks | None = None,
) -> Anchor:
    """Write a version as a checkpoint directory at `uri`; an unfinished or older one there is replaced.

    Args:
        base_model: directory whose configuration and tokenizer the anchor takes over; the first rank reads it.
        tensors: every tensor of the version, by checkpoint name: whole, or this rank's parts, which are on all ranks
            together the whole of each.
        file_bytes: above this a rank's weights are split over several files.
        ranks: that write it together, each calling this; without them, this process alone.

    Raises AnchorError when `base_model` has no readable configuration, StoreUnavailableError when the store fails;
    on every rank what one of them fails with, and RanksLostError.
    """
    ranks = ranks or SingleRank()
    parts = {name: as_part(name, value) for name, value in tensors.items()}
    layout = _layout(parts, file_bytes, ranks.size)
    taken_over = ranks.from_first(lambda: begin_anchor(uri, base_model, compute_type(layout.whole)))
    spans = spans_of_all({name: (part.start, part.bits.size) for name, part in parts.items()}, ranks)
    written = ranks.gather(lambda: _write_own(uri, layout, _wholes(parts, layout, spans, ranks), ranks.rank))
    return ranks.from_first(lambda: _finish(uri, layout, [*taken_over, *chain.from_iterable(written)]))


def _layout(parts: Parts, file_bytes: int, n_ranks: int) -> _Layout:
    whole = {name: part.outline() for name, part in parts.items()}
    sizes = {name: weight.bits.nbytes for name, weight in whole.items()}
    writers = deal(sizes, n_ranks)
    groups = [
        split_files({name: n for name, n in sizes.items() if writers[name] == rank}, file_bytes)
        for rank in range(n_ranks)
    ]
    files = iter(file_names(sum(map(len, groups))))
    return _Layout(
        whole, [{next(files): file_order({name: whole[name] for name in group}) for group in own} for own in groups]
    )


def _write_own(uri: str, layout: _Layout, wholes: Iterator[Bits], rank: int) -> list[AnchorFile]:
    try:
        return [
            put_file(uri, file, _pieces({name: layout.whole[name] for name in names}, wholes))
            for file, names in layout.files[rank].items()
        ]
    finally:
        # The other ranks need this one's parts, even when its own files fail.
        for _ in wholes:
            pass


def _pieces(outlines: Mapping[str, Weight], wholes: Iterator[Bits]) -> Iterator[bytes | memoryview]:
    """The bytes of a file with the next of the tensors."""
    yield file_header(outlines)
    for bits in islice(wholes, len(outlines)):
        yield from data_pieces(bits)


def _wholes(
    parts: Parts, layout: _Layout, spans: Mapping[str, Sequence[tuple[int, int]]], ranks: Ranks
) -> Iterator[Bits]:
    """The tensors of this rank's files, whole; as they are taken, its parts of the other ranks' tensors are sent."""
    for writer, name in layout.moves():
        wanted = [(0, parts[name].total if rank == writer else 0) for rank in range(ranks.size)]
        whole = exchange(parts[name], spans[name], wanted, ranks)
        if writer == ranks.rank:
            yield whole.bits


def _finish(uri: str, layout: _Layout, files: list[AnchorFile]) -> Anchor:
    split_over = {file: names for of_rank in layout.files for file, names in of_rank.items()}
    if len(split_over) > 1:
        files = [*files, put_file(uri, INDEX, [index_of(layout.whole, split_over)])]
    return finish_anchor(uri, files)
