"""API keys of the product's backends: the configuration holds their hashes, so that reading it gives nobody a key."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping


class ApiKeysMissing(ValueError):
    """No API key is configured, so that nobody could use the server; the message says how to make one."""


def how_to_make(section: str) -> str:
    """How to make an API key for the server whose settings are `section`."""
    return (
        "make one with `KEY=$(openssl rand -hex 32)`, give KEY to the backend, and put its hash, "
        f'`printf %s "$KEY" | sha256sum`, into the configuration: api_keys = {{ shop = "HASH" }} in the table '
        f'[{section}], or TIDEMILL_{section.upper()}__API_KEYS=\'{{"shop": "HASH"}}\''
    )


def key_hash(key: str) -> str:
    """What the configuration holds of a key: its SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def checked_hashes(hashes: dict[str, str], section: str) -> dict[str, str]:
    """The hashes by name, when they are that. Raises ValueError."""
    for name, digest in hashes.items():
        if not re.fullmatch(r"[A-Za-z0-9._:@-]{1,64}", name):
            raise ValueError(f"the name {name!r}: 1 to 64 letters, digits, '.', '_', ':', '@' or '-' are allowed")
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"{name}: not a SHA-256 in hex; {how_to_make(section)}")
    if len(set(hashes.values())) < len(hashes):
        raise ValueError("two names have the same API key, so their requests cannot be told apart")
    return hashes


def require_some(hashes: Mapping[str, str], section: str) -> None:
    """Raise ApiKeysMissing when there is none."""
    if not hashes:
        raise ApiKeysMissing(f"{section}.api_keys is empty, so no client could use it: {how_to_make(section)}")


class ApiKeys:
    """Who may use a server."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._names = {digest.encode(): name for name, digest in hashes.items()}

    def name_of(self, key: str) -> str | None:
        """The name of a key; None for one that is not known. Takes as long for every key."""
        digest = key_hash(key).encode()
        found = [name for known, name in self._names.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None
