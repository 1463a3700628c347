"""The signals that a product sends most, by name, for the producer that returns and for the one that is awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import datetime
from typing import Generic, TypeVar

from tidemill.schemas.records import SignalKind

Sent = TypeVar("Sent")
"""What `send` gives back: an event id, or something to await for one."""


class Shorthand(ABC, Generic[Sent]):
    """Thumbs and withdrawals in terms of `send`."""

    @abstractmethod
    def send(
        self,
        interaction: str,
        kind: SignalKind | str,
        value: float | None,
        *,
        user: str | None,
        event_id: str | None = None,
        corrects: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> Sent:
        """Send one signal; its event id."""

    def thumbs_up(
        self,
        interaction: str,
        *,
        user: str | None,
        event_id: str | None = None,
        corrects: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> Sent:
        """The user likes the answer. Arguments and errors as `send`."""
        return self.send(
            interaction,
            SignalKind.THUMB,
            1.0,
            user=user,
            event_id=event_id,
            corrects=corrects,
            observed_at=observed_at,
        )

    def thumbs_down(
        self,
        interaction: str,
        *,
        user: str | None,
        event_id: str | None = None,
        corrects: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> Sent:
        """The user dislikes the answer. Arguments and errors as `send`."""
        return self.send(
            interaction,
            SignalKind.THUMB,
            -1.0,
            user=user,
            event_id=event_id,
            corrects=corrects,
            observed_at=observed_at,
        )

    def withdraw(
        self,
        interaction: str,
        withdrawn: str,
        *,
        user: str | None,
        kind: SignalKind | str = SignalKind.THUMB,
        event_id: str | None = None,
        observed_at: datetime | int | None = None,
    ) -> Sent:
        """The user takes a signal back: `withdrawn` is its event id, `kind` its kind. Errors as `send`."""
        return self.send(
            interaction, kind, None, user=user, event_id=event_id, corrects=withdrawn, observed_at=observed_at
        )
