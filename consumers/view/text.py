"""Text of rollouts and users as a reader may see it: nothing in it acts on the page, and nothing in it is hidden."""

from __future__ import annotations

import re

# Not the line break and the tab, and not the two joiners that ordinary words and emoji need.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
CONTROL_PICTURES = 0x2400


def visible(text: str) -> str:
    """A text whose control, directional and invisible characters are shown by their signs or their numbers."""
    return _HIDDEN.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(CONTROL_PICTURES + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def clipped(text: str, most: int) -> str:
    """The beginning of a long text, with the number of characters that are left out."""
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more)"
