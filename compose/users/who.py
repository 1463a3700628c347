"""Which user is meant: the product's id or the log's pseudonym."""

from __future__ import annotations

from tidemill.compose.config import TidemillSettings


def pseudonym_of(settings: TidemillSettings, user: str, is_pseudonym: bool) -> str:
    """What the log calls a user. Raises ValueError for an id that cannot be one, or without the product's keys."""
    from tidemill.consumers.operate.rights.requests import checked_pseudonym

    if is_pseudonym:
        return checked_pseudonym(user)
    from tidemill.producers.product.pseudonym import Pseudonyms

    return checked_pseudonym(Pseudonyms(settings.product).of(user))
