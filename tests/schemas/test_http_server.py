"""Clients that send nothing, little or slowly: their answers, and the effect on other clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from multiprocessing.connection import wait

import httpx
import pytest
import uvicorn

from tests.waiting import until
from tidemill.schemas.config import HttpSettings
from tidemill.schemas.http_connections import ConnectionTable, bind, client_of
from tidemill.schemas.http_server import BoundedConfig

DEADLINE_S = 60.0
SHORT_S = 0.5
IDLE_S = 1
SHORT = HttpSettings(header_timeout_s=SHORT_S, body_timeout_s=SHORT_S, unread_timeout_s=SHORT_S)
LATE_HEADER = SHORT.model_copy(update={"header_timeout_s": DEADLINE_S})
"""For tests of other deadlines: on a busy machine, a client may send its header long after it has connected."""
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200"
NEIGHBOUR = "127.0.0.2"
LARGE = 64 << 20


def get(path: str) -> bytes:
    return GET.replace(b"/", path.encode(), 1)


class Application:
    """`/` answers at once, having read the body; `/early` without reading it; `/large` with many bytes; `/hold` once
    it is released; `/block` holds the server up until then; `/stream` gives a piece whenever the test wants one."""

    def __init__(self) -> None:
        self.held, self.gone = threading.Semaphore(0), threading.Semaphore(0)
        self.released = threading.Event()
        self.pieces = threading.Semaphore(0)

    async def __call__(self, scope, receive, send) -> None:
        path, body = scope["path"], b"ok"
        while path in ("/", "/large") and (message := await receive()).get("more_body"):
            if message["type"] == "http.disconnect":
                return
        if path == "/block":
            self.held.release()
            self.released.wait(DEADLINE_S)
        if path == "/hold":
            self.held.release()
            await asyncio.to_thread(self.released.wait, DEADLINE_S)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/stream":
            for _ in range(2):
                await asyncio.to_thread(self.pieces.acquire, timeout=DEADLINE_S)
                await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        if path == "/large":
            for _ in range(LARGE >> 16):
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            self.gone.release()
        await send({"type": "http.response.body", "body": body, "more_body": False})


@dataclass
class Served:
    """A running server, and connections to it that are closed with it."""

    application: Application
    address: tuple[str, int]
    open_ones: ExitStack
    server: uvicorn.Server

    def connect(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = self.open_ones.enter_context(
            closing(socket.create_connection(self.address, DEADLINE_S, (source, 0)))
        )
        connection.sendall(sent)
        return connection

    def begun(self, path: str) -> socket.socket:
        """Return a connection whose answer has begun: `OK` is read.

        On a busy machine, this thread may connect and send its request too late. Then another connection is made.
        """

        def attempt() -> socket.socket | None:
            with suppress(ConnectionError):
                connection = self.connect(get(path))
                if connection.recv(len(OK)) == OK:
                    return connection
            return None

        return until(attempt, "an answer", DEADLINE_S)

    def answered(self) -> socket.socket:
        """Return a connection whose first request was answered."""
        connection = self.begun("/")
        read_answer(connection)
        return connection

    def get(self, source: str = "127.0.0.1") -> int:
        """Return the status of a request over a separate connection."""
        # Without `verify=False` each transport reads the certificates of the machine first.
        transport = httpx.HTTPTransport(verify=False, local_address=source)
        with httpx.Client(transport=transport, timeout=DEADLINE_S) as client:
            return client.get("http://{}:{}/".format(*self.address)).status_code

    def wait_for_connections(self, count: int) -> None:
        found = self.server.server_state.connections
        until(lambda: len(found) == count, lambda: len(found))


@contextmanager
def serving(settings: HttpSettings) -> Iterator[Served]:
    application = Application()
    with closing(bind("127.0.0.1", 0, "gateway.port", 1024)) as listener, ExitStack() as open_ones:
        server = uvicorn.Server(BoundedConfig(application, settings, lifespan="off", grace_s=5.0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        address = listener.getsockname()
        thread.start()
        try:
            yield Served(application, address, open_ones, server)
        finally:
            application.released.set()
            open_ones.close()
            server.should_exit = True
            thread.join()


def read_to_end(connection: socket.socket) -> bytes:
    """Return the bytes that the server sends until it closes. Raises TimeoutError if it does not close."""
    found = bytearray()
    try:
        while chunk := connection.recv(65_536):
            found += chunk
    except ConnectionResetError:
        return bytes(found)
    return bytes(found)


def read_answer(connection: socket.socket) -> bytes:
    """Read one chunked answer."""
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        chunk = connection.recv(65_536)
        assert chunk, found
        found += chunk
    return found


def send_slowly(connection: socket.socket, pieces: Iterable[bytes]) -> bytes:
    """Send one piece after the other until the server answers or closes. Returns its complete answer."""
    deadline, left = time.monotonic() + DEADLINE_S, iter(pieces)
    while not wait([connection], SHORT_S / 10):
        assert time.monotonic() < deadline
        with suppress(ConnectionError):
            connection.send(next(left))
    return read_to_end(connection)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_a_connection_that_says_nothing_is_closed():
    with serving(SHORT) as served:
        assert read_to_end(served.connect()) == b""


def test_half_a_header_is_answered_and_closed():
    with serving(SHORT) as served:
        # If the half arrives too late, there is no answer.
        half = b"GET / HTTP/1.1\r\nhost: "
        answer = until(lambda: read_to_end(served.connect(half)), "an answer", DEADLINE_S)
        assert status_of(answer) == 408 and b"the header did not arrive within 0.5 s" in answer


@pytest.mark.parametrize("is_first", [True, False])
def test_a_header_that_comes_byte_by_byte_is_not_waited_for(is_first: bool):
    with serving(SHORT) as served:

        def answer() -> bytes:
            connection = served.connect() if is_first else served.answered()
            letters = chain(b"GET / HTTP/1.1\r\nx: ", repeat(ord("y")))
            return send_slowly(connection, (bytes([letter]) for letter in letters))

        # If the first byte arrives too late, there is no answer.
        assert status_of(until(answer, "an answer", DEADLINE_S)) == 408


@pytest.mark.parametrize("head", [b"content-length: 100", b"transfer-encoding: chunked"])
def test_a_body_that_comes_byte_by_byte_is_not_waited_for(head: bytes):
    with serving(LATE_HEADER) as served:
        connection = served.connect(b"POST / HTTP/1.1\r\n" + head + b"\r\n\r\n")
        answer = send_slowly(connection, repeat(b"x" if b"length" in head else b"1\r\nx\r\n"))
        assert status_of(answer) == 408 and b"the body did not arrive within 0.5 s" in answer


def test_a_body_that_comes_after_its_answer_is_not_waited_for_either():
    with serving(LATE_HEADER) as served:
        connection = served.connect(b"POST /early HTTP/1.1\r\ncontent-length: 100\r\n\r\n")
        assert status_of(read_answer(connection)) == 200
        assert send_slowly(connection, repeat(b"x")) == b"", "the request was answered already"


def test_a_connection_is_kept_for_a_further_request_for_a_while():
    with serving(SHORT.model_copy(update={"idle_timeout_s": IDLE_S})) as served:

        def is_kept() -> bool:
            """Send requests for longer than each deadline. Return False if this thread was late with one of them."""
            connection = served.answered()
            end = time.monotonic() + 2 * IDLE_S
            while (begun := time.monotonic()) < end:
                closed = wait([connection], IDLE_S / 4)
                if time.monotonic() - begun > IDLE_S / 2:
                    return False
                assert not closed
                connection.sendall(GET)
                assert status_of(read_answer(connection)) == 200
            return True

        until(is_kept, "requests in time", DEADLINE_S)
        # Both are answered, and the connection is closed after the while.
        until(lambda: read_to_end(served.connect(GET + GET)).count(OK) == 2, "two answers", DEADLINE_S)


def test_what_came_while_the_server_was_held_up_is_not_late():
    with serving(SHORT) as served:
        application = served.application

        def held_up() -> list[socket.socket]:
            """Hold the server up while another connection waits for its header; return both connections.

            Return an empty list if one of the two was late.
            """
            served.wait_for_connections(0)
            waiting = served.connect()
            served.wait_for_connections(1)
            blocking = served.connect(get("/block"))
            while not application.held.acquire(timeout=SHORT_S):
                if wait([blocking], 0):
                    return []
            if not wait([waiting], 0):
                return [blocking, waiting]
            application.released.set()
            read_to_end(blocking)
            application.released.clear()
            return []

        both = until(held_up, "a server that is held up", DEADLINE_S)
        both[1].sendall(GET)
        assert not wait(both, 4 * SHORT_S)
        application.released.set()
        assert [status_of(read_answer(connection)) for connection in both] == [200, 200]


def test_an_answer_that_lasts_longer_than_every_deadline_is_not_cut():
    with serving(SHORT.model_copy(update={"idle_timeout_s": IDLE_S})) as served:
        connection = served.begun("/stream")
        found = b""
        for number in range(1, 3):
            # The client expects no bytes in this time; it checks that it was not cut off.
            assert b"0\r\n\r\n" not in found
            while b"\r\n\r\n" not in found:
                found += connection.recv(65_536)
            assert not wait([connection], 3 * SHORT_S)
            if number == 2:
                # It is answered after the stream: the connection is still good.
                connection.sendall(GET)
            served.application.pieces.release()
            while found.count(b"piece") < number:
                found += (piece := connection.recv(65_536))
                assert piece
        while found.count(b"0\r\n\r\n") < 2:
            found += (piece := connection.recv(65_536))
            assert piece
        assert found.count(OK) == 1, "the status of the stream itself is read above"


def test_a_client_that_reads_nothing_is_cut_off_and_a_slow_reader_is_not():
    unread_s = 2 * SHORT_S

    def is_cut_off() -> bool:
        """Return False if the slow reader was cut off because this thread was late with a part."""
        with serving(SHORT.model_copy(update={"unread_timeout_s": unread_s})) as served:
            slow, stuck = served.begun("/large"), served.begun("/large")
            reads = [time.monotonic()]

            def read() -> int:
                size = len(slow.recv(1 << 20))
                reads.append(time.monotonic())
                if not size:
                    raise ConnectionResetError
                return size

            try:
                taken = read()
                while not served.application.gone.acquire(timeout=SHORT_S / 10):
                    taken += read()
                served.wait_for_connections(1)
                while taken < LARGE:
                    taken += read()
            except ConnectionResetError:
                assert max(after - before for before, after in pairwise([*reads, time.monotonic()])) > unread_s / 2
                return False
            del stuck
            return True

    until(is_cut_off, "a slow reader in time", DEADLINE_S)


def test_a_header_without_end_is_refused():
    patient = HttpSettings(header_timeout_s=DEADLINE_S, body_timeout_s=DEADLINE_S, max_header_bytes=4096)
    with serving(patient) as served:
        answer = read_to_end(served.connect(b"GET / HTTP/1.1\r\nx: " + b"y" * 5000))
        assert status_of(answer) == 431 and b"more than 4096 bytes outside its body" in answer
        trailer = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
        assert status_of(read_to_end(served.connect(trailer + b"y" * 5000))) == 431
        for size, number in ((100_000, 20), (10, 200)):
            chunks = number * (b"%x\r\n%b\r\n" % (size, b"z" * size))
            head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
            assert status_of(read_answer(served.connect(head + chunks + b"0\r\n\r\n"))) == 200


@pytest.mark.parametrize("source", ["127.0.0.1", NEIGHBOUR])
def test_many_silent_clients_leave_a_good_client_answered(source: str):
    patient = HttpSettings(
        max_connections=200, max_client_connections=100, header_timeout_s=DEADLINE_S, body_timeout_s=DEADLINE_S
    )
    with serving(patient) as served:
        good = served.connect(source=source)
        begun = [b"", b"GET / HTT", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"]
        for number in range(250):
            served.connect(begun[number % 3])
            if number % 20 == 0:
                good.sendall(GET)
                assert status_of(read_answer(good)) == 200
                assert served.get(source) == 200
        served.wait_for_connections(100 + (source == NEIGHBOUR))
        assert served.get(source) == 200


def test_requests_in_hand_keep_their_places_and_further_ones_are_refused():
    limits = HttpSettings(max_connections=3, max_client_connections=2, header_timeout_s=DEADLINE_S)
    with serving(limits) as served:
        held = [served.connect(get("/hold")) for _ in range(2)]
        for _ in held:
            assert served.application.held.acquire(timeout=DEADLINE_S)
        assert {served.get() for _ in range(3)} == {503}
        assert served.get(NEIGHBOUR) == 200, "another client has a place left"
        held.append(served.connect(get("/hold"), NEIGHBOUR))
        assert served.application.held.acquire(timeout=DEADLINE_S)
        assert served.get(NEIGHBOUR) == 503, "nobody has"
        served.application.released.set()
        assert [status_of(read_answer(connection)) for connection in held] == [200] * 3
        assert served.get() == 200, "an answered one that waits gives way"


@dataclass(eq=False)
class Seat:
    """A connection that only counts."""

    client_is_late: bool = True
    gave_way: bool = field(default=False, init=False)

    def close_for_another(self) -> None:
        self.gave_way = True


def seated(room: ConnectionTable, address: str = "10.0.0.1", waits: bool = True) -> Seat:
    seat = Seat()
    room.enter(seat, address)
    if waits:
        room.wait(seat)
    return seat


def test_the_longest_wait_of_the_same_client_is_closed_first():
    room = ConnectionTable(HttpSettings(max_connections=10, max_client_connections=2))
    neighbour, first, second = seated(room, "10.0.0.9"), seated(room), seated(room)
    room.wait(first)
    third = seated(room)
    assert room.fits(third) and second.gave_way and not (first.gave_way or neighbour.gave_way)
    room.leave(second)
    fourth = seated(room)
    assert room.fits(fourth) and first.gave_way and not neighbour.gave_way


def test_a_connection_with_a_request_is_never_closed_for_another():
    room = ConnectionTable(HttpSettings(max_connections=2))
    asking, taking = seated(room, waits=False), seated(room)
    taking.client_is_late = False
    newcomer = seated(room)
    assert not room.fits(newcomer) and not (asking.gave_way or taking.gave_way or newcomer.gave_way)
    room.answer(newcomer)
    room.leave(asking)
    assert room.fits(newcomer)


def test_as_many_fit_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (130, 130))
    room = ConnectionTable(HttpSettings())
    first, second, third = seated(room), seated(room), seated(room)
    assert room.fits(third) and first.gave_way and not second.gave_way


def test_clients_are_told_apart_by_address_and_by_network():
    assert client_of("10.0.0.1") != client_of("10.0.0.2")
    assert client_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth0")
    assert client_of("") == ""
