"""Authentication of clients and brokers, and a check at the start of a process that the brokers accept the client.

`kafka.client_options` are passed to librdkafka unchanged. Clients that do not use librdkafka are configured from
`security_of`, the only parser of these options.

If the brokers refuse a client, or the client does not trust them, librdkafka retries without limit, because the refusal
may be temporary. At the start of a process, a refusal is nearly always an error in the settings.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from pydantic import SecretStr

from tidemill.schemas.config import KafkaSettings

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
FILES = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
PREFIXES = ("security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")
PROBE = "probe"
"""Value of `ssl.ca.location` for the operating system's certificates, which are also the default."""
WITH_PASSWORD = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


class SecurityError(ValueError):
    """The options cannot open a connection; the message names them and the remedy."""


@dataclass(frozen=True, slots=True)
class Security:
    """The security settings in `kafka.client_options`; options that are not set are empty, the protocol PLAINTEXT."""

    protocol: str
    """One of `PROTOCOLS`."""
    encrypted: bool
    """Whether the connection uses TLS."""
    sasl: bool
    """Whether the client authenticates with SASL."""
    ca: str
    """File or directory with the certificates of the trusted authorities; empty: the system's."""
    certificate: str
    key: str
    key_password: SecretStr
    mechanism: str
    user: str
    password: SecretStr


def security_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that concern security."""
    return {name: value for name, value in options.items() if name.startswith(PREFIXES)}


def security_of(kafka: KafkaSettings) -> Security:
    """Return the security that the settings configure. Raises SecurityError if something is missing or not valid."""
    options = kafka.client_options
    protocol = options.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in PROTOCOLS:
        raise SecurityError(
            f"kafka.client_options: security.protocol is {protocol!r}, and has to be one of {', '.join(PROTOCOLS)}"
        )
    ca = options.get("ssl.ca.location", "")
    found = Security(
        protocol=protocol,
        encrypted=protocol.endswith("SSL"),
        sasl=protocol.startswith("SASL"),
        ca="" if ca == PROBE else ca,
        certificate=options.get("ssl.certificate.location", ""),
        key=options.get("ssl.key.location", ""),
        key_password=SecretStr(options.get("ssl.key.password", "")),
        mechanism=options.get("sasl.mechanism", options.get("sasl.mechanisms", "")),
        user=options.get("sasl.username", ""),
        password=SecretStr(options.get("sasl.password", "")),
    )
    if found.sasl and not found.mechanism:
        raise SecurityError(
            f"kafka.client_options: security.protocol is {protocol}, so sasl.mechanism has to be set, for instance to "
            f"{WITH_PASSWORD[-1]}"
        )
    if found.sasl and found.mechanism in WITH_PASSWORD:
        given = {"sasl.username": found.user, "sasl.password": found.password.get_secret_value()}
        missing = [option for option, value in given.items() if not value]
        if missing:
            raise SecurityError(
                f"kafka.client_options: sasl.mechanism is {found.mechanism}, so {' and '.join(missing)} has to be set. "
                "Give a password in the environment: TIDEMILL_KAFKA__CLIENT_OPTIONS="
                """'{"sasl.password": "..."}' adds it to what the configuration file says"""
            )
    if found.encrypted:
        for option, path in zip(FILES, (found.ca, found.certificate, found.key), strict=True):
            if path and not Path(path).exists():
                raise SecurityError(f"kafka.client_options: {option} names {path}, which does not exist")
    return found


DEADLINE_S = 5.0
POLL_S = 0.05
PROBE_S = 2.0
REFUSED = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL})
LOCAL = "failed: Local: "
"""Part of the message of an error that no broker sent."""


class AccessRefused(ConnectionError):
    """The brokers refuse this client, or it does not trust them; the message has the reason and what to check."""


@dataclass(slots=True)
class _Found:
    """The errors that a client has reported about its connections."""

    refusal: str = ""
    closed_early: bool = False
    """A broker accepted a connection and closed it before its first response. A proxy in front of the brokers does the
    same while no broker runs."""
    closed_late: bool = False
    """A broker sent the response that needs no authentication, and closed the connection at the next request."""
    all_down: bool = False

    def take_error(self, error: KafkaError) -> None:
        """Record an error of the client."""
        text = error.str()
        refused = error.code() in REFUSED or (error.code() == KafkaError._TRANSPORT and "SSL" in text)
        # A connection that broke during authentication is also reported as a failed authentication.
        if refused and LOCAL not in text:
            self.refusal = self.refusal or text.split(" (after ")[0]
        self.all_down |= error.code() == KafkaError._ALL_BROKERS_DOWN

    def take_line(self, line: logging.LogRecord) -> bool:
        """Record a line of the client's log, the only report that a broker closed a connection. Drops the line."""
        text = line.getMessage()
        if "Disconnected" in text:
            late = "in state UP" in text
            self.closed_late |= late
            self.closed_early |= not late
        return False


def check_access(kafka: KafkaSettings) -> None:
    """Return when a broker has answered, or if no refusal was found. Brokers that do not run are not an error here.

    Raises:
        SecurityError: the options cannot open a connection.
        AccessRefused: the brokers refuse this client, or it does not trust them.
    """
    security = security_of(kafka)
    found, log = _Found(), logging.Logger("tidemill.access")
    log.addFilter(found.take_line)
    settings: dict[str, Any] = {"bootstrap.servers": kafka.address(), **kafka.client_options}
    settings |= {"client.id": "tidemill-access", "log_level": "6", "error_cb": found.take_error}
    try:
        client = AdminClient(settings, logger=log)
    except KafkaException as error:
        raise SecurityError(f"kafka.client_options cannot be used: {error.args[0].str()}") from error
    answer = client.describe_cluster(request_timeout=DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        client.poll(POLL_S)
        if answer.done() and answer.exception() is None:
            return
        if found.all_down:
            break
    if found.refusal:
        raise AccessRefused(f"Kafka at {kafka.address()}: {found.refusal}. {_advice(security, found.refusal)}")
    wanted = ""
    if found.closed_late and not security.sasl:
        wanted = "a user's name (SASL)"
    elif found.closed_early and not security.encrypted and _speaks_tls(kafka):
        wanted = "TLS"
    if wanted:
        raise AccessRefused(
            f"Kafka at {kafka.address()} closes each connection of this client, which uses {security.protocol}: "
            "either the broker is shutting down (its log says why, for instance a full disk), or the listener "
            f"requires {wanted}. For the latter set in kafka.client_options security.protocol to SSL, SASL_SSL or "
            "SASL_PLAINTEXT, as the listener is configured, with the options of that protocol"
        )


def _speaks_tls(kafka: KafkaSettings) -> bool:
    """Return whether one of the brokers completes a TLS handshake. No data is sent over the connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for address in kafka.address().split(","):
        host, _, port = address.strip().rpartition("://")[2].rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as connection:
                context.wrap_socket(connection).close()
                return True
        except (OSError, ValueError):
            # This includes ssl.SSLError, an OSError: the answer was not TLS.
            continue
    return False


def _advice(security: Security, refusal: str) -> str:
    if "SASL" in refusal:
        return (
            f"Check in kafka.client_options: sasl.username (it is {security.user!r}), sasl.password, and "
            f"sasl.mechanism (it is {security.mechanism!r})"
        )
    if "verif" in refusal:
        trusted = f"the authorities in {security.ca}" if security.ca else "the authorities that the system trusts"
        return (
            f"The broker's certificate has to be signed by one of {trusted} (kafka.client_options: ssl.ca.location) "
            "and to name the host by which it is reached"
        )
    return (
        f"This client uses {security.protocol}; check in kafka.client_options security.protocol, and "
        "ssl.certificate.location and ssl.key.location where the brokers ask for a client's certificate"
    )
