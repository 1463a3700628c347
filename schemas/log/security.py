"""How clients and brokers prove who they are: the one reading of `kafka.client_options`.

The options are librdkafka's, and librdkafka takes them as they are. A client without it is set up from what is read
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import SecretStr

from tidemill.schemas.config import KafkaSettings

FILES = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
PREFIXES = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")
PROBE = "probe"
"""Value of `ssl.ca.location`: the certificates of the operating system, as without it."""
WITH_PASSWORD = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class SecurityError(ValueError):
    """The options cannot open a connection; the message names them and says what to do."""


class Protocol(StrEnum):
    """Value of `security.protocol`."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"

    @property
    def encrypted(self) -> bool:
        """Whether TLS carries it."""
        return self in (Protocol.SSL, Protocol.SASL_SSL)

    @property
    def sasl(self) -> bool:
        """Whether the client names itself by SASL."""
        return self in (Protocol.SASL_PLAINTEXT, Protocol.SASL_SSL)


@dataclass(frozen=True, slots=True)
class Security:
    """What the options say; empty where they say nothing."""

    protocol: Protocol
    ca: str
    """File or directory with the certificates of the authorities that are trusted; empty: the system's."""
    certificate: str
    key: str
    key_password: SecretStr
    mechanism: str
    user: str
    password: SecretStr


def security_options(options: Mapping[str, str]) -> dict[str, str]:
    """Those of the options that say how to prove who one is."""
    return {name: value for name, value in options.items() if name.startswith(PREFIXES)}


def security_of(kafka: KafkaSettings) -> Security:
    """What the settings say. Raises SecurityError when something is missing, or is not what it should be."""
    options = kafka.client_options
    name = options.get("security.protocol", Protocol.PLAINTEXT).upper()
    if name not in Protocol.__members__:
        raise SecurityError(
            f"kafka.client_options: security.protocol is {name!r}, and has to be one of {', '.join(Protocol)}"
        )
    protocol = Protocol(name)
    ca = options.get("ssl.ca.location", "")
    found = Security(
        protocol=protocol,
        ca="" if ca == PROBE else ca,
        certificate=options.get("ssl.certificate.location", ""),
        key=options.get("ssl.key.location", ""),
        key_password=SecretStr(options.get("ssl.key.password", "")),
        mechanism=options.get("sasl.mechanism", options.get("sasl.mechanisms", "")),
        user=options.get("sasl.username", ""),
        password=SecretStr(options.get("sasl.password", "")),
    )
    if protocol.sasl:
        _require_user(found)
    if protocol.encrypted:
        for option, path in zip(FILES, (found.ca, found.certificate, found.key), strict=True):
            if path and not Path(path).exists():
                raise SecurityError(f"kafka.client_options: {option} names {path}, which does not exist")
    return found


def _require_user(found: Security) -> None:
    if not found.mechanism:
        raise SecurityError(
            f"kafka.client_options: security.protocol is {found.protocol}, so sasl.mechanism has to be set, for "
            f"instance to {WITH_PASSWORD[-1]}"
        )
    given = {"sasl.username": found.user, "sasl.password": found.password.get_secret_value()}
    missing = [option for option, value in given.items() if not value]
    if found.mechanism in WITH_PASSWORD and missing:
        raise SecurityError(
            f"kafka.client_options: sasl.mechanism is {found.mechanism}, so {' and '.join(missing)} has to be set. "
            "Give a password in the environment: TIDEMILL_KAFKA__CLIENT_OPTIONS="
            """'{"sasl.password": "..."}' adds it to what the configuration file says"""
        )
