"""An anchor that no process holds whole: each rank writes a file of its own, with the tensors that were dealt to it.

A tensor is gathered where it is written, one at a time, and goes to the store as it comes: a rank holds its own parts
of the weights and one whole tensor. The first rank begins the directory, writes the index and, last, the marker; what
lies there is a Hugging Face checkpoint like `anchor`'s, in several files where several ranks wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.kernels.fingerprint import Bits
from tidemill.kernels.weights.anchor import AnchorFile, begin_anchor, compute_type, finish_anchor, put_file
from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.checkpoint import INDEX, PIECE_BYTES, WEIGHTS, file_header, index_of
from tidemill.kernels.weights.ranks import Ranks
from tidemill.kernels.weights.sharded_parts import Parts, TensorPart, deal
from tidemill.schemas.records import Anchor


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which rank writes which file, and what is in it; the same on every rank."""

    whole: Mapping[str, Weight]
    """Type and shape of every tensor, wide elements first, so that every tensor is aligned to its elements."""
    owners: Mapping[str, int]
    """The rank that writes a tensor."""
    files: Mapping[int, str]
    """The file of each rank that writes one, named as Hugging Face's loaders name them."""

    def of_rank(self, rank: int) -> dict[str, Weight]:
        """The tensors of a rank's file, in order."""
        return {name: weight for name, weight in self.whole.items() if self.owners[name] == rank}


def write_sharded_anchor(uri: str, base_model: Path, parts: Parts, ranks: Ranks) -> Anchor:
    """Write the version of which every rank gives its `parts` as a checkpoint directory; what is there is replaced.

    Args:
        base_model: directory whose configuration and tokenizer the anchor takes over; the first rank reads it.
        parts: of all ranks together the whole of each weight.

    Raises on every rank what one of them fails with, as `write_anchor` does, and RanksLostError.
    """
    layout = _layout(parts, ranks.size)
    taken_over = ranks.from_first(lambda: begin_anchor(uri, base_model, compute_type(layout.whole)))
    written = ranks.gather(lambda: _write_own(uri, parts, layout, ranks))
    files = [*taken_over, *(file for file in written if file is not None)]
    return ranks.from_first(lambda: _finish(uri, layout, files))


def _layout(parts: Parts, n_ranks: int) -> _Layout:
    outlines = {name: part.outline() for name, part in parts.items()}
    # The order of `checkpoint.file_pieces`: one rank writes the bytes that one process does.
    whole = dict(sorted(outlines.items(), key=lambda item: (-item[1].bits.itemsize, item[0])))
    owners = deal({name: weight.bits.nbytes for name, weight in whole.items()}, n_ranks)
    writers = sorted(set(owners.values()))
    if len(writers) == 1:
        return _Layout(whole, owners, {writers[0]: WEIGHTS})
    files = {rank: f"model-{k:05d}-of-{len(writers):05d}.safetensors" for k, rank in enumerate(writers, 1)}
    return _Layout(whole, owners, files)


def _write_own(uri: str, parts: Parts, layout: _Layout, ranks: Ranks) -> AnchorFile | None:
    pieces = _pieces(parts, layout, ranks)
    try:
        return put_file(uri, layout.files[ranks.rank], pieces) if ranks.rank in layout.files else None
    finally:
        # The other ranks need this one's parts, even when its own file fails.
        for _ in pieces:
            pass


def _pieces(parts: Parts, layout: _Layout, ranks: Ranks) -> Iterator[bytes | memoryview]:
    """The bytes of this rank's file; as they are taken, this rank's parts of the other ranks' files are sent."""
    yield file_header(layout.of_rank(ranks.rank))
    for name in layout.whole:
        if layout.owners[name] != ranks.rank:
            _send(parts[name], layout.owners[name], ranks)
            continue
        data = _gathered(parts[name], ranks).view(np.uint8).data
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]


def _send(part: TensorPart, to: int, ranks: Ranks) -> None:
    ranks.send(np.array([part.start, part.bits.size], np.uint64), to)
    if part.bits.size:
        ranks.send(part.bits, to)


def _gathered(own: TensorPart, ranks: Ranks) -> Bits:
    whole = np.empty(own.total, own.bits.dtype)
    whole[own.start : own.start + own.bits.size] = own.bits
    span = np.empty(2, np.uint64)
    for rank in range(ranks.size):
        if rank != ranks.rank:
            ranks.receive(span, rank)
            start, n = map(int, span)
            if n:
                ranks.receive(whole[start : start + n], rank)
    return whole


def _finish(uri: str, layout: _Layout, files: list[AnchorFile]) -> Anchor:
    if len(layout.files) > 1:
        split = {file: list(layout.of_rank(rank)) for rank, file in layout.files.items()}
        files = [*files, put_file(uri, INDEX, [index_of(layout.whole, split)])]
    return finish_anchor(uri, files)
