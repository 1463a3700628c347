"""HTTP requests to replicas: sends token ids, returns checked token ids, logprobs and weight versions.

A request that failed because of the replica (no connection, 5xx, cut short, timed out, aborted) is retried, on another
replica if there is one, until the caller's deadline; the prompt is the whole state, so no part of the episode is lost.
An invalid answer is never retried: it is a defect, and is reported.

aiohttp and not httpx: 0.13-0.20 ms of CPU a request against 2.3-2.8 ms, on the same loopback server.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tidemill.producers.config import RolloutSettings, RouterSettings
from tidemill.producers.sampling.completion import (
    BadResponse,
    Completion,
    ReplicaUnavailable,
    Sampling,
    parse_completion,
)

LOG = logging.getLogger(__name__)
REPLICA_HEADER = "x-tidemill-replica"
COMPLETIONS_PATH = "/v1/completions"
STATUS_PATH = "/tidemill/status"
OVERLOADED = 429
LARGEST_BODY = 64 * 2**20
"""In bytes. A longer answer is refused before it fills the memory."""


class RequestRefused(BadResponse):
    """The replica refused the request as invalid."""

    def __init__(self, message: str, status: int, detail: str) -> None:
        super().__init__(message)
        self.status, self.detail = status, detail


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    replica_id: str
    region: str


@dataclass(slots=True)
class _Replica:
    episodes: int = 0
    failures: int = 0
    rests_until: float = 0.0


class ReplicaPool:
    """Load and health of a fixed list of replicas. Times are seconds of one monotonic clock."""

    def __init__(self, addresses: Sequence[str], backoff_s: float, backoff_limit_s: float) -> None:
        self._replicas = {address.rstrip("/"): _Replica() for address in addresses}
        self._backoff_s, self._backoff_limit_s = backoff_s, backoff_limit_s

    def pick(self, now: float) -> str | None:
        """Reserve the least loaded replica that is not in backoff and return its address; None if all are."""
        awake = [address for address, replica in self._replicas.items() if replica.rests_until <= now]
        if not awake:
            return None
        address = min(awake, key=lambda candidate: self._replicas[candidate].episodes)
        self._replicas[address].episodes += 1
        return address

    def release(self, address: str) -> None:
        self._replicas[address].episodes -= 1

    def failed(self, address: str, now: float) -> None:
        """Start the backoff of a replica after a failure. Failures of concurrent requests count as one."""
        replica = self._replicas[address]
        if replica.rests_until > now:
            return
        rest = min(self._backoff_s * 2 ** min(replica.failures, 32), self._backoff_limit_s)
        replica.failures += 1
        replica.rests_until = now + rest

    def succeeded(self, address: str) -> None:
        self._replicas[address].failures, self._replicas[address].rests_until = 0, 0.0

    def next_wake(self) -> float:
        """Return the earliest time at which a backoff ends."""
        return min(replica.rests_until for replica in self._replicas.values())


class ReplicaClient:
    """Requests to single replicas, over shared connections. Open with `open_replica_client`."""

    def __init__(self, session: aiohttp.ClientSession, settings: RolloutSettings | RouterSettings) -> None:
        self._session, self._limit_s = session, settings.request_timeout_s
        # A replica's message may contain a part of the prompt, which is a user's if the router asked.
        self._quotes = isinstance(settings, RolloutSettings)
        self._model = settings.model if isinstance(settings, RolloutSettings) else None
        self._identities: dict[str, ReplicaIdentity] = {}

    async def complete(self, address: str, prompt: list[int], sampling: Sampling) -> Completion:
        """Sample one turn. Raises ReplicaUnavailable, BadResponse."""
        body = sampling.request_body(prompt, self._model)
        async with self.request("POST", address, COMPLETIONS_PATH, body) as response:
            answer = await read_body(response)
        try:
            return parse_completion(answer, sampling, len(prompt))
        except (ReplicaUnavailable, BadResponse) as error:
            raise type(error)(f"{address}: {error}") from error

    async def identity(self, address: str) -> ReplicaIdentity:
        """Return the identity of the replica at an address. Raises ReplicaUnavailable, BadResponse."""
        if address not in self._identities:
            async with self.request("GET", address, STATUS_PATH) as response:
                body = await read_body(response)
            try:
                status = json.loads(body)
                self._identities[address] = ReplicaIdentity(str(status["replica_id"]), str(status["region"]))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise BadResponse(f"{address}{STATUS_PATH} is not a replica's status: {error!r}") from error
        return self._identities[address]

    @asynccontextmanager
    async def request(
        self, method: str, address: str, path: str, body: bytes | None = None, *, limited: bool = True
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a replica's answer with status 200. Raises ReplicaUnavailable, RequestRefused.

        Forgets the identity at the address if the answer names another replica. If `limited` is False, the caller
        limits the time of the request.
        """
        headers = None if body is None else {"content-type": "application/json"}
        # aiohttp's own limit ignores a cancellation, such as a caller's deadline, in the same step of the event loop.
        limit = asyncio.timeout(self._limit_s if limited else None)
        try:
            async with limit, self._session.request(method, address + path, data=body, headers=headers) as response:
                if response.status != 200:
                    detail = (await response.content.read(4000)).decode("utf-8", "replace")
                    message = f"{address}: HTTP {response.status}" + (f": {detail:.300}" if self._quotes else "")
                    if response.status >= 500 or response.status == OVERLOADED:
                        raise ReplicaUnavailable(message)
                    raise RequestRefused(message, response.status, detail)
                known = self._identities.get(address)
                if known is not None and response.headers.get(REPLICA_HEADER, known.replica_id) != known.replica_id:
                    del self._identities[address]
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ReplicaUnavailable(f"{address}: {type(error).__name__}: {error}") from error


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole body of an answer. Raises BadResponse for one above `LARGEST_BODY`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise BadResponse(f"the body is longer than {LARGEST_BODY} bytes")
    return bytes(body)


@asynccontextmanager
async def open_replica_client(settings: RolloutSettings | RouterSettings) -> AsyncIterator[ReplicaClient]:
    """Yield a client without a limit of connections, closed at the end. Proxies in the environment are not used."""
    timeout = aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield ReplicaClient(session, settings)


class ReplicaSession:
    """The requests of one episode: stay on one replica, and change it if it fails. Use as an async context manager.

    Calls may run concurrently.
    """

    def __init__(self, client: ReplicaClient, pool: ReplicaPool) -> None:
        self._client, self._pool = client, pool
        self._address: str | None = None
        self.identity = ReplicaIdentity("", "")
        """The last replica that was asked; empty before the first request."""
        self.retries = 0
        """The number of retries."""
        self._last_error: ReplicaUnavailable | None = None

    async def __aenter__(self) -> ReplicaSession:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self._leave()

    async def complete(self, prompt: list[int], sampling: Sampling) -> Completion:
        """Sample one turn, with retries until the caller's deadline cancels it. Raises BadResponse."""
        clock = asyncio.get_running_loop().time
        while True:
            while self._address is None:
                self._address = self._pool.pick(clock())
                if self._address is None:
                    await asyncio.sleep(max(0.0, self._pool.next_wake() - clock()))
            address = self._address
            try:
                self.identity = await self._client.identity(address)
                completion = await self._client.complete(address, prompt, sampling)
                self.identity = await self._client.identity(address)  # another replica may have replaced it
            except ReplicaUnavailable as error:
                LOG.info("trying again: %s", error)
                self.retries += 1
                self._last_error = error
                self._pool.failed(address, clock())
                if address == self._address:  # a concurrent call may have changed the replica already
                    self._leave()
            else:
                self._pool.succeeded(address)
                return completion

    def failures_so_far(self) -> str:
        """Return a description of the failures so far, for a failed rollout's reason."""
        if self._last_error is None:
            return "no request was tried again"
        return f"{self.retries} requests tried again, the last for: {self._last_error}"

    def _leave(self) -> None:
        if self._address is not None:
            self._pool.release(self._address)
            self._address = None
