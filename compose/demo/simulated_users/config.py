"""Settings of the simulated users."""

from __future__ import annotations

from pydantic import Field, SecretStr

from tidemill.producers.environments.ledger import LedgerOptions
from tidemill.schemas.config import Section


class UsersSettings(Section):
    """Settings of the simulated users: their number, their preferences and their behaviour."""

    router: str = Field(default="http://127.0.0.1:8200", pattern=r"^https?://")
    """Address of the router, http://host:port."""

    api_key: SecretStr = SecretStr("")
    """The product's key for the router (`router.api_keys`). Secrets belong in the environment
    (TIDEMILL_USERS__API_KEY)."""

    seed: int = Field(default=0, ge=0)
    """Root of the users' randomness: their habits, their questions and their reactions."""

    ordinary: int = Field(default=60, ge=0)
    """Users who ask and react."""

    bots: int = Field(default=2, ge=0)
    """Users who vote at random on all answers, many times."""

    held_out: int = Field(default=12, ge=0)
    """Users from whom nothing is learnt: satisfaction is measured on their answers."""

    held_out_share: float = Field(default=0.15, ge=0, le=1)
    """Share of the questions that held-out users ask, if there are other users too."""

    bot_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the questions that bots ask, if there are other users too."""

    likes_polite: bool = True
    """The preference of all users, which no simulated reward measures: an answer that closes politely, or one that
    does not."""

    changed_preference_at: float | None = Field(default=None, ge=0)
    """Time of a change of preference, in seconds after the start: then all users like the opposite. None: never."""

    vote_rate: float = Field(default=0.6, ge=0, le=1)
    """Mean share of the answers that an ordinary user votes on."""

    flip_rate: float = Field(default=0.05, ge=0, le=1)
    """Share of the votes that are the opposite of the user's opinion."""

    mind_change_rate: float = Field(default=0.03, ge=0, le=1)
    """Share of the votes that are later replaced by the opposite vote."""

    vote_delay_s: float = Field(default=1.0, ge=0)
    """Mean time between an answer and its vote; the delays are random, and a few are several times as long."""

    consent_rate: float = Field(default=0.9, ge=0, le=1)
    """Share of the ordinary users who let the product learn from them."""

    leave_rate: float = Field(default=0.05, ge=0, le=1)
    """Share of the ordinary users who withdraw their consent at some time."""

    leaves_within: int = Field(default=20, ge=1)
    """Greatest number of questions after which a user who withdraws their consent does so."""

    shuffle_thumbs: bool = False
    """Control run: votes are exchanged with earlier votes, so that they are independent of their answers."""

    shuffle_window: int = Field(default=64, ge=2, multiple_of=2)
    """Number of votes among which `shuffle_thumbs` exchanges."""

    options: LedgerOptions = LedgerOptions()
    """Difficulty of the questions, as for tasks."""

    interactions_per_second: float = Field(default=30.0, gt=0)
    """Most answers that are requested from the router per second; a question takes several."""

    concurrency: int = Field(default=24, ge=1)
    """Most concurrent conversations."""

    request_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that a user waits for an answer; then they end the conversation."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the product. The trainer's importance weights assume 1."""

    max_turn_tokens: int = Field(default=32, ge=1)
    """Most tokens of one answer of the model."""

    report_every_s: float = Field(default=1.0, gt=0)
    """Seconds between two reports of the users' activity."""
