"""Pseudonyms: what the log knows of a user. Without the key nobody can tell whose they are, or make them from ids."""

from __future__ import annotations

import hmac

from tidemill.producers.product.settings import ProductSettings

_PURPOSE = b"tidemill/pseudonym/1\x00"
_HEX_DIGITS = 32
LONGEST_USER_BYTES = 512
NOBODY = ""
"""Pseudonym where the product named no user."""


class BadUserId(ValueError):
    """A user id that cannot be one; the message says why."""


class Pseudonyms:
    """Turns the product's user ids into pseudonyms: HMAC-SHA256 under `product.pseudonym_key`, 128 bits as hex.

    Raises:
        KeysMissing: the product's keys are not configured.
    """

    def __init__(self, product: ProductSettings) -> None:
        self._key = product.require_keys().pseudonym_key.get_secret_value().encode()

    def of(self, user: str | None) -> str:
        """The pseudonym of the product's user id, the same for the same bytes; `NOBODY` of None. Raises BadUser."""
        if user is None:
            return NOBODY
        return hmac.digest(self._key, _PURPOSE + _bytes_of(user), "sha256").hex()[:_HEX_DIGITS]


def _bytes_of(user: str) -> bytes:
    if not isinstance(user, str):
        raise BadUserId(f"a user id is a string, not {type(user).__name__}")
    try:
        data = user.encode()
    except UnicodeEncodeError as error:
        raise BadUserId(f"the user id is no text: {error.reason}") from error
    if not 0 < len(data) <= LONGEST_USER_BYTES:
        raise BadUserId(f"a user id has 1 to {LONGEST_USER_BYTES} bytes, not {len(data)}")
    return data
