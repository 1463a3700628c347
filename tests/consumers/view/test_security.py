"""Access to the page, the security headers of each answer, and hostile addresses."""

from __future__ import annotations

import hmac
import re
import socket
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from tests.consumers.view.conftest import START_S, View
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.view.app import COOKIE, HEADERS, application
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.panels import PAGES
from tidemill.consumers.view.tables import Tables

TOKEN = "a secret of some length"
HTML = {"accept": "text/html"}
CLOSED = ["/", *(f"/{page.path}" for page in PAGES), "/panel/accounting", "/panel/accounting.csv", "/panel/nothing"]


def client_of(tmp_path: Path, **settings: object) -> TestClient:
    """The page in this process, with tables that no process has open; redirects are not followed."""
    view = ViewSettings.model_validate(settings)
    app = application(Tables(SinkSettings(path=str(tmp_path / "none")), view), view)
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


@pytest.fixture
def guarded(tmp_path: Path) -> TestClient:
    """A page that asks for a token."""
    return client_of(tmp_path, token=TOKEN)


def raw(view: View, request: bytes) -> bytes:
    """Return the server's answer to bytes that a client library would not send."""
    parts = urlsplit(view.url)
    assert parts.hostname and parts.port
    with closing(socket.create_connection((parts.hostname, parts.port), timeout=START_S)) as connection:
        connection.sendall(request)
        said = b""
        while chunk := connection.recv(65536):
            said += chunk
        return said


def get(view: View, target: bytes, host: bytes = b"127.0.0.1") -> bytes:
    return raw(view, b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"host": "0.0.0.0"}, "view.token"),
        ({"host": "::"}, "view.token"),
        ({"host": "tidemill.example"}, "view.behind_proxy"),
        ({"token": "short"}, "at least 16"),
        ({"token": "sixteen euros: €"}, "printable ASCII"),
        ({"token": "a line break, too\n"}, "printable ASCII"),
    ],
)
def test_an_address_without_a_usable_token_is_refused(settings: dict[str, str], told: str):
    with pytest.raises(ValidationError, match=told):
        ViewSettings.model_validate(settings)


def test_an_open_address_with_a_token_or_a_proxy_is_accepted():
    assert ViewSettings.model_validate({"host": "0.0.0.0", "token": TOKEN}).token.get_secret_value() == TOKEN
    assert ViewSettings(host="0.0.0.0", behind_proxy=True).behind_proxy


@pytest.mark.parametrize("path", CLOSED)
def test_nothing_is_shown_without_the_token(guarded: TestClient, path: str):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"cookie": COOKIE}):
        assert guarded.get(path, headers=headers).status_code == 401
    answer = guarded.get(path, headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/enter")


@pytest.mark.parametrize("path", ["/static/../run", "/static/%2e%2e/run", "/enter/../run", "//static/", "/enterprise"])
def test_no_spelling_of_an_address_bypasses_the_token(guarded: TestClient, path: str):
    assert guarded.get(path).status_code in (401, 404)


def test_the_token_is_given_as_a_header_or_once_in_the_form(guarded: TestClient):
    assert guarded.get("/run", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    assert guarded.get("/enter", headers=HTML).status_code == 200
    wrong = guarded.post("/enter", data={"token": TOKEN[:-1]})
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (403, False)
    right = guarded.post("/enter", data={"token": TOKEN})
    assert (right.status_code, right.headers["location"]) == (303, "/")
    flags = {part.strip().lower() for part in right.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags
    assert TOKEN not in guarded.get("/run").text
    assert guarded.get("/run").status_code == 200


def test_over_tls_the_cookie_is_sent_only_over_tls(tmp_path: Path):
    over_tls = TestClient(client_of(tmp_path, token=TOKEN).app, base_url="https://localhost", follow_redirects=False)
    assert "secure" in over_tls.post("/enter", data={"token": TOKEN}).headers["set-cookie"].lower()


def test_a_form_of_any_size_and_any_bytes_is_answered(guarded: TestClient):
    for content in (b"token=" + b"x" * 2**21, b"\xff\xfe=%ff", b"", b"token=%ed%a0%80"):
        assert guarded.post("/enter", content=content).status_code == 403


def test_a_token_is_compared_in_constant_time(guarded: TestClient, monkeypatch: pytest.MonkeyPatch):
    compared = []

    def seen(one: bytes, other: bytes) -> bool:
        compared.append({one, other})
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", seen)
    guarded.get("/run", headers={"authorization": "Bearer guess"})
    guarded.get("/run", headers={"cookie": f"{COOKIE}=guess"})
    guarded.post("/enter", data={"token": "guess"})
    assert compared == [{b"guess", TOKEN.encode()}] * 3


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8126", True),
        ("localhost", True),
        ("[::1]:8126", True),
        ("tidemill.example", True),
        ("TIDEMILL.example:80", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("", False),
        ("[", False),
        ("0x7f.1", False),
    ],
)
def test_a_foreign_host_name_is_refused(tmp_path: Path, host: str, known: bool):
    client = client_of(tmp_path, names=("tidemill.example",))
    answer = client.get("/run", headers={"host": host})
    assert answer.status_code == (200 if known else 421)
    assert known or "view.names" in answer.text


def test_behind_a_proxy_any_name_is_accepted(tmp_path: Path):
    client = client_of(tmp_path, host="0.0.0.0", behind_proxy=True)
    assert client.get("/run", headers={"host": "runs.company.example"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", 307),
        ("GET", "/run", 200),
        ("HEAD", "/run", 200),
        ("GET", "/panel/accounting", 200),
        ("GET", "/panel/accounting.csv", 502),
        ("GET", "/panel/none", 404),
        ("GET", "/nowhere", 404),
        ("POST", "/run", 405),
        ("DELETE", "/panel/accounting", 405),
        ("GET", "/static/view.js", 200),
        ("GET", "/static/none.js", 404),
        ("GET", "/enter", 200),
    ],
)
def test_each_answer_has_the_security_headers(tmp_path: Path, method: str, path: str, expected: int):
    answer = client_of(tmp_path).request(method, path)
    assert answer.status_code == expected
    assert {name: answer.headers.get(name) for name in HEADERS} == HEADERS
    assert answer.headers["cache-control"]


def test_a_browser_may_keep_a_script_under_the_address_of_its_content_alone(tmp_path: Path):
    client = client_of(tmp_path)
    addresses = re.findall(r'(?:src|href)="(/static/[^"]*)"', client.get("/ask").text)
    assert len(addresses) == 6
    for address in addresses:
        assert "immutable" in client.get(address).headers["cache-control"], address
        for other in (address.partition("?")[0], f"{address}0"):
            answer = client.get(other)
            assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")


def test_refusals_have_the_security_headers_too(guarded: TestClient, tmp_path: Path):
    answers = [guarded.get("/run"), guarded.get("/run", headers=HTML), guarded.get("/run", headers={"host": "evil"})]
    assert [answer.status_code for answer in answers] == [401, 303, 421]
    assert all({name: answer.headers.get(name) for name in HEADERS} == HEADERS for answer in answers)


def test_the_policy_allows_no_inline_code_and_no_other_host():
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not re.search(r"unsafe|\*|http", HEADERS["Content-Security-Policy"])
    assert set(policy["script-src"].split() + policy["connect-src"].split()) == {"'self'"}


@pytest.mark.parametrize(
    "target",
    [
        b"/static/../app.py",
        b"/static/%2e%2e/app.py",
        b"/static/..%2fconfig.py",
        b"/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fpyproject.toml",
        b"/static//etc/passwd",
        b"/static/%2fetc%2fpasswd",
        b"/static/vendor/../../app.py",
        b"/static/..\\app.py",
        b"/static/%00",
        b"/static/view.js%00.png",
        b"/static/" + b"a" * 5000,
        b"/panel/../../../etc/passwd",
        b"/panel/..%2f..%2fconfig",
        b"/panel/accounting.sql",
        b"/panel/%00",
        b"/panel/accounting%0d%0aX-Injected:%20yes",
    ],
)
def test_no_address_reaches_another_file(view: View, target: bytes):
    answer = get(view, target)
    assert status(answer) in (400, 404)
    assert b"import" not in answer and b"root:" not in answer and b"\r\nX-Injected" not in answer


@pytest.mark.parametrize(
    "query",
    [
        b"run=%27%3B%20DROP%20TABLE%20rollouts%20--",
        b"run=%3Cscript%3Ealert(1)%3C/script%3E",
        b"run=%ff%fe&run=%00",
        b"run=\xff\xfe",
        b"run=" + b"x" * 20_000,
        b"run=%5Cn%5C%27%5C0",
        b"&&==%",
        b"run[]=1&__proto__=1",
    ],
)
def test_hostile_parameters_are_values_and_not_markup(view: View, query: bytes):
    for path in (b"/run", b"/panel/accounting", b"/panel/held_out_by_version.json", b"/rollouts", b"/ask"):
        answer = get(view, path + b"?" + query)
        assert status(answer) in (200, 400, 404, 502), answer[:500]
        assert b"<script>alert" not in answer and b"Traceback" not in answer
    assert view.query("SELECT count() > 0 FROM rollouts").rows == [[1]]


def test_bad_hosts_and_broken_requests_are_refused_and_the_server_continues(view: View):
    for host in (b"[", b"evil.example", b"127.0.0.1/static/?", b"\xff", b"a b"):
        assert status(get(view, b"/panel/accounting", host)) in (400, 421)
    assert status(raw(view, b"GET /run HTTP/1.1\r\nConnection: close\r\n\r\n")) in (400, 421)
    assert status(raw(view, b"nonsense\r\n\r\n")) == 400
    too_long = b"GET /run?" + b"x" * 2**21 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with suppress(ConnectionResetError, BrokenPipeError):  # The server may close before all of it was sent.
        assert status(raw(view, too_long)) in (400, 414, 431)
    assert view.get("/run").status_code == 200


def test_an_unexpected_body_is_not_kept(view: View):
    answer = view.post("/panel/accounting", content=b"x" * 2**21)
    assert answer.status_code == 405
    assert view.get("/run").status_code == 200
