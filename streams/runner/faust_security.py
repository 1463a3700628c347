"""Faust's credentials from Kafka's settings: Faust speaks through aiokafka, which does not know librdkafka's options.

Certificates are verified, and the host's name with them; no option turns that off here.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from types import MappingProxyType

from faust.auth import Credentials, SASLCredentials, SSLCredentials

from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.security import FILES, WITH_PASSWORD, Security, SecurityError, security_of, security_options

TAKEN = frozenset(
    {
        *FILES,
        "security.protocol",
        "ssl.key.password",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
    }
)
ONLY = MappingProxyType(
    {"ssl.endpoint.identification.algorithm": "https", "enable.ssl.certificate.verification": "true"}
)
"""Options that may say what holds anyway."""


def broker_credentials(kafka: KafkaSettings) -> Credentials | None:
    """What Faust shows to the brokers, and what it wants to see of them; None for plain connections.

    Raises SecurityError, also for an option that Faust would go without.
    """
    security = security_of(kafka)
    _refuse_unknown(kafka)
    context = _tls(security) if security.protocol.encrypted else None
    if not security.protocol.sasl:
        return SSLCredentials(context) if context else None
    if security.mechanism not in WITH_PASSWORD:
        raise SecurityError(
            f"kafka.client_options: sasl.mechanism is {security.mechanism!r}, and a stream worker speaks only "
            f"{', '.join(WITH_PASSWORD)}: give it a user of one of these, or a listener that asks for a certificate "
            "(security.protocol SSL)"
        )
    return SASLCredentials(
        username=security.user,
        password=security.password.get_secret_value(),
        ssl_context=context,
        mechanism=security.mechanism,
    )


def _refuse_unknown(kafka: KafkaSettings) -> None:
    given = security_options(kafka.client_options)
    refused = sorted(
        name for name, value in given.items() if name not in TAKEN and value.lower() != ONLY.get(name, None)
    )
    if refused:
        raise SecurityError(
            f"kafka.client_options: a stream worker cannot follow {', '.join(refused)}. It takes "
            f"{', '.join(sorted(TAKEN))}, and always verifies the broker's certificate and host name: leave the others "
            "out of its configuration, and write certificates and keys to PEM files"
        )


def _tls(security: Security) -> ssl.SSLContext:
    """The context of a client that verifies whom it speaks to. Raises SecurityError for files that it cannot read."""
    directory = bool(security.ca) and Path(security.ca).is_dir()
    try:
        context = ssl.create_default_context(
            cafile=None if directory else security.ca or None, capath=security.ca if directory else None
        )
    except (ssl.SSLError, OSError) as error:
        raise SecurityError(f"kafka.client_options: ssl.ca.location, {security.ca}: {error}") from error
    if security.certificate or security.key:
        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(security.certificate, security.key or None, security.key_password.get_secret_value)
        except (ssl.SSLError, OSError) as error:
            raise SecurityError(
                f"kafka.client_options: ssl.certificate.location ({security.certificate or 'not set'}), "
                f"ssl.key.location ({security.key or 'not set'}) and ssl.key.password do not go together: {error}"
            ) from error
    return context
