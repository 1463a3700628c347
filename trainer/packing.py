"""Packs documents into rows for next-token training.

What holds: every document comes exactly once an epoch, its tokens in order, cut only where it is longer than a row;
a token is predicted from earlier tokens of its own piece only; the order of an epoch depends on the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_NO_LABEL = -100


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """One packed row of L tokens."""

    input_ids: Tensor
    """i8[1, L]."""
    position_ids: Tensor
    """i8[1, L], starting at 0 with each piece."""
    labels: Tensor
    """i8[L]: the next token of the same piece, -100 at a piece's last token."""
    lengths: tuple[int, ...]
    """Tokens of each piece; they sum to L."""


def epochs(documents: Sequence[Sequence[int]], row_tokens: int, seed: int) -> Iterator[DocumentRow]:
    """Rows without end: the documents in a new order each epoch. Raises ValueError when there is nothing to predict."""
    pieces = [piece for document in documents for piece in _cut(document, row_tokens)]
    if not pieces:
        raise ValueError("the documents hold no two tokens in a row, so there is nothing to train on")
    generator = np.random.default_rng(seed)
    while True:
        yield from _rows([pieces[place] for place in generator.permutation(len(pieces))], row_tokens)


def _cut(document: Sequence[int], row_tokens: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(document), row_tokens):
        piece = document[start : start + row_tokens]
        if len(piece) > 1:
            yield piece


def _rows(pieces: Sequence[Sequence[int]], row_tokens: int) -> Iterator[DocumentRow]:
    held: list[Sequence[int]] = []
    used = 0
    for piece in pieces:
        if used + len(piece) > row_tokens:
            yield _row(held)
            held, used = [], 0
        held.append(piece)
        used += len(piece)
    yield _row(held)


def _row(pieces: Sequence[Sequence[int]]) -> DocumentRow:
    ids = [token for piece in pieces for token in piece]
    positions = [position for piece in pieces for position in range(len(piece))]
    labels = [label for piece in pieces for label in (*piece[1:], _NO_LABEL)]
    return DocumentRow(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        labels=torch.tensor(labels),
        lengths=tuple(len(piece) for piece in pieces),
    )
