"""Token ids as text: the tokenizer of the model that the page was told of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tidemill.schemas.chat.format import TOKENIZER_FILE, special_texts

LONGEST_CHARACTER = 8
"""Tokens that one character takes at most: behind more, what is there is no text."""
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer", "system_prompt", "available_tools"), "system"),
    **dict.fromkeys(("user", "human", "inst"), "user"),
    **dict.fromkeys(("assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "ipython", "function", "observation", "tool_results", "tool_response"), "tool"),
}
_NAME = re.compile(r"\s*([A-Za-z_]+)\s*(?:[\n<|｜\[]|$)")
HEADER_TOKENS, RESPONSE_TOKENS = 16, 32
"""Tokens behind a mark that may name a role, and that may say that a user's message holds tool output."""


class TokenTexts:
    """One tokenizer, read from its file. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = special_texts(tokenizer)
        self.marks = {number: text for text in texts if (number := tokenizer.token_to_id(text)) is not None}
        """Texts of the tokens that structure a conversation, by id. Content cannot spell them."""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id: a character of several tokens is at its last one; an unknown id is its number."""
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
                # Bytes that are no text would be decoded anew with each further token.
                text = "\ufffd"
                stream = DecodeStream(skip_special_tokens=False)
            if text is not None:
                waiting = []
            found.append(text or "")
        return found

    def ways(self, text: str) -> list[list[int]]:
        """How a text may be tokenised within a longer one: as it begins a line, and behind a space."""
        found = (self._tokenizer.encode(begun + text, add_special_tokens=False).ids for begun in ("", " "))
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in found if ids)]

    def role_at(self, ids: Sequence[int], place: int) -> str:
        """Who speaks from the mark at `place` on: system, user, assistant or tool; empty where it begins no message."""
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
    """The tokenizer in a model's directory; None where there is none that can be read."""
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
