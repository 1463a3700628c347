"""Clients at a broker with TLS and SASL: all of them work, and a refusal is reported in time with its reason."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.conftest import create_some
from tests.documents import document, wait_for_ends
from tests.secured_log import USER, SecuredLog
from tests.waiting import until
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log import access, group, watermarks
from tidemill.schemas.log.access import AccessRefused, SecurityError, check_access, security_of
from tidemill.schemas.log.admin import check_topics, wait_for_broker
from tidemill.schemas.log.fenced_producer import FencedProducer
from tidemill.schemas.log.group import GroupConsumer
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.log.reader import LogReader

TEST_DEADLINE_S = 180.0
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SASL = {"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN", "sasl.username": "u", "sasl.password": "secret"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a busy broker time to refuse a client. A refusal ends the check at once, whatever its deadline is."""
    monkeypatch.setattr(access, "DEADLINE_S", TEST_DEADLINE_S)


@pytest.fixture(params=[*MECHANISMS, "certificate", "without TLS"])
def door(request: pytest.FixtureRequest, secured: SecuredLog, topic_prefix: str) -> KafkaSettings:
    """One way to connect."""
    if request.param == "certificate":
        address, options = secured.mutual, secured.mutual_options()
    elif request.param == "without TLS":
        address, options = secured.named, secured.sasl_options(security_protocol="SASL_PLAINTEXT")
    else:
        address, options = secured.sasl, secured.sasl_options(request.param)
    return KafkaSettings(bootstrap=address, topic_prefix=topic_prefix, partitions=1, client_options=options)


def test_every_client_works(door: KafkaSettings):
    check_access(door)
    assert wait_for_broker(door) == 1
    create_some(door, [Topic.DOCUMENTS])
    names = Names(door.topic_prefix)
    drift = {state.name: state.drift for state in check_topics(door)}
    assert drift[names.of(Topic.DOCUMENTS)] == drift[names.dead_letter(Topic.DOCUMENTS)] == []
    with RecordProducer(door, "test") as producer:
        producer.send_acked(Topic.DOCUMENTS, [("a", document(1))])
    FencedProducer(door, "test", f"{door.topic_prefix}fenced").send_acked(Topic.DOCUMENTS, [("b", document(2))])
    wait_for_ends(door, Topic.DOCUMENTS)
    with LogReader(door, [Topic.DOCUMENTS]) as reader:
        found = [located.record for located in reader.read_to_end(TEST_DEADLINE_S)]
    assert found == [document(1), document(2)]
    with LogReader(door, client_id="test") as lookback:
        assert [located.record for located in lookback.read_since(Topic.DOCUMENTS, 0, 0)] == found
    member = GroupConsumer(door, "test", [Topic.DOCUMENTS], client_id="test")
    taken: list[object] = []
    until(lambda: taken.extend(located.record for located in member.poll()) or len(taken) >= len(found), "records")
    member.commit({(Topic.DOCUMENTS, 0): 2})
    member.close()
    assert taken == found


WRONG = {"sasl_password": "wrong"}
TLS = {"security.protocol": "SSL"}
KEPT_OUT: dict[str, tuple[str, Callable[[SecuredLog], dict[str, str]], str]] = {
    "wrong password": (
        "sasl", lambda log: log.sasl_options(**WRONG),
        rf"invalid credentials.*sasl\.username \(it is '{USER}'\), sasl\.password",
    ),
    "wrong plain password": (
        "sasl", lambda log: log.sasl_options("PLAIN", **WRONG), r"Invalid username or password.*sasl\.password",
    ),
    "unknown authority": (
        "sasl", lambda log: log.sasl_options(ssl_ca_location=str(log.stranger)),
        r"certificate verify failed.*stranger\.pem.*ssl\.ca\.location",
    ),
    "another host": (
        "misnamed", lambda log: log.sasl_options(), r"certificate verify failed.*to name the host",
    ),
    "plaintext": (
        "sasl", lambda _: {}, r"closes each connection.*uses PLAINTEXT.*requires TLS.*security\.protocol",
    ),
    "without TLS": (
        "sasl", lambda log: log.sasl_options(security_protocol="SASL_PLAINTEXT"),
        r"closes each connection.*uses SASL_PLAINTEXT.*requires TLS.*security\.protocol",
    ),
    "nameless": (
        "named", lambda _: {}, r"closes each connection.*uses PLAINTEXT.*SASL.*security\.protocol",
    ),
    "nameless by TLS": (
        "sasl", lambda log: {**TLS, "ssl.ca.location": str(log.ca)},
        r"closes each connection.*uses SSL.*SASL.*security\.protocol",
    ),
    "without certificate": (
        "mutual", lambda log: {**TLS, "ssl.ca.location": str(log.ca)},
        r"bad certificate.*ssl\.certificate\.location",
    ),
    "TLS to plain": (
        # OpenSSL reports the closed connection before or after it reads that the answer is not TLS.
        "plain", lambda log: log.sasl_options(),
        r"(PLAINTEXT broker listener|closed by peer).*uses SASL_SSL.*security\.protocol",
    ),
}  # fmt: skip
"""Listener, options, and the expected message."""


@pytest.mark.parametrize(("listener", "options", "said"), KEPT_OUT.values(), ids=KEPT_OUT)
def test_the_reason_of_a_refusal_is_reported_in_time(
    secured: SecuredLog, listener: str, options: Callable[[SecuredLog], dict[str, str]], said: str
):
    kafka = KafkaSettings(bootstrap=getattr(secured, listener), client_options=options(secured))
    begun = time.monotonic()
    with pytest.raises(AccessRefused, match=said) as refused:
        check_access(kafka)
    assert time.monotonic() - begun < TEST_DEADLINE_S
    assert "wrong" not in str(refused.value)


def test_an_absent_broker_is_not_a_refusal():
    begun = time.monotonic()
    check_access(KafkaSettings(bootstrap="127.0.0.1:9"))
    assert time.monotonic() - begun < TEST_DEADLINE_S


def test_a_proxy_without_brokers_is_not_a_refusal():
    def close_at_once(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=close_at_once, args=(listener,), daemon=True).start()
        check_access(KafkaSettings(bootstrap=f"127.0.0.1:{listener.getsockname()[1]}"))
        listener.shutdown(socket.SHUT_RDWR)


def test_each_client_reports_a_refusal(secured: SecuredLog, topic_prefix: str, monkeypatch: pytest.MonkeyPatch):
    impatient = {"delivery.timeout.ms": "2000", "log_level": "0"}
    options = secured.sasl_options(**WRONG) | impatient
    refused = KafkaSettings(bootstrap=secured.sasl, topic_prefix=topic_prefix, client_options=options)
    said = "invalid credentials"
    for module in (group, watermarks):
        monkeypatch.setattr(module, "METADATA_TIMEOUT_S", 1.0)
    with pytest.raises(DeliveryError, match=said):
        RecordProducer(refused, "test").send_acked(Topic.DOCUMENTS, [("a", document(1))])
    with pytest.raises(AccessRefused, match=said):
        wait_for_broker(refused, 0.5)
    with pytest.raises(AccessRefused, match=said):
        LogReader(refused, [Topic.DOCUMENTS])
    member = GroupConsumer(refused, "test", [Topic.DOCUMENTS], client_id="test")
    with pytest.raises(AccessRefused, match=said):
        until(lambda: bool(member.poll()), "a refusal", TEST_DEADLINE_S)
    member.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"security.protocol": "tls"}, "security.protocol is 'TLS'.*SASL_SSL"),
        ({**SASL, "sasl.mechanism": ""}, "sasl.mechanism has to be set"),
        ({**SASL, "sasl.password": ""}, "sasl.password has to be set.*TIDEMILL_KAFKA__CLIENT_OPTIONS"),
        ({**SASL, "ssl.ca.location": "/nowhere/ca.pem"}, "ssl.ca.location names /nowhere/ca.pem"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, str], said: str):
    with pytest.raises(SecurityError, match=said):
        security_of(KafkaSettings(bootstrap="127.0.0.1:9", client_options=options))


def test_options_that_librdkafka_cannot_use_are_reported(secured: SecuredLog):
    options = {**secured.mutual_options(), "ssl.key.password": "another"}
    with pytest.raises(SecurityError, match=r"ssl\.key\.location failed"):
        check_access(KafkaSettings(bootstrap=secured.mutual, client_options=options))


def test_a_password_is_not_printed():
    settings = KafkaSettings(bootstrap="127.0.0.1:9", client_options=SASL)
    found = security_of(settings)
    assert found.password.get_secret_value() == "secret"
    assert "secret" not in f"{settings!r}{settings}{found!r}"
