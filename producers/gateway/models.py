"""What clients send and get, as the OpenAPI page shows it. Types are strict: "1" is not a number, unknown keys are
refused. What a signal may say is checked by the SDK's own `FeedbackMaker`, not here."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, model_validator

from tidemill.producers.feedback.event import Report
from tidemill.schemas.records import SignalKind

TOKEN_EXAMPLE = "b1946ac92492d2347c6235b4d2611184.kWb2rJZ1eYQvJmQ0m2cZ4o3n5p6q7r8s9t0uAvBwCxD"
THUMB_EXAMPLE = {
    "interaction": TOKEN_EXAMPLE,
    "kind": "thumb",
    "value": 1,
    "user": "ann@example.com",
    "observed_at": "2026-03-01T12:00:00.250Z",
}
WITHDRAWAL_EXAMPLE = {
    "interaction": TOKEN_EXAMPLE,
    "kind": "thumb",
    "value": None,
    "user": "ann@example.com",
    "event_id": "click-1002",
    "corrects": "click-1001",
}


def _iso_text(value: object) -> object:
    """Bare numbers would be read as seconds or milliseconds, by their size."""
    if isinstance(value, datetime):
        return value
    if not isinstance(value, str) or "T" not in value:
        raise ValueError("a time is text in ISO 8601 with a time zone, 2026-03-01T12:00:00Z")
    return value


class FeedbackIn(BaseModel):
    """One signal about one interaction."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    interaction: StrictStr = Field(max_length=256)
    """The interaction token that the router returned with the answer."""

    kind: SignalKind
    """What the user did, or what the product saw."""

    value: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None = None
    """Read by kind: a thumb is 1 or -1. Null withdraws the event that `corrects` names."""

    user: StrictStr | None = Field(max_length=512)
    """The product's own id of the user; null where the request that was answered named nobody. Only its keyed hash is
    stored."""

    event_id: StrictStr | None = Field(default=None, max_length=128)
    """The same event sent again with the same id counts once."""

    corrects: StrictStr | None = Field(default=None, max_length=128)
    """Event id of the signal that this one replaces."""

    observed_at: Annotated[AwareDatetime, BeforeValidator(_iso_text)] | None = None
    """When it happened, ISO 8601 with a time zone."""

    @model_validator(mode="after")
    def _can_be_sent_again(self) -> Self:
        if self.event_id is None and self.observed_at is None:
            raise ValueError("give event_id or observed_at, so that the event can be sent again and counts once")
        return self

    def report(self) -> Report:
        """The signal as the SDK takes it."""
        return Report(
            self.interaction, self.kind, self.value, self.user, self.event_id, self.corrects, self.observed_at
        )


class BatchIn(BaseModel):
    """Several signals; each is taken or refused by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    events: list[Any] = Field(
        min_length=1, json_schema_extra={"items": {"$ref": "#/components/schemas/FeedbackIn"}, "type": "array"}
    )
    """The signals, each as `/v1/feedback` takes it."""


class AcceptedOut(BaseModel):
    """The log has the event."""

    event_id: str = Field(examples=["d-0a4d55a8d778e5022fab701977c5d840"])


class ItemOut(BaseModel):
    """What became of one event of a batch."""

    status: int = Field(examples=[202])
    """As the status of `/v1/feedback` for this event alone."""
    event_id: str | None = Field(default=None, examples=["d-0a4d55a8d778e5022fab701977c5d840"])
    """Of an event that could be read."""
    detail: str | None = None
    """Why it was refused."""
    retry_after_s: int | None = None
    """When to send it again, where that can help."""


class BatchOut(BaseModel):
    """What became of each event, in the order of the request."""

    accepted: int
    results: list[ItemOut]


class HealthOut(BaseModel):
    """Whether the log can be reached."""

    status: str = Field(examples=["ok"])
    detail: str = Field(examples=["the log answers"])
