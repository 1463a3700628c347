"""A Kafka broker with secured listeners, as in real clusters: TLS and passwords, with certificates for one test run."""

from __future__ import annotations

import datetime
import ipaddress
import pickle
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.brokers import START_S
from tidemill.compose.stack.config import HOST, StackError, StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.compose.stack.process import check_free, exclusive, pick_ports
from tidemill.schemas.config import KafkaSettings

USER, PASSWORD = "tidemill", 'a "quoted" pass;word=1'
KEY_PASSWORD = "of the key"
DEADLINE_S = 180.0
PORTS = 6
TRIES = 100


class Authority:
    """A temporary certificate authority.

    Args:
        directory: the directory for its files.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = directory / f"{name}.pem"
        made = self._signed(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))
        self.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *subjects: x509.GeneralName, password: str = "") -> tuple[Path, Path]:
        """Write certificate and key of a server or client as PEM files; the key is encrypted if a password is given."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        extensions = [x509.SubjectAlternativeName(subjects)] if subjects else []
        made = self._signed(subject, key, x509.BasicConstraints(ca=False, path_length=None), *extensions)
        certificate, key_file = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        encryption = (
            serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
        )
        key_file.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return certificate, key_file

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


@dataclass(frozen=True, slots=True)
class SecuredLog:
    """A broker whose listeners authenticate clients."""

    plain: str
    """Address of the broker's plain listener."""
    sasl: str
    """Address of the listener with SASL over TLS."""
    mutual: str
    """Address of the listener with TLS that requires a client certificate."""
    named: str
    """Address of a listener with SASL without TLS."""
    misnamed: str
    """Address of a listener like `sasl`, with a certificate that names another host."""
    ca: Path
    stranger: Path
    """Certificate of an authority that signed none of the broker's certificates."""
    client: tuple[Path, Path]
    """Certificate and encrypted key of a client."""

    def sasl_options(self, mechanism: str = "SCRAM-SHA-512", **changes: str) -> dict[str, str]:
        """Return the client options for `sasl`, updated by `changes`, which have `_` instead of `.` in their names."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanism": mechanism,
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            **{name.replace("_", "."): value for name, value in changes.items()},
        }

    def mutual_options(self) -> dict[str, str]:
        """Return the client options for `mutual`."""
        certificate, key = self.client
        return {
            "security.protocol": "ssl",
            "ssl.ca.location": str(self.ca),
            "ssl.certificate.location": str(certificate),
            "ssl.key.location": str(key),
            "ssl.key.password": KEY_PASSWORD,
        }

    def settings(self, topic_prefix: str) -> KafkaSettings:
        """Return settings for `sasl`."""
        return KafkaSettings(
            bootstrap=self.sasl, topic_prefix=topic_prefix, partitions=2, client_options=self.sasl_options()
        )


def secured_log(directory: Path) -> SecuredLog:
    """Return the broker of a directory with secured listeners; the first call starts it."""
    made = directory / "log.pickle"
    with exclusive(directory / "log.lock", START_S + DEADLINE_S, print):
        if not made.exists():
            made.write_bytes(pickle.dumps(_start(directory)))
        found: SecuredLog = pickle.loads(made.read_bytes())
    return found


def _start(directory: Path) -> SecuredLog:
    """Start a broker of the local stack with secured listeners; the plain one is to create its users."""
    ours, stranger = Authority(directory, "ours"), Authority(directory, "stranger")
    server = ours.issue("server", x509.IPAddress(ipaddress.ip_address(HOST)))
    other = ours.issue("other", x509.DNSName("kafka.elsewhere.example"))
    port = _free_ports()
    secured = ("SECURED", "MUTUAL", "MISNAMED", "NAMED")
    addresses = {name: f"{HOST}:{port + 2 + place}" for place, name in enumerate(secured)}
    clients = {"PLAINTEXT": f"{HOST}:{port}", **addresses}
    settings = StackSettings(
        data_dir=directory,
        start_timeout_s=START_S,
        heap_mb=320,
        base_port=port,
        properties={
            "listeners": _listeners({**clients, "CONTROLLER": f"{HOST}:{port + 1}"}),
            "advertised.listeners": _listeners(clients),
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL,"
            "MUTUAL:SSL,MISNAMED:SASL_SSL,NAMED:SASL_PLAINTEXT",
            **_tls("secured", server),
            **_tls("misnamed", other),
            **_tls("mutual", server),
            **_sasl("secured"),
            **_sasl("misnamed"),
            **_sasl("named"),
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.mutual.ssl.truststore.type": "PEM",
            "listener.name.mutual.ssl.truststore.location": str(ours.certificate),
        },
    )
    plain = LocalStack(settings).up(print).bootstrap
    _create_users(plain)
    return SecuredLog(
        plain=plain,
        sasl=addresses["SECURED"],
        mutual=addresses["MUTUAL"],
        named=addresses["NAMED"],
        misnamed=addresses["MISNAMED"],
        ca=ours.certificate,
        stranger=stranger.certificate,
        client=ours.issue("client", password=KEY_PASSWORD),
    )


def _free_ports() -> int:
    """Return the first of `PORTS` consecutive free ports."""
    for _ in range(TRIES):
        (first,) = pick_ports(1, 0)
        try:
            check_free(range(first, first + PORTS))
        except StackError:
            continue
        return first
    raise AssertionError(f"no {PORTS} free ports in a row")


def _listeners(addresses: dict[str, str]) -> str:
    return ",".join(f"{name}://{address}" for name, address in addresses.items())


def _tls(listener: str, files: tuple[Path, Path]) -> dict[str, str]:
    certificate, key = files
    store = certificate.with_suffix(".store")
    store.write_bytes(key.read_bytes() + certificate.read_bytes())
    prefix = f"listener.name.{listener}.ssl.keystore"
    return {f"{prefix}.type": "PEM", f"{prefix}.location": str(store)}


def _sasl(listener: str) -> dict[str, str]:
    quoted = PASSWORD.replace('"', '\\"')
    module = "org.apache.kafka.common.security"
    return {
        f"listener.name.{listener}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        f"listener.name.{listener}.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required "
        f'user_{USER}="{quoted}";',
        f"listener.name.{listener}.scram-sha-256.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
        f"listener.name.{listener}.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
    }


def _create_users(plain: str) -> None:
    admin = AdminClient({"bootstrap.servers": plain})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        # The broker accepts one change of a user in a request.
        user = UserScramCredentialUpsertion(USER, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
        for future in admin.alter_user_scram_credentials([user]).values():
            future.result(DEADLINE_S)
