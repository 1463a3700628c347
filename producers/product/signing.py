"""Keyed hashes of the product's side: signed interactions, and pseudonyms of users.

A valid signature proves that the answer was served to this user, so that users cannot vote on answers to other users.

A token is `INTERACTION.SIGNATURE`; the signature is HMAC-SHA256 over the interaction and the user's pseudonym. The
token does not contain the pseudonym: on the user's device it identifies no user. A token of another user is
indistinguishable from a forged one.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import re
from collections.abc import Callable

from pydantic import SecretStr

from tidemill.producers.product.settings import ProductSettings

_TOKEN_PURPOSE = b"tidemill/interaction/1\x00"
_INTERACTION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SIGNATURE_LETTERS = 43
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
LONGEST_TOKEN = 64 + 1 + _SIGNATURE_LETTERS
Digest = Callable[[bytes], bytes]
"""Keyed digest of a message. Each signal needs two."""


class BadToken(ValueError):
    """Error of a token that was not issued for this user; the message has the reason, and never the right token."""


class Signer:
    """Signs interactions and verifies them. Raises KeysMissing if the product's keys are not configured."""

    def __init__(self, product: ProductSettings) -> None:
        self._digests = [_keyed_digest(key, _TOKEN_PURPOSE) for key in product.require_keys().signing_keys]

    def sign(self, interaction_id: str, pseudonym: str) -> str:
        """Return the token of an interaction that was served to a user. Raises ValueError for an invalid id."""
        if not _INTERACTION.fullmatch(interaction_id):
            raise ValueError(f"interaction id {interaction_id!r}: 1 to 64 letters, digits, '-' or '_' are allowed")
        return f"{interaction_id}.{_signature(self._digests[0], interaction_id, pseudonym)}"

    def verify(self, token: str, pseudonym: str) -> str:
        """Return the interaction id of a token that was issued to this user. Raises BadToken."""
        if not isinstance(token, str) or len(token) > LONGEST_TOKEN:
            raise BadToken(f"an interaction token is a string of at most {LONGEST_TOKEN} characters")
        interaction_id, dot, signature = token.rpartition(".")
        well_formed = dot and len(signature) == _SIGNATURE_LETTERS and signature.isascii()
        if not well_formed or not _INTERACTION.fullmatch(interaction_id):
            raise BadToken("an interaction token is INTERACTION.SIGNATURE, as the router returns it")
        # Compare the text, not the decoded bytes: base64 has several texts for one value.
        for digest in self._digests:
            if hmac.compare_digest(signature, _signature(digest, interaction_id, pseudonym)):
                return interaction_id
        raise BadToken("this interaction was not served to this user: the token is forged, altered or another's")


def _keyed_digest(key: SecretStr, purpose: bytes) -> Digest:
    """Return HMAC-SHA256 (RFC 2104), under a key, of `purpose` and a message.

    Key and purpose are hashed once: half the time of a copied `hmac.HMAC`.
    """
    secret = key.get_secret_value().encode()
    block = (secret if len(secret) <= 64 else hashlib.sha256(secret).digest()).ljust(64, b"\x00")
    begun_inner, begun_outer = (hashlib.sha256(bytes(byte ^ pad for byte in block)) for pad in (0x36, 0x5C))
    begun_inner.update(purpose)

    def digest(message: bytes) -> bytes:
        inner, outer = begun_inner.copy(), begun_outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()

    return digest


def _signature(digest: Digest, interaction_id: str, pseudonym: str) -> str:
    signed = digest(f"{interaction_id}\x00{pseudonym}".encode())
    return binascii.b2a_base64(signed).translate(_URL_SAFE)[:_SIGNATURE_LETTERS].decode()


_PSEUDONYM_PURPOSE = b"tidemill/pseudonym/1\x00"
_HEX_DIGITS = 32
LONGEST_USER_BYTES = 512
NOBODY = ""
"""Pseudonym if the product named no user."""


class BadUserId(ValueError):
    """Error of an invalid user id; the message has the reason."""


class Pseudonyms:
    """Turns the product's user ids into pseudonyms: HMAC-SHA256 under `product.pseudonym_key`, 128 bits as hex.

    Without the key, pseudonyms cannot be traced to users or made from ids. Raises KeysMissing as `Signer` does.
    """

    def __init__(self, product: ProductSettings) -> None:
        self._digest = _keyed_digest(product.require_keys().pseudonym_key, _PSEUDONYM_PURPOSE)

    def of(self, user: str | None) -> str:
        """Return the pseudonym of a user id, equal for equal bytes; `NOBODY` for None. Raises BadUserId."""
        if user is None:
            return NOBODY
        if not isinstance(user, str):
            raise BadUserId(f"a user id is a string, not {type(user).__name__}")
        try:
            data = user.encode()
        except UnicodeEncodeError as error:
            raise BadUserId(f"the user id is no text: {error.reason}") from error
        if not 0 < len(data) <= LONGEST_USER_BYTES:
            raise BadUserId(f"a user id has 1 to {LONGEST_USER_BYTES} bytes, not {len(data)}")
        return self._digest(data).hex()[:_HEX_DIGITS]
