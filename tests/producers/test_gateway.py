"""The gateway over real sockets and a real log: accepted events are in the log, attacks are refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.producers.feedback_support import (
    DEADLINE_S,
    FORGER,
    NOWHERE,
    PRODUCT,
    pseudonym,
    token,
    url_in,
    written,
)
from tests.waiting import until, until_up
from tidemill.producers.config import GatewaySettings
from tidemill.producers.edge.gateway import gateway_server, run
from tidemill.producers.product.settings import KeysMissing, ProductSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import HttpSettings, KafkaSettings
from tidemill.schemas.records import Feedback, SignalKind

KEY, OTHER_KEY = "k" * 64, "o" * 64
HASHES = {"shop": hashlib.sha256(KEY.encode()).hexdigest(), "web": hashlib.sha256(OTHER_KEY.encode()).hexdigest()}
FREE = GatewaySettings(
    port=0, api_keys=HASHES, user_rate=1000, user_burst=10_000, key_burst=10_000, key_rate=10_000,
    acknowledge_timeout_s=DEADLINE_S,
)  # fmt: skip
WHEN = "2026-11-21T12:00:00Z"


@contextmanager
def serving(kafka: KafkaSettings, settings: GatewaySettings = FREE) -> Iterator[httpx.Client]:
    with (
        gateway_server(kafka, PRODUCT, settings) as server,
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def log_settings(kafka) -> KafkaSettings:
    return kafka.fresh(topics=[Topic.FEEDBACK])


@pytest.fixture(scope="module")
def client(log_settings: KafkaSettings) -> Iterator[httpx.Client]:
    with serving(log_settings) as client:
        yield client


def event(interaction_id: str = "i-1", served: str | None = "ann", **changes: object) -> dict:
    """Return an event of the user to whom the interaction was served, with these changes."""
    base = {"interaction": token(interaction_id, served), "kind": "thumb", "value": 1, "user": served}
    return {**base, "event_id": "e-1", **changes}


def of(settings: KafkaSettings, interaction_id: str) -> list[Feedback]:
    return [f.record for f in written(settings) if f.record.interaction_id == interaction_id]


def problem(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert set(response.json()) == {"title", "status", "detail"}
    assert "Traceback" not in response.text and "/tidemill" not in response.text and len(response.text) < 2000
    return response.json()["detail"]


def test_an_event_answered_with_202_is_in_the_log(client: httpx.Client, log_settings: KafkaSettings):
    answer = client.post("/v1/feedback", json=event("taken", observed_at="2026-11-21T12:00:00.250+02:00"))
    assert (answer.status_code, answer.json()) == (202, {"event_id": "e-1"})
    record = of(log_settings, "taken")[0]
    at = 1_795_255_200_250_000
    assert record == Feedback("e-1", "taken", pseudonym(), SignalKind.THUMB, 1.0, at, "shop", None)


def test_an_event_sent_again_has_the_same_answer_and_the_same_key(client: httpx.Client, log_settings: KafkaSettings):
    body = event("again", event_id=None, observed_at=WHEN)
    answers = [client.post("/v1/feedback", json=body) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.text for answer in answers}) == 1
    assert len({f.key for f in written(log_settings) if f.record.interaction_id == "again"}) == 1


def test_a_withdrawal_and_an_event_without_a_user_are_accepted(client: httpx.Client, log_settings: KafkaSettings):
    back = event("back", value=None, corrects="e-1", event_id="e-2")
    assert client.post("/v1/feedback", json=back).status_code == 202
    assert client.post("/v1/feedback", json=event("nobody", None)).status_code == 202
    assert [(r.value, r.corrects) for r in of(log_settings, "back")] == [(None, "e-1")]
    assert of(log_settings, "nobody")[0].user_id == ""


def test_a_batch_accepts_or_refuses_each_event_separately(client: httpx.Client, log_settings: KafkaSettings):
    events = [
        event("mixed", event_id="good-1"),
        event("mixed", event_id="stolen", user="bob"),
        event("mixed", event_id="silly", value=9),
        "no event",
        event("mixed", event_id="extra", admin=True),
        event("mixed", event_id="good-2", kind="undo"),
    ]
    answer = client.post("/v1/feedback/batch", json={"events": events})
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert [result["status"] for result in results] == [202, 403, 422, 422, 422, 202]
    assert answer.json()["accepted"] == 2
    assert results[0] == {"status": 202, "event_id": "good-1"}
    assert "not served to this user" in results[1]["detail"]
    assert "admin: Extra inputs are not permitted" in results[4]["detail"]
    assert sorted(r.event_id for r in of(log_settings, "mixed")) == ["good-1", "good-2"]


def test_a_whole_batch_is_in_the_log(client: httpx.Client, log_settings: KafkaSettings):
    events = [event("whole", event_id=f"e{n}") for n in range(200)]
    answer = client.post("/v1/feedback/batch", json={"events": events})
    assert (answer.status_code, answer.json()["accepted"]) == (202, 200)
    assert sorted(r.event_id for r in of(log_settings, "whole")) == sorted(f"e{n}" for n in range(200))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"events": []}, "events: List should have at least 1"),
        ({"events": [{}] * 201}, "201 of them"),
        ({"events": {"a": 1}}, "events: Input should be a valid list"),
        ({}, "events: Field required"),
        ([], "event: Input should be"),
        ({"events": [{}], "more": 1}, "more: Extra inputs"),
    ],
)
def test_an_invalid_batch_is_refused(client: httpx.Client, body: object, said: str):
    assert said in problem(client.post("/v1/feedback/batch", json=body), 422)


@pytest.mark.parametrize(
    "forged",
    [
        {"user": "bob"},
        {"user": None},
        {"interaction": token("f-1", product=FORGER)},
        {"interaction": "../../etc/passwd." + "A" * 43},
    ],
)
def test_forged_and_stolen_interactions_are_refused(client: httpx.Client, log_settings: KafkaSettings, forged: dict):
    assert "interaction" in problem(client.post("/v1/feedback", json=event("f-1", **forged)), 403)
    assert of(log_settings, "f-1") == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "thumbs"}, "kind: Input should be 'thumb'"),
        ({"kind": 1}, "kind: Input should be"),
        ({"value": 2}, "1 or -1"),
        ({"value": "1"}, "value: Input should be a valid number"),
        ({"value": True}, "value: Input should be a valid number"),
        ({"value": [1]}, "value: Input should be a valid number"),
        ({"value": None}, "value: is missing"),
        ({"value": 10**400}, "value"),
        ({"user": 7}, "user: Input should be a valid string"),
        ({"user": "u" * 513}, "user: String should have at most"),
        ({"user": "\ud800"}, "user"),
        ({"interaction": "i" * 257}, "interaction: String should have at most"),
        ({"interaction": None}, "interaction: Input should be a valid string"),
        ({"event_id": "a/b"}, "event_id: an event id is"),
        ({"event_id": None}, "give event_id or observed_at"),
        ({"corrects": "e-1"}, "cannot correct itself"),
        ({"corrects": ["e"]}, "corrects: Input should be a valid string"),
        ({"observed_at": 1_795_262_400}, "text in ISO 8601"),
        ({"observed_at": "1795262400"}, "text in ISO 8601"),
        ({"observed_at": "2026-11-21T12:00:00"}, "observed_at: Input should have timezone info"),
        ({"observed_at": "2026-11-21T99:00:00Z"}, "observed_at: Input should be a valid datetime"),
        ({"unknown": 1}, "unknown: Extra inputs are not permitted"),
        ({"__proto__": {}}, "__proto__: Extra inputs"),
        ({"x" * 5000: 1}, "Extra inputs"),
    ],
)
def test_an_invalid_event_is_refused(client: httpx.Client, changes: dict, said: str):
    assert said in problem(client.post("/v1/feedback", content=json.dumps(event(**changes)), headers=JSON), 422)


JSON = {"Content-Type": "application/json"}


def test_many_faults_are_reported_in_a_short_answer(client: httpx.Client):
    body = {f"k{n}": n for n in range(10_000)}
    assert "and " in problem(client.post("/v1/feedback", json=body), 422)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b'{"value": NaN}', b'{"a": 1, "a": 2}', b"\xff", b"9" * 9000]
)
def test_a_body_that_is_not_json_is_refused(client: httpx.Client, body: bytes):
    problem(client.post("/v1/feedback", content=body, headers=JSON), 400)
    problem(client.post("/v1/feedback/batch", content=body, headers=JSON), 400)


def test_numbers_out_of_range_are_refused(client: httpx.Client):
    text = json.dumps(event()).replace('"value": 1', '"value": 1e999')
    assert "finite" in problem(client.post("/v1/feedback", content=text, headers=JSON), 422)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": ""},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_another_content_type_is_refused(client: httpx.Client, headers: dict):
    problem(client.post("/v1/feedback", content=json.dumps(event()), headers=headers), 415)


@pytest.mark.parametrize("value", ["", "Bearer", f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY}k", KEY,
                                   f"Bearer {HASHES['shop']}", "Bearer é", "Bearer " + "k" * 8000])  # fmt: skip
def test_a_request_without_a_known_key_is_refused(client: httpx.Client, value: str):
    for path in ("/v1/feedback", "/v1/feedback/batch"):
        answer = client.post(path, content=b"{", headers={**JSON, "Authorization": value.encode()})
        assert "known API key" in problem(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"


def test_without_a_known_key_the_gateway_does_not_wait_for_the_body(client: httpx.Client):
    with closing(raw(client)) as connection:
        connection.sendall(head("Content-Length: 1000").replace(KEY.encode(), b"unknown"))
        assert b" 401 " in read_to_end(connection).splitlines()[0]


def test_each_key_has_its_name_in_the_records(client: httpx.Client, log_settings: KafkaSettings):
    client.post("/v1/feedback", json=event("named", event_id="a"))
    client.post("/v1/feedback", json=event("named", event_id="b"), headers={"Authorization": f"Bearer {OTHER_KEY}"})
    assert {r.event_id: r.source for r in of(log_settings, "named")} == {"a": "shop", "b": "web"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/feedback/", 404),
        ("POST", "/v1//feedback", 404),
        ("POST", "/v1/feedback/../../metrics", 404),
        ("POST", "/v1/feedback/%2e%2e/batch", 404),
        ("POST", "/V1/FEEDBACK", 404),
        ("POST", "/v1/feedback%00", 404),
        ("POST", "//evil.invalid/v1/feedback", 404),
        ("GET", "/v1/feedback", 405),
        ("DELETE", "/v1/feedback", 405),
        ("POST", "/metrics", 405),
    ],
)
def test_other_paths_and_methods_are_refused(client: httpx.Client, method: str, path: str, status: int):
    with closing(raw(client)) as connection:
        lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"Authorization: Bearer {KEY}", "Connection: close"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        answer = read_to_end(connection)
    assert f" {status} ".encode() in answer.splitlines()[0]
    assert b"application/problem+json" in answer and b"location:" not in answer.lower()
    assert (b"\r\nallow: " in answer) == (status == 405)


def raw(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=DEADLINE_S)


def head(*lines: str, path: str = "/v1/feedback") -> bytes:
    base = [f"POST {path} HTTP/1.1", "Host: gateway", f"Authorization: Bearer {KEY}", "Content-Type: application/json"]
    return "\r\n".join([*base, *lines, "", ""]).encode()


def read_to_end(connection: socket.socket) -> bytes:
    found = bytearray()
    try:
        while chunk := connection.recv(65_536):
            found += chunk
    except ConnectionResetError:
        # The server closed the connection while this side was still sending.
        return bytes(found)
    return bytes(found)


def test_a_body_whose_declared_length_is_too_long_is_refused_at_once(client: httpx.Client):
    with closing(raw(client)) as connection:
        connection.sendall(head(f"Content-Length: {10**12}"))
        assert b" 413 " in read_to_end(connection).splitlines()[0]
    with closing(raw(client)) as connection:
        connection.sendall(head("Content-Length: " + "9" * 19))
        assert b" 413 " in read_to_end(connection).splitlines()[0]


def test_a_chunked_body_that_is_too_long_is_cut_while_it_is_read(client: httpx.Client):
    chunk = b"10000\r\n" + b"[" * 65_536 + b"\r\n"
    sent = 0
    with closing(raw(client)) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        try:
            while sent < 200:
                connection.sendall(chunk)
                sent += 1
        except ConnectionError:
            pass
        answer = read_to_end(connection)
    assert sent < 200
    assert not answer or b" 413 " in answer.splitlines()[0]


def test_a_body_that_does_not_arrive_ends_in_a_timeout(log_settings: KafkaSettings):
    with serving(log_settings, FREE.model_copy(update={"http": HttpSettings(body_timeout_s=0.5)})) as client:
        slow = [raw(client) for _ in range(20)]
        for connection in slow:
            connection.sendall(head("Content-Length: 100") + b'{"interac')
        # On a slow machine this body may be late too.
        until(lambda: client.post("/v1/feedback", json=event("beside")).status_code == 202, "an event beside them")
        for connection in slow:
            with closing(connection):
                answer = read_to_end(connection)
                assert b" 408 " in answer.splitlines()[0] and b"within 0.5 s" in answer


def test_bytes_that_are_not_http_are_refused(client: httpx.Client):
    for noise in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"x" * 200_000,
    ):
        answer = b""
        # The server may close the connection before all bytes are sent.
        with closing(raw(client)) as connection, suppress(OSError):
            connection.sendall(noise + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            answer = read_to_end(connection)
        assert not answer or b" 400 " in answer.splitlines()[0]
    assert client.get("/healthz").status_code == 200


def test_a_flood_from_one_key_is_capped_and_the_other_key_is_still_served(log_settings: KafkaSettings):
    # So slow a rate grants no further event during the test.
    capped = FREE.model_copy(update={"key_rate": 1e-3, "key_burst": 20, "max_batch": 20})
    with serving(log_settings, capped) as client:
        events = [event("flood", event_id=f"e{n}") for n in range(15)]
        assert client.post("/v1/feedback/batch", json={"events": events}).status_code == 202
        refused = client.post("/v1/feedback/batch", json={"events": events})
        assert "sends more than 0.001 events per second" in problem(refused, 429)
        assert 9_000 <= int(refused.headers["retry-after"]) <= 10_000  # for the missing ten of 15 events
        # Malformed events count too; otherwise a flood of them would be free.
        answers = [client.post("/v1/feedback", content=b"{", headers=JSON).status_code for _ in range(30)]
        assert answers[0] == 400 and answers[-1] == 429 and answers == sorted(answers)
        other = {"Authorization": f"Bearer {OTHER_KEY}"}
        assert client.post("/v1/feedback/batch", json={"events": events}, headers=other).status_code == 202


def test_a_flood_in_one_users_name_is_capped_and_other_users_are_still_served(log_settings: KafkaSettings):
    capped = FREE.model_copy(update={"user_rate": 1e-3, "user_burst": 5})
    with serving(log_settings, capped) as client:
        events = [event(f"u{n}", event_id="e") for n in range(8)] + [event("u9", "bob")]
        answer = client.post("/v1/feedback/batch", json={"events": events})
        results = answer.json()["results"]
        assert [result["status"] for result in results] == [202] * 5 + [429] * 3 + [202]
        assert results[5]["retry_after_s"] > 1 and "one user" in results[5]["detail"]
        single = client.post("/v1/feedback", json=event("u9"))
        assert "one user" in problem(single, 429) and int(single.headers["retry-after"]) > 1
        # A stranger with Bob's name but without Bob's token uses nothing of Bob's rate.
        for _ in range(10):
            assert client.post("/v1/feedback", json=event("u9", "eve", user="bob")).status_code == 403
        for number in range(4):
            assert client.post("/v1/feedback", json=event("u9", "bob", event_id=f"b{number}")).status_code == 202


def test_without_a_log_the_gateway_reports_it_and_accepts_nothing():
    settings = FREE.model_copy(update={"acknowledge_timeout_s": 0.5})
    with serving(KafkaSettings(bootstrap=NOWHERE), settings) as client:
        health = client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        detail = problem(client.post("/v1/feedback", json=event()), 503)
        assert NOWHERE not in detail
        assert client.get("/metrics").status_code == 200


def test_a_log_without_the_topic_is_reported(kafka, topic_prefix):
    with serving(KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)) as client:
        assert "tidemill topics --create" in client.get("/healthz").json()["detail"]
        problem(client.post("/v1/feedback", json=event()), 503)


def test_health_and_metrics(client: httpx.Client):
    assert client.get("/healthz").json() == {"status": "ok", "detail": "the log answers"}

    def value(line: str) -> float:
        found = re.search(rf"^{re.escape(line)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    taken = 'tidemill_gateway_events_total{key="shop",status="202"}'
    forged = 'tidemill_gateway_events_total{key="shop",status="403"}'
    lost = 'tidemill_gateway_requests_total{route="other",status="404"}'
    before = [value(line) for line in (taken, forged, lost)]
    client.post("/v1/feedback", json=event())
    client.post("/v1/feedback", json=event(user="bob"))
    for number in range(5):
        client.get(f"/no/such/path/{number}")
    assert [value(line) for line in (taken, forged, lost)] == [before[0] + 1, before[1] + 1, before[2] + 5]
    assert value("tidemill_gateway_pending") == 0
    assert "/no/such/path" not in client.get("/metrics").text


def test_the_api_page_describes_the_accepted_requests(client: httpx.Client):
    assert client.get("/docs").status_code == 200
    schema = client.get("/openapi.json").json()
    operations = {path: schema["paths"][path]["post"] for path in ("/v1/feedback", "/v1/feedback/batch")}
    for operation in operations.values():
        assert operation["security"] == [{"HTTPBearer": []}]
        assert {"202", "401", "413", "422", "429", "503"} <= set(operation["responses"])
    named = set(schema["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(schema))) <= named
    assert {"FeedbackIn", "BatchIn", "SignalKind"} <= named
    examples = operations["/v1/feedback"]["requestBody"]["content"]["application/json"]["examples"]
    for example in examples.values():
        # Valid except for the signature, which cannot be published.
        refused = client.post("/v1/feedback", json=example["value"])
        assert "not served to this user" in problem(refused, 403)


def test_an_internal_error_is_not_shown_to_the_client(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a secret of the program")

    monkeypatch.setattr("tidemill.producers.edge.events.parse_json", broken)
    assert problem(client.post("/v1/feedback", json=event()), 500) == "an error of the gateway"


def test_the_gateway_does_not_start_without_keys(log_settings: KafkaSettings):
    with pytest.raises(KeysMissing, match="openssl rand"):
        gateway_server(log_settings, ProductSettings(), FREE)
    with pytest.raises(ValueError, match=r"gateway.api_keys is empty.*openssl rand -hex 32.*sha256sum"):
        gateway_server(log_settings, PRODUCT, GatewaySettings())


def test_a_server_that_ends_by_itself_is_an_error(log_settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uvicorn.Server, "run", lambda _self, sockets: None)
    with pytest.raises(RuntimeError, match="ended by itself"):
        run(log_settings, PRODUCT, FREE, threading.Event())


def test_the_role_ends_cleanly_and_accepted_events_are_in_the_log(log_settings: KafkaSettings, tmp_path: Path):
    environment = {**os.environ, **PRODUCT.environment(), "TIDEMILL_GATEWAY__API_KEYS": json.dumps(HASHES)}
    command = ["-m", "tidemill", "gateway", "--port", "0", "--bootstrap", log_settings.bootstrap]
    command += ["--topic-prefix", log_settings.topic_prefix]
    for setting in ("linger_ms=100", f"acknowledge_timeout_s={DEADLINE_S}"):
        command += ["--set", f"gateway.{setting}"]
    log = tmp_path / "log"
    with log.open("w") as said_to:
        process = subprocess.Popen([sys.executable, *command], env=environment, stderr=said_to)
    try:
        url = url_in(log, lambda: process.poll() is None)
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=DEADLINE_S)
        until_up(f"{url}/healthz", lambda: process.poll() is None, log.read_text)
        with ThreadPoolExecutor(4) as pool:
            posts = {
                f"e{n}": pool.submit(client.post, "/v1/feedback", json=event("role", event_id=f"e{n}"))
                for n in range(40)
            }
            assert posts["e0"].result().status_code == 202
            process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
        said = log.read_text()
        assert process.returncode == 0, said
        assert "Traceback" not in said and KEY not in said
        # Later requests are refused.
        taken = {name for name, post in posts.items() if post.exception() is None and post.result().status_code == 202}
        assert "e0" in taken and taken <= {record.event_id for record in of(log_settings, "role")}
    finally:
        process.kill()
        process.wait()
