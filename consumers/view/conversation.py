"""A rollout's tokens as a conversation: messages by the chat template's marks and the loss mask. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import numpy as np

from tidemill.consumers.view.tokens import TokenTexts
from tidemill.schemas.chat.calls import GRAMMARS

ASSISTANT, GIVEN = "assistant", "not sampled"
"""Who speaks where the policy sampled, and where it did not and no mark tells who."""
END_TOKENS = 5
"""Most tokens that a template writes between a sampled turn and the next message."""


@dataclass(frozen=True, slots=True)
class SaidTokens:
    """One message: tokens [start, end), counted through all segments of the rollout."""

    segment: int
    role: str
    start: int
    end: int


def said_tokens(
    ids: Sequence[int], mask: Sequence[int], lengths: Sequence[int], tokens: TokenTexts | None
) -> list[SaidTokens]:
    """The messages of a rollout in their order.

    Args:
        ids: of all segments, one behind the other.
        mask: 1 for each token that the policy sampled.
        lengths: tokens of each segment.
        tokens: without them, messages end where the loss mask changes.
    """
    ends = [min(end, len(ids), len(mask)) for end in accumulate(lengths, initial=0)]
    found = list[SaidTokens]()
    for segment, (start, end) in enumerate(pairwise(ends)):
        begun = list(_begun(start, end, ids, mask, tokens))
        places = [place for place, _role in begun] + [end]
        found += [SaidTokens(segment, role, place, places[n + 1]) for n, (place, role) in enumerate(begun)]
    return found


def _begun(
    start: int, end: int, ids: Sequence[int], mask: Sequence[int], tokens: TokenTexts | None
) -> Iterator[tuple[int, str]]:
    """Where messages of a segment begin, and their roles."""
    speaking = ""
    for place in _candidates(start, end, ids, mask, tokens):
        role = ""
        if tokens is not None and not mask[place] and ids[place] in tokens.marks:
            role = tokens.role_at(ids, place)
        if not role and (place == start or mask[place] != mask[place - 1]):
            if mask[place]:
                # The template has named the assistant already, in the tokens before.
                role = "" if speaking == ASSISTANT else ASSISTANT
            elif place == start or not _ends(place, end, ids, tokens):
                role = GIVEN
        if role:
            speaking = role
            yield place, role


def _candidates(start: int, end: int, ids: Sequence[int], mask: Sequence[int], tokens: TokenTexts | None) -> list[int]:
    """Places at which a message may begin: the first, changes of the mask, and marks."""
    sampled = np.asarray(mask[start:end], dtype=np.uint8)
    found = np.append(True, sampled[1:] != sampled[:-1])[: len(sampled)]
    if tokens is not None:
        found |= (sampled == 0) & np.isin(np.asarray(ids[start:end], dtype=np.int64), list(tokens.marks))
    places: list[int] = (np.flatnonzero(found) + start).tolist()
    return places


def _ends(place: int, end: int, ids: Sequence[int], tokens: TokenTexts | None) -> bool:
    """Whether the tokens behind a sampled turn are the template's end of it: another message begins, or none."""
    if tokens is None:
        return False
    near = range(place, min(place + END_TOKENS, end))
    return len(near) < END_TOKENS or any(ids[at] in tokens.marks and tokens.role_at(ids, at) for at in near)


@dataclass(frozen=True, slots=True)
class TextRun:
    """Neighbouring tokens that are shown alike."""

    text: str
    look: str
    """Class of their colour; empty without one."""
    title: str


@dataclass(frozen=True, slots=True)
class SaidText:
    """A stretch of a message: tool calls are told apart."""

    is_call: bool
    runs: list[TextRun]


def said_texts(texts: Sequence[str], looks: Sequence[str], titles: Sequence[str], calls: bool) -> list[SaidText]:
    """A message for its reader: token texts, with the class and the title of each; `calls`: it may hold tool calls."""
    within = _call_flags(texts) if calls else [False] * len(texts)
    rows = list(zip(within, looks, titles, texts, strict=True))
    found = list[SaidText]()
    for is_call, stretch in groupby(rows, key=lambda row: row[0]):
        runs = [TextRun("".join(row[3] for row in alike), look, title)
                for (look, title), alike in groupby(stretch, key=lambda row: row[1:3])]  # fmt: skip
        found.append(SaidText(is_call, runs))
    return found


def _call_flags(texts: Sequence[str]) -> list[bool]:
    """Whether each token is of a tool call, in the first family's form in which there is one."""
    whole = "".join(texts)
    grammar = next((each for each in GRAMMARS if each.marker and each.marker in whole), None)
    flags, place = list[bool](), 0
    pieces = grammar.pieces(whole) if grammar is not None else iter(())
    begin, end, _body = next(pieces, (len(whole), len(whole), ""))
    for text in texts:
        while place >= end and end < len(whole):
            begin, end, _body = next(pieces, (len(whole), len(whole), ""))
        flags.append(begin <= place < end)
        place += len(text)
    return flags
