"""Settings of the feedback gateway."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from tidemill.producers.product.settings import checked_hashes
from tidemill.schemas.config import HttpSettings, Section


class GatewaySettings(Section):
    """Where the gateway listens, who may use it, and how much."""

    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = "127.0.0.1"
    """Address to listen at. It speaks plain HTTP: beyond this machine, put it behind a proxy that speaks TLS."""

    port: int = Field(default=8090, ge=0, le=65_535)
    """Port to listen at. 0: a free one."""

    http: HttpSettings = HttpSettings()
    """What it bears from clients' connections."""

    api_keys: dict[str, str] = Field(default_factory=dict)
    """Who may send: a name, which is written into each record as its source, and the SHA-256 of their key in hex."""

    key_rate: float = Field(default=500.0, gt=0)
    """Events a second that an API key may send for long."""

    key_burst: int = Field(default=2000, ge=1)
    """Events that an API key may send at once."""

    user_rate: float = Field(default=5.0, gt=0)
    """Events a second that may be sent in one user's name for long."""

    user_burst: int = Field(default=60, ge=1)
    """Events that may be sent in one user's name at once."""

    max_body_bytes: int = Field(default=262_144, ge=1024)
    """Bytes of a request's body; what is longer is refused while it is read."""

    max_batch: int = Field(default=200, ge=1)
    """Events of one batch."""

    acknowledge_timeout_s: float = Field(default=5.0, ge=0.5)
    """Seconds that the log may take to acknowledge; then the answer is 503, and the event may be sent again."""

    max_queued: int = Field(default=100_000, ge=1)
    """Events that wait for the log's acknowledgement at most."""

    linger_ms: float = Field(default=2.0, ge=0, le=100)
    """Milliseconds that an event waits for others, to be written with them as one batch."""

    @field_validator("api_keys")
    @classmethod
    def _names_and_hashes(cls, keys: dict[str, str]) -> dict[str, str]:
        return checked_hashes(keys, "gateway")

    @model_validator(mode="after")
    def _batches_pass(self) -> Self:
        if self.max_batch > self.key_burst:
            raise ValueError(f"max_batch {self.max_batch} is above key_burst {self.key_burst}: it could never be sent")
        return self
