"""Stream workers at a broker with TLS and SASL: Faust's settings, their effect, and refused settings."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError
from faust.auth import SASLCredentials, SSLCredentials
from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth
from stream_support import ASSEMBLY, RUN_ID, group_of, read_records, rollout, stream_process

from tests.conftest import create_some
from tests.secured_log import PASSWORD, USER, SecuredLog
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log import access
from tidemill.schemas.log.access import AccessRefused, SecurityError
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.streams.config import RunnerName, StreamSettings
from tidemill.streams.runner import faust_worker
from tidemill.streams.runner.faust_access import broker_credentials
from tidemill.streams.runner.transactional import TransactionalRunner
from tidemill.streams.runner.worker import group_assembly, run

DEADLINE_S = 240.0
ASSEMBLER = group_assembly(RunSettings(), StreamSettings())


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the broker more time to refuse a client: a slow machine may not run it for seconds."""
    for limit in ("DEADLINE_S", "PROBE_S"):
        monkeypatch.setattr(access, limit, 60.0)


def at(address: str, prefix: str, options: dict[str, str]) -> KafkaSettings:
    return KafkaSettings(bootstrap=address, topic_prefix=prefix, partitions=2, client_options=options)


def through(door: str, log: SecuredLog, prefix: str) -> KafkaSettings:
    if door == "certificate":
        return at(log.mutual, prefix, log.mutual_options())
    if door == "without TLS":
        return at(log.named, prefix, log.sasl_options(security_protocol="SASL_PLAINTEXT"))
    return at(log.sasl, prefix, log.sasl_options(door))


# tests/schemas/log/test_access.py covers every door for the client library of the transactional runner.
@pytest.mark.parametrize(
    ("door", "runner"),
    [("PLAIN", RunnerName.FAUST), ("certificate", RunnerName.FAUST), ("PLAIN", RunnerName.TRANSACTIONAL)],
)
def test_group_assembly_works_through_a_secured_listener(
    secured: SecuredLog, topic_prefix: str, tmp_path: Path, door: str, runner: RunnerName
):
    settings = through(door, secured, topic_prefix)
    create_some(settings, ASSEMBLY)
    with RecordProducer(settings, "test") as producer:
        for index in range(4):
            producer.send(Topic.ROLLOUTS, rollout("g", index), key="g")
    with stream_process(settings, tmp_path, runner=runner) as worker, LogReader(settings, [Topic.GROUPS]) as groups:
        (found,) = read_records(groups, lambda read: len(read) >= 1, DEADLINE_S, worker)
        assert worker.stop() == 0
    assert len(group_of(found).members) == 4
    assert PASSWORD not in worker.log.read_text()


@pytest.mark.parametrize("start", [run, TransactionalRunner])
@pytest.mark.parametrize(
    ("door", "changes", "said"),
    [
        ("sasl", {"sasl_password": "wrong"}, "invalid credentials"),
        ("sasl", {"ssl_ca_location": "stranger"}, "certificate verify failed"),
        ("misnamed", {}, "to name the host"),
        ("sasl", None, "uses PLAINTEXT"),
    ],
)
def test_a_refused_worker_ends_with_the_reason(
    secured: SecuredLog, door: str, changes: dict[str, str] | None, said: str, start: Callable[..., object]
):
    options = {} if changes is None else secured.sasl_options(**changes)
    if options.get("ssl.ca.location") == "stranger":
        options["ssl.ca.location"] = str(secured.stranger)
    with pytest.raises(AccessRefused, match=said):
        start(at(getattr(secured, door), "", options), RunSettings(), StreamSettings(), ASSEMBLER)


def connect(settings: KafkaSettings) -> None:
    """Connect as a Faust worker does."""

    async def started() -> None:
        auth = credentials_to_aiokafka_auth(broker_credentials(settings))
        producer = AIOKafkaProducer(bootstrap_servers=settings.address(), **auth)
        try:
            await producer.start()
        finally:
            await producer.stop()

    asyncio.run(started())


@pytest.mark.parametrize("door", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "certificate", "without TLS"])
def test_faust_connects_through_every_door(secured: SecuredLog, door: str):
    connect(through(door, secured, ""))


def test_faust_itself_verifies_certificates_and_host_names(secured: SecuredLog):
    """The worker's own connections verify them, not only the client that connects before."""
    for address, options in (
        (secured.misnamed, secured.sasl_options()),
        (secured.sasl, secured.sasl_options(ssl_ca_location=str(secured.stranger))),
        (secured.sasl, secured.sasl_options(sasl_password="wrong")),
    ):
        with pytest.raises(KafkaConnectionError):
            connect(at(address, "", options))


def test_a_worker_ends_at_once_if_only_faust_is_refused(
    secured: SecuredLog, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = secured.settings(topic_prefix)
    create_some(settings, ASSEMBLY)
    wrong = broker_credentials(at(secured.sasl, "", secured.sasl_options(sasl_password="wrong")))
    monkeypatch.setattr(faust_worker, "broker_credentials", lambda _kafka: wrong)
    # Only the refusal can end this worker, because its stall timeout is off.
    stream = StreamSettings(data_dir=str(tmp_path), stall_timeout_s=0.0)
    with pytest.raises(RuntimeError, match="Unable to bootstrap"):
        run(settings, RunSettings(run_id=RUN_ID), stream, ASSEMBLER)


def test_settings_of_faust(secured: SecuredLog):
    assert broker_credentials(KafkaSettings()) is None
    sasl = broker_credentials(at(secured.sasl, "", secured.sasl_options("SCRAM-SHA-256")))
    assert isinstance(sasl, SASLCredentials) and isinstance(sasl.ssl_context, ssl.SSLContext)
    assert (sasl.protocol.value, sasl.mechanism.value) == ("SASL_SSL", "SCRAM-SHA-256")
    assert (sasl.username, sasl.password) == (USER, PASSWORD)
    assert sasl.ssl_context.check_hostname and sasl.ssl_context.verify_mode is ssl.CERT_REQUIRED
    plain = broker_credentials(at(secured.sasl, "", secured.sasl_options(security_protocol="sasl_plaintext")))
    assert isinstance(plain, SASLCredentials)
    assert plain.protocol.value == "SASL_PLAINTEXT" and plain.ssl_context is None
    mutual = broker_credentials(at(secured.mutual, "", secured.mutual_options()))
    assert isinstance(mutual, SSLCredentials)
    assert mutual.context.check_hostname and mutual.context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_ssl_certificate_verification": "false"}, r"does not support enable\.ssl\.certificate\.verification"),
        ({"ssl_endpoint_identification_algorithm": "none"}, r"support ssl\.endpoint\.identification\.algorithm"),
        ({"ssl_certificate_pem": "..."}, r"does not support ssl\.certificate\.pem.*PEM files"),
        ({"sasl_kerberos_keytab": "x"}, r"does not support sasl\.kerberos\.keytab"),
        ({"sasl_mechanism": "OAUTHBEARER"}, r"sasl\.mechanism is 'OAUTHBEARER'.*SCRAM-SHA-512"),
    ],
)
def test_unsupported_faust_options_are_refused_by_name(secured: SecuredLog, changes: dict[str, str], said: str):
    settings = at(secured.sasl, "", secured.sasl_options(**changes))
    with pytest.raises(SecurityError, match=said):
        broker_credentials(settings)
    with pytest.raises(SecurityError, match=said):
        run(settings, RunSettings(run_id=RUN_ID), StreamSettings(), ASSEMBLER)


def test_options_that_equal_the_default_are_accepted(secured: SecuredLog):
    holds = {"enable_ssl_certificate_verification": "true", "ssl_endpoint_identification_algorithm": "https"}
    assert broker_credentials(at(secured.sasl, "", secured.sasl_options(**holds)))


def test_files_that_cannot_be_read_are_named(secured: SecuredLog, tmp_path: Path):
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(SecurityError, match=r"ssl\.ca\.location, .*junk\.pem"):
        broker_credentials(at(secured.sasl, "", secured.sasl_options(ssl_ca_location=str(junk))))
    for password in ("", "another"):
        with pytest.raises(SecurityError, match=r"ssl\.key\.password do not match"):
            broker_credentials(at(secured.mutual, "", {**secured.mutual_options(), "ssl.key.password": password}))
