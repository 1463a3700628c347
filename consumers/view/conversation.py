"""A rollout's tokens as a conversation: texts, messages (by the template's marks and the loss mask), and colours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise, zip_longest
from operator import itemgetter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tidemill.schemas.chat.calls import GRAMMARS
from tidemill.schemas.chat.format import TOKENIZER_FILE, special_texts

LONGEST_CHARACTER = 8
"""Maximum tokens of one character: if more tokens give no character, their bytes are not text."""
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer", "system_prompt", "available_tools"), "system"),
    **dict.fromkeys(("user", "human", "inst"), "user"),
    **dict.fromkeys(("assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "ipython", "function", "observation", "tool_results", "tool_response"), "tool"),
}
_NAME = re.compile(r"\s*([A-Za-z_]+)\s*(?:[\n<|｜\[]|$)")
HEADER_TOKENS, RESPONSE_TOKENS = 16, 32
"""Number of tokens after a mark that may name a role, and that may mark a user's message as tool output."""


class TokenTexts:
    """One tokenizer, read from its file. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = special_texts(tokenizer)
        self.marks = {number: text for text in texts if (number := tokenizer.token_to_id(text)) is not None}
        """Texts of the tokens that structure a conversation, by id. Content cannot contain them."""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id: a character of several tokens is at its last one; an unknown id is its number."""
        found, stream, waiting = list[str](), DecodeStream(skip_special_tokens=False), list[int]()
        for number in ids:
            waiting.append(number)
            if self._tokenizer.id_to_token(number) is None:
                found.append(f"⟨{number}⟩")
                stream, waiting = DecodeStream(skip_special_tokens=False), []
                continue
            try:
                text = stream.step(self._tokenizer, number)
            except Exception:  # noqa: BLE001 - tokenizers raises bare Exception for a text that a later token changes
                text = None
                waiting += [number] * LONGEST_CHARACTER
            if text is None and len(waiting) >= LONGEST_CHARACTER:
                # Bytes that are not text would be decoded again with each further token.
                text = "\ufffd"
                stream = DecodeStream(skip_special_tokens=False)
            if text is not None:
                waiting = []
            found.append(text or "")
        return found

    def ways(self, text: str) -> list[list[int]]:
        """Return the tokenisations of a text within a longer one: at the start of a line, and after a space."""
        found = (self._tokenizer.encode(prefix + text, add_special_tokens=False).ids for prefix in ("", " "))
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]

    def role_at(self, ids: Sequence[int], place: int) -> str:
        """Return the role that starts at the mark at `place`: system, user, assistant, tool; empty if none starts."""
        mark = self.marks.get(ids[place], "")
        name = mark.strip("<|｜>[]▁").lower()
        if name in _ROLES:
            return _ROLES[name]
        behind = self._tokenizer.decode(list(ids[place + 1 : place + 1 + HEADER_TOKENS]), skip_special_tokens=False)
        named = _NAME.match(behind)
        role = _ROLES.get(named[1].lower(), "") if mark and named and "/" not in mark else ""
        if role == "user":
            longer = self._tokenizer.decode(list(ids[place + 1 : place + RESPONSE_TOKENS]), skip_special_tokens=False)
            return "tool" if "<tool_response>" in longer else role
        return role


def token_texts(directory: str) -> TokenTexts | None:
    """Return the tokenizer in a model's directory; None if none can be read."""
    file = Path(directory).expanduser() / TOKENIZER_FILE
    if not directory or not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - tokenizers raises bare Exception for every defect of the file
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenTexts(tokenizer)


ASSISTANT, GIVEN = "assistant", "not sampled"
"""The roles of sampled text, and of other text for which no mark names a role."""
END_TOKENS = 5
"""Maximum tokens that a template writes between a sampled turn and the next message."""


@dataclass(frozen=True, slots=True)
class MessageTokens:
    """One message: tokens [start, end), numbered through all segments of the rollout."""

    segment: int
    role: str
    start: int
    end: int


def message_tokens(
    ids: Sequence[int], mask: Sequence[int], lengths: Sequence[int], tokens: TokenTexts | None
) -> list[MessageTokens]:
    """Return the messages of a rollout in their order.

    Args:
        ids: token ids of all segments, concatenated.
        mask: 1 for each token that the policy sampled.
        lengths: number of tokens of each segment.
        tokens: the tokenizer; without it, messages end where the loss mask changes.
    """
    ends = [min(end, len(ids), len(mask)) for end in accumulate(lengths, initial=0)]
    found = list[MessageTokens]()
    for segment, (start, end) in enumerate(pairwise(ends)):
        starts = list(_message_starts(start, end, ids, mask, tokens))
        places = [place for place, _role in starts] + [end]
        found += [MessageTokens(segment, role, place, places[n + 1]) for n, (place, role) in enumerate(starts)]
    return found


def _message_starts(
    start: int, end: int, ids: Sequence[int], mask: Sequence[int], tokens: TokenTexts | None
) -> Iterator[tuple[int, str]]:
    """Yield the start of each message of a segment, and its role."""
    # A message may begin at the first token, at a change of the mask, and at a mark that was not sampled.
    sampled = np.asarray(mask[start:end], dtype=np.uint8)
    candidates = np.append(True, sampled[1:] != sampled[:-1])[: len(sampled)]
    if tokens is not None:
        candidates |= (sampled == 0) & np.isin(np.asarray(ids[start:end], dtype=np.int64), list(tokens.marks))

    def role_at(place: int) -> str:
        return tokens.role_at(ids, place) if tokens is not None and ids[place] in tokens.marks else ""

    def ends(place: int) -> bool:
        """Whether the tokens after a sampled turn are the template's end of it: a message or nothing follows them."""
        near = range(place, min(place + END_TOKENS, end))
        return tokens is not None and (len(near) < END_TOKENS or any(map(role_at, near)))

    speaking = ""
    for place in (np.flatnonzero(candidates) + start).tolist():
        role = "" if mask[place] else role_at(place)
        if not role and (place == start or mask[place] != mask[place - 1]):
            if mask[place]:
                # The template has named the assistant already, in the tokens before.
                role = "" if speaking == ASSISTANT else ASSISTANT
            elif place == start or not ends(place):
                role = GIVEN
        if role:
            speaking = role
            yield place, role


Paint = tuple[str, str]
"""The CSS class of a token's colour, empty if it has none, and the token's title."""
TextPart = tuple[bool, list[tuple[Paint, str]]]
"""A part of a message: whether it is a tool call, and the text of each of its runs of equally painted tokens."""


def message_parts(texts: Sequence[str], paints: Sequence[Paint], calls: bool) -> list[TextPart]:
    """Split a message into parts: token texts, each with its paint; `calls`: it may contain tool calls."""
    within, place, whole = list[bool](), 0, "".join(texts)
    # The grammar of the first model family whose marker is in the text.
    grammar = next((each for each in GRAMMARS if calls and each.marker and each.marker in whole), None)
    pieces = grammar.pieces(whole) if grammar is not None else iter(())
    nowhere = (len(whole), len(whole), "")
    begin, end, _body = next(pieces, nowhere)
    for text in texts:
        while place >= end and end < len(whole):
            begin, end, _body = next(pieces, nowhere)
        within.append(begin <= place < end)
        place += len(text)
    found = list[TextPart]()
    for is_call, stretch in groupby(zip(within, paints, texts, strict=True), key=itemgetter(0)):
        runs = groupby(stretch, key=itemgetter(1))
        found.append((is_call, [(paint, "".join(text for _, _, text in alike)) for paint, alike in runs]))
    return found


COLOURS = {
    "": "none",
    "mask": "loss mask",
    "version": "weight version",
    "logprob": "logprob",
    "mismatch": "difference to the trainer",
    "advantage": "advantage",
}
"""The ways to colour tokens: the value in the address, and its label."""
BOUNDS = ((0.9, "0.9 or more"), (0.5, "0.5 to 0.9"), (0.1, "0.1 to 0.5"), (0.01, "0.01 to 0.1"), (0.0, "below 0.01"))
"""Minimum probability of each class, and its label."""
DIFFERENCES = ((2.0, "2 or more"), (1.0, "1 to 2"), (0.5, "0.5 to 1"), (0.0, "below 0.5"))
"""Minimum difference of logprobs of each class, in nats, and its label."""
HUES = 6
"""Number of version colours in the style sheet; the seventh version has the first one's colour again."""


Painted = tuple[list[Paint], list[tuple[str, str]]]
"""The paint of each token, and the labels of the classes in use."""


def by_mask(mask: Sequence[int]) -> Painted:
    """Colour the tokens that the policy sampled and is trained on."""
    legend = [("hue0", "sampled, in the loss"), ("", "given, not in the loss")]
    return [("hue0" if sampled else "", "") for sampled in mask], legend


def by_version(
    mask: Sequence[int], first: int, lengths: Sequence[int], spans: Iterable[tuple[int, int, int, int]]
) -> Painted:
    """Colour tokens by the version that sampled each of them.

    Args:
        first: index of the first of these tokens, through all segments.
        lengths: number of tokens of each segment.
        spans: segment, version, and the start and end of its tokens in the segment.
    """
    before, known = list(accumulate(lengths, initial=0)), [span for span in spans if 0 <= span[0] < len(lengths)]
    versions = sorted({version for _, version, _, _ in known})
    paints = [("", "")] * len(mask)
    for segment, version, start, end in known:
        look = f"hue{versions.index(version) % HUES}"
        for place in range(max(before[segment] + start, first), min(before[segment] + end, first + len(mask))):
            paints[place - first] = (look if mask[place - first] else "", "")
    return paints, [(f"hue{n % HUES}", f"version {version}") for n, version in enumerate(versions)]


def by_logprob(mask: Sequence[int], logprobs: Sequence[float | None]) -> Painted:
    """Colour tokens by the probability with which each was sampled; those without a logprob have no colour."""
    paints = list[Paint]()
    for sampled, logprob in islice(zip_longest(mask, logprobs), len(mask)):
        if sampled and logprob is not None:
            probability = math.exp(min(0.0, logprob))
            number = next(n for n, (least, _words) in enumerate(BOUNDS) if probability >= least)
            paints.append((f"odds{number}", f"logprob {logprob:.4f}"))
        else:
            paints.append(("", ""))
    return paints, [(f"odds{n}", f"probability {words}") for n, (_least, words) in enumerate(BOUNDS)]


def by_mismatch(n: int, first: int, lengths: Sequence[int], worst: Sequence[Sequence[float]]) -> Painted:
    """Colour tokens by the difference of trainer's and sampler's logprob, for the worst tokens of each step in the log.

    Args:
        n: number of tokens.
        first: index of the first of them, through all segments.
        worst: a row for each token: segment, position in it, the sampler's logprob and the trainer's.
    """
    paints = [("", "")] * n
    before = list(accumulate(lengths, initial=0))
    for segment, position, sampler, trainer in worst:
        place = before[int(segment)] + int(position) - first if 0 <= segment < len(lengths) else -1
        if 0 <= place < n:
            apart = abs(trainer - sampler)
            at = next(number for number, (least, _words) in enumerate(DIFFERENCES) if apart >= least or least == 0)
            paints[place] = (f"odds{len(DIFFERENCES) - at}", f"sampler {sampler:.4f}, trainer {trainer:.4f}")
    legend = [(f"odds{len(DIFFERENCES) - at}", f"difference {words}") for at, (_, words) in enumerate(DIFFERENCES)]
    note = f"{len(worst)} of its tokens are among the worst of their step; the log has no others"
    return paints, [*legend, ("", note)]


def by_advantage(mask: Sequence[int], advantage: float | None) -> Painted:
    """Colour each token that the rollout's advantage in its group weights."""
    if advantage is None:
        return [("", "")] * len(mask), [("", "no advantage: failed, or in no group yet")]
    sign = "up" if advantage > 0 else "down" if advantage < 0 else ""
    words = {"up": "made more probable", "down": "made less probable", "": "left as they are"}[sign]
    legend = [(sign, f"advantage {advantage:+.4g}: sampled tokens are {words}")]
    return [(sign if sampled else "", "") for sampled in mask], legend
