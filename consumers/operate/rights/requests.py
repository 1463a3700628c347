"""A user's demands about his data, as `user.requests` tells them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.schemas.claim import digest
from tidemill.schemas.records import UserRequest, UserWish

LONGEST_NAME = 200


class BadUser(ValueError):
    """A user that no demand can be about; the message says why."""


def checked_pseudonym(text: str) -> str:
    """A pseudonym as it was given. Raises BadUser for what the log can hold of nobody."""
    if not text:
        raise BadUser("the user is empty: interactions that name no user belong to nobody and cannot be told apart")
    if len(text) > LONGEST_NAME or not text.isprintable():
        raise BadUser(f"a pseudonym has at most {LONGEST_NAME} printable characters, not {len(text)}")
    return text


def new_request(user_id: str, wish: UserWish, requested_by: str, at: int) -> UserRequest:
    """A demand made now. Raises BadUser."""
    checked_pseudonym(user_id)
    if not 0 < len(requested_by.strip()) <= LONGEST_NAME:
        raise BadUser(f"who demands it has a name of 1 to {LONGEST_NAME} characters: give it with --by")
    name = digest(f"{user_id}\x00{wish.value}\x00{at}".encode())
    return UserRequest(request_id=name, user_id=user_id, wish=wish, requested_by=requested_by.strip(), at=at)


@dataclass(slots=True)
class Demands:
    """The demands of one user in the order of the log; a repeated record counts once."""

    user_id: str
    made: list[UserRequest] = field(default_factory=list)

    def observe(self, record: object) -> None:
        """Take a record in; other users' and other kinds are let pass."""
        if isinstance(record, UserRequest) and record.user_id == self.user_id and record not in self.made:
            self.made.append(record)

    @property
    def newest(self) -> UserRequest | None:
        """The demand that holds now."""
        return self.made[-1] if self.made else None

    def standing(self, wish: UserWish) -> UserRequest | None:
        """The newest demand, where it is this wish: to be carried on, not made again."""
        return self.newest if self.newest is not None and self.newest.wish is wish else None
