"""Settings of the router, the OpenAI-compatible server in front of the replica pools."""

from __future__ import annotations

from enum import StrEnum

from pydantic import ConfigDict, Field, field_validator

from tidemill.producers.config import ReplicaRequests
from tidemill.producers.product.settings import checked_hashes
from tidemill.schemas.config import CLAIM_CHECK_BYTES, HttpSettings, Section


class LogFailure(StrEnum):
    """What to do with a request whose answer the log does not acknowledge."""

    REFUSE = "refuse"
    """Answer 503, and end a stream with an error: nothing is served that is not recorded."""
    SERVE_UNRECORDED = "serve_unrecorded"
    """Serve it, count it, and give it no interaction: nobody can vote on it."""


class OtherSampling(StrEnum):
    """What to do with a request whose sampling parameters are not those that the trainer assumes."""

    REFUSE = "refuse"
    """Answer 400 and name them."""
    SERVE_UNTRAINED = "serve_untrained"
    """Serve it; the recorded answer names the parameters and has no sampled token, since its logprobs would not be
    those that sampled it."""


class PoolAddresses(Section):
    """Base addresses of the replicas of each pool, http://host:port."""

    stable: list[str] = Field(default=["http://127.0.0.1:8000"], min_length=1)
    """Replicas with `replica.pool = "stable"`; also the way out where no canary replica answers."""

    canary: list[str] = Field(default=[])
    """Replicas with `replica.pool = "canary"`. None: nobody is in the canary arm."""


class RouterSettings(ReplicaRequests):
    """How product traffic is served and recorded."""

    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = "127.0.0.1"
    """Address that the HTTP server listens on; loopback unless the operator opens it."""

    port: int = Field(default=8200, ge=0, le=65535)
    """TCP port of the HTTP server; 0 lets the system choose one, which the log line names."""

    http: HttpSettings = HttpSettings()
    """What it bears from clients' connections."""

    api_keys: dict[str, str] = Field(default_factory=dict)
    """Who may ask: a name of each of the product's backends, and the SHA-256 of its key in hex."""

    pools: PoolAddresses = Field(default_factory=PoolAddresses)
    """Where the replicas are."""

    tokenizer: str | None = None
    """Directory or fsspec URL with the checkpoint's tokenizer and chat template. None: those of the run's first
    anchor."""

    remembered_turns: int = Field(default=4096, ge=1)
    """Answered turns whose token ids are remembered, so that a conversation goes on with the ids that were sampled; one
    that is forgotten is tokenised anew. A token takes about 40 bytes."""

    experiment_salt: str = "tidemill"
    """Decides, with the version under trial, who is in the canary arm. Routers of one product must agree on it."""

    consent_default: bool = False
    """Whether an answer may be trained on when the request does not say (header `x-tidemill-consent`)."""

    on_log_failure: LogFailure = LogFailure.REFUSE
    """What to do when the log does not acknowledge an interaction."""

    other_sampling: OtherSampling = OtherSampling.REFUSE
    """What to do with a temperature other than 1, a top_p below 1, penalties and the like."""

    log_timeout_s: float = Field(default=10.0, gt=0)
    """Longest wait for the log's acknowledgement of one interaction."""

    log_rest_s: float = Field(default=1.0, gt=0)
    """How long requests are refused at once after the log has failed, before one of them tries it again."""

    request_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for one answer, tries on other replicas included."""

    max_concurrent_requests: int = Field(default=256, ge=1)
    """Requests in hand; further ones are answered 429."""

    max_body_bytes: int = Field(default=2**20, ge=1)
    """Largest request body; a larger one is answered 413."""

    max_prompt_tokens: int = Field(default=32_768, ge=1)
    """Longest prompt; a longer one is answered 400."""

    claim_check_bytes: int = Field(default=CLAIM_CHECK_BYTES, ge=1)
    """An interaction above this size leaves its segments in the object store."""

    grace_s: float = Field(default=20.0, ge=0)
    """Seconds that running answers get to finish on shutdown."""

    @field_validator("api_keys")
    @classmethod
    def _names_and_hashes(cls, keys: dict[str, str]) -> dict[str, str]:
        return checked_hashes(keys, "router")
