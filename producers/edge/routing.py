"""The route of a product's request: the arm of its user, the replica that is asked, and the answer as it arrives.

Invariants: while a version is on trial, the share of users in the newest CANARY decision is in the canary arm, always
the same users; another candidate draws other users, so that no user is always the first to get a candidate. The least
loaded replica of a pool that is not in backoff is asked; closing an answer before its end closes the connection, and
the replica then cancels the request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tidemill.producers.config import RouterSettings
from tidemill.producers.sampling.completion import BadResponse, ReplicaUnavailable
from tidemill.producers.sampling.replicas import (
    COMPLETIONS_PATH,
    LARGEST_BODY,
    ReplicaClient,
    ReplicaIdentity,
    ReplicaPool,
    read_body,
)
from tidemill.schemas.gate_decisions import BranchDecisions, canary_share
from tidemill.schemas.records import CANARY_SHARE, Arm, GateDecision, GateVerdict

MODELS_PATH = "/v1/models"
_ABORTED = ("abort", "error")


class CanaryShare:
    """The share of the version on trial on one branch of one run; 0 if there is none."""

    def __init__(self, run_id: str, branch: str) -> None:
        self._of = (run_id, branch)
        self._branch = BranchDecisions()
        self.share = 0.0
        """The share of users, 0 to 1; 0 if no version is on trial."""
        self.version: int | None = None
        """The version on trial; None if there is none."""

    def observe(self, decision: GateDecision) -> str:
        """Process a decision, in log order. Return the reason why it is not used; otherwise an empty string."""
        if (decision.run_id, decision.branch) != self._of:
            return ""
        objection, trial = self._branch.observe(decision), self._branch.trial
        self.share, self.version = (0.0, None) if trial is None else (trial.share, trial.version)
        if decision.verdict is GateVerdict.CANARY and canary_share(decision) is None:
            wanted = f"a version and numbers[{CANARY_SHARE!r}] from 0 to 1"
            share = decision.numbers.get(CANARY_SHARE, math.nan)
            return f"a canary needs {wanted}, not {decision.version} and {share:g}"
        return objection

    def assign(self, unit: str, salt: str) -> tuple[Arm, float]:
        """Return the arm of a unit that keeps its arm, and its propensity.

        A unit is a pseudonym; without one, a conversation or a single request. `salt` is the experiment's.
        """
        digest = hashlib.sha256(f"{salt}\x00{self.version}\x00{unit}".encode()).digest()
        drawn = int.from_bytes(digest[:7]) / 2**56  # uniform in [0, 1)
        if drawn < self.share:
            return Arm.CANARY, self.share
        return Arm.STABLE, 1.0 - self.share


class NoReplicaAvailable(ReplicaUnavailable):
    """Every replica of a pool is in backoff after a failure."""


Answer = tuple[ReplicaIdentity, AsyncIterator[dict[str, Any]]]
"""The replica that answers, and the answer as it arrives: the whole body as one document, or one document per chunk."""


class Replicas:
    """The replicas of both pools."""

    def __init__(self, client: ReplicaClient, settings: RouterSettings) -> None:
        self._client = client
        self._pools = {
            arm: ReplicaPool(addresses, settings.backoff_s, settings.backoff_limit_s)
            for arm, addresses in ((Arm.STABLE, settings.pools.stable), (Arm.CANARY, settings.pools.canary))
        }

    @asynccontextmanager
    async def ask(self, arm: Arm, body: bytes, *, stream: bool) -> AsyncIterator[Answer]:
        """Send a request to `/v1/completions` of a replica of a pool. The answer has at least one document.

        Raises NoReplicaAvailable if all replicas of the pool are in backoff (for the stable pool, the call waits
        instead), ReplicaUnavailable, RequestRefused; BadResponse if the answer is empty, or not JSON.
        """
        async with (
            self._place(arm, wait=arm is Arm.STABLE) as address,
            self._client.request("POST", address, COMPLETIONS_PATH, body, limited=False) as response,
        ):
            identity = await self._client.identity(address)
            documents = _documents(response, stream)
            try:
                first = await anext(documents)
            except StopAsyncIteration as error:
                raise BadResponse("the answer is empty") from error

            async def rejoined() -> AsyncIterator[dict[str, Any]]:
                yield first
                async for document in documents:
                    yield document

            yield identity, rejoined()

    async def models(self) -> dict[str, Any]:
        """Return the models of the stable pool, in the form of OpenAI. Raises ReplicaUnavailable, BadResponse."""
        async with (
            self._place(Arm.STABLE, wait=False) as address,
            self._client.request("GET", address, MODELS_PATH) as response,
        ):
            listed = _document(await read_body(response)).get("data")
            if not isinstance(listed, list) or not all(isinstance(model, dict) for model in listed):
                raise BadResponse("the list of models is not valid")
        kept = ("id", "object", "created", "owned_by", "max_model_len")
        return {"object": "list", "data": [{name: model.get(name) for name in kept} for model in listed]}

    @asynccontextmanager
    async def _place(self, arm: Arm, wait: bool) -> AsyncIterator[str]:
        """Reserve a replica of a pool. Raises NoReplicaAvailable if all are in backoff, unless `wait` is set."""
        pool, clock = self._pools[arm], asyncio.get_running_loop().time
        while (address := pool.pick(clock())) is None:
            if not wait:
                raise NoReplicaAvailable(f"no replica of the {arm} pool answers")
            await asyncio.sleep(max(0.001, pool.next_wake() - clock()))
        try:
            yield address
        except ReplicaUnavailable:
            pool.failed(address, clock())
            raise
        else:
            pool.succeeded(address)
        finally:
            pool.release(address)


async def _documents(response: aiohttp.ClientResponse, stream: bool) -> AsyncIterator[dict[str, Any]]:
    """Yield a whole body, or the documents of a stream of server-sent events up to its end mark.

    Raises ReplicaUnavailable for a stream without an end mark.
    """
    if not stream:
        yield _document(await read_body(response))
        return
    waiting, ended = b"", False
    async for piece in response.content.iter_any():
        *events, waiting = (waiting + piece).split(b"\n\n")
        for event in events:
            # The bytes after the end mark are read too: only a connection that was read to its end is used again.
            ended = ended or event == b"data: [DONE]"
            if not ended and event.startswith(b"data: "):
                yield _document(event[6:])
        if len(waiting) > LARGEST_BODY:
            raise BadResponse(f"an event is longer than {LARGEST_BODY} bytes")
    if not ended:
        raise ReplicaUnavailable("the stream ended without its end mark")


def _document(text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise BadResponse("the answer is not JSON") from error
    if not isinstance(document, dict):
        raise BadResponse("the answer is not a JSON object")
    choices = document.get("choices")
    listed = choices if isinstance(choices, list) else []
    if "error" in document or any(isinstance(one, dict) and one.get("finish_reason") in _ABORTED for one in listed):
        raise ReplicaUnavailable("the engine aborted the request")
    return document
