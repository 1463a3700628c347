"""Settings that the product's side shares. Secrets come from the environment or a file that only its owner can read.

The configuration has only hashes of the API keys of the product's backends, so that its readers cannot use the keys.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import Self

from pydantic import ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tidemill.schemas.config import Section

SHORTEST_KEY = 32
DAY_S = 86_400.0
HOW_TO_MAKE = (
    "make each with `openssl rand -hex 32`, and give the same to every process of the product's side: "
    "TIDEMILL_PRODUCT__SIGNING_KEYS='[\"KEY\"]' and TIDEMILL_PRODUCT__PSEUDONYM_KEY=ANOTHER_KEY in the environment, "
    "or `signing_keys` and `pseudonym_key` in the table [product] of the configuration file"
)


class KeysMissing(ValueError):
    """Error of a process of the product's side without its keys, or of a server without API keys of its clients; the
    message says how to make them."""


class ProductSettings(Section):
    """Keys of the product's side, and limits on the times of feedback."""

    model_config = ConfigDict(hide_input_in_errors=True)

    signing_keys: tuple[SecretStr, ...] = ()
    """Secrets that bind an interaction to its user, at least 32 characters each. The first signs, all verify: to
    change keys, put the new one first, and remove the old one when its interactions are too old for feedback."""

    pseudonym_key: SecretStr = SecretStr("")
    """Secret that turns the product's user ids into pseudonyms, at least 32 characters. Never change it: with another
    key every user gets a new pseudonym, and their data can no longer be found."""

    clock_skew_s: float = Field(default=60.0, ge=0, le=60)
    """Seconds that a product's clock may be ahead. The log itself refuses records that are more than 60 s ahead."""

    max_feedback_age_s: float = Field(default=30 * DAY_S, gt=0)
    """Age in seconds from which a signal is refused at the edge: its clock is wrong, or it is too late to be used."""

    @model_validator(mode="after")
    def _keys_usable(self) -> Self:
        named = {f"signing_keys[{place}]": key for place, key in enumerate(self.signing_keys)}
        if self.pseudonym_key.get_secret_value():
            named["pseudonym_key"] = self.pseudonym_key
        for name, key in named.items():
            if len(key.get_secret_value()) < SHORTEST_KEY:
                raise ValueError(
                    f"{name} has fewer than {SHORTEST_KEY} characters: make one with `openssl rand -hex 32`"
                )
        if self.pseudonym_key in self.signing_keys:
            raise ValueError("pseudonym_key is also a signing key: a signing key is changed, this one never is")
        return self

    def require_keys(self) -> Self:
        """Return these settings if the keys are set. Raises KeysMissing otherwise."""
        missing = [name for name in ("signing_keys", "pseudonym_key") if not getattr(self, name)]
        if missing:
            raise KeysMissing(f"the product's keys are not configured ({' and '.join(missing)}): {HOW_TO_MAKE}")
        return self

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give a process these keys; a dump of the settings hides the keys."""
        keys = [key.get_secret_value() for key in self.signing_keys]
        secret = self.pseudonym_key.get_secret_value()
        return {"TIDEMILL_PRODUCT__SIGNING_KEYS": json.dumps(keys), "TIDEMILL_PRODUCT__PSEUDONYM_KEY": secret}

    @classmethod
    def from_environment(cls) -> ProductSettings:
        """Read settings from `TIDEMILL_PRODUCT__...`, for a backend without a configuration file of Tidemill."""
        return _Environment().product

    @classmethod
    def with_random_keys(cls) -> ProductSettings:
        """Return settings with new keys: for a demonstration or a test, whose data is not kept."""
        return cls(signing_keys=(SecretStr(secrets.token_hex(32)),), pseudonym_key=SecretStr(secrets.token_hex(32)))


class _Environment(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="TIDEMILL_", env_nested_delimiter="__", extra="ignore", hide_input_in_errors=True
    )

    product: ProductSettings = Field(default_factory=ProductSettings)


def key_hash(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal, as the configuration has it."""
    return hashlib.sha256(key.encode()).hexdigest()
