"""A running replica put together from its parts: engine, ledger, subscriber, HTTP application.

Keeps true: the parts exist only around an engine whose live tensors were proved to be the joined version, and the
engine core is gone when the context ends.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import uvicorn

from tidemill.consumers.replica.config import Pool, ReplicaSettings
from tidemill.consumers.replica.engine import ReplicaEngine
from tidemill.consumers.replica.join import Joined
from tidemill.consumers.replica.ledger import Identity, Ledger, Write
from tidemill.consumers.replica.server import ReplicaStatus, build_replica_app, make_server, server_arguments
from tidemill.consumers.replica.staging import Staging
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import Subscriber
from tidemill.kernels.weights.checkpoint import map_checkpoint, specs_of
from tidemill.kernels.weights.delta_fetch import ShardSource
from tidemill.schemas.chat.serving import ChatServer
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import ChatSettings, RunSettings


@dataclass(frozen=True, slots=True)
class Running:
    """A replica that serves a proved version; its HTTP server is not started yet."""

    engine: ReplicaEngine
    subscriber: Subscriber
    server: uvicorn.Server


@asynccontextmanager
async def running_replica(
    settings: ReplicaSettings,
    run: RunSettings,
    chat: ChatSettings,
    state: ReplicaState,
    joined: Joined,
    directory: Path,
    surroundings: Callable[[], tuple[ShardSource, Write]],
) -> AsyncIterator[Running]:
    """Start the engine on the joined version, prove it, and put the rest around it.

    Args:
        settings: the replica.
        run: the run and branch that it follows.
        chat: how conversations become tokens.
        state: the versions as far as they were read.
        joined: what to start with.
        directory: where whole checkpoints are staged.
        surroundings: opens the log's clients, and gives the bytes of deltas and a way to say what the replica holds;
            called after the engine core, which is a fork, has been started.

    Raises:
        ReplicaFault: the live tensors are not the joined version.
        RuntimeError: the engine did not start.
        UnsupportedModelError: its answers depend on their company, and `batch_invariant` is set.
        ValueError: an argument of `vllm_args`, or the tokenizer, cannot be read.
    """
    arguments = server_arguments(str(joined.directory), settings)
    tensors = specs_of(map_checkpoint(joined.directory))
    identity = Identity(
        settings.replica_id, settings.region, run.run_id, run.branch, incarnation=uuid.uuid4().hex, pid=os.getpid()
    )
    async with AsyncExitStack() as stack:
        version, expert_ids = joined.manifest.version, settings.expert_ids
        engine = await ReplicaEngine.start(arguments, tensors, version, settings.kv_policy, expert_ids)
        stack.callback(engine.shutdown)
        if settings.batch_invariant:
            await engine.require_invariance()
        shards, say = surroundings()
        ledger = Ledger(identity, say, now_us, lambda: state.head)
        staging = Staging(shards, directory, settings.decode_threads)
        subscriber = Subscriber(engine, state, joined.mirror, staging, ledger)
        stack.callback(subscriber.close)
        await subscriber.begin(joined.manifest, joined.reason)
        status = partial(_status, ledger, state, settings.pool, now_us())
        chats = ChatServer.load(str(joined.directory), chat, settings.remembered_turns, settings.max_model_len)
        app = await build_replica_app(engine, arguments, settings.replica_id, status, state.incarnation_of, chats)
        yield Running(engine, subscriber, make_server(app, settings.http))


def _status(ledger: Ledger, state: ReplicaState, pool: Pool, started_at: int) -> ReplicaStatus:
    return ReplicaStatus(
        **asdict(ledger.identity),
        pool=pool.value,
        started_at=started_at,
        version=ledger.version,
        fingerprint=ledger.fingerprint,
        serving_format=ledger.serving_format,
        head=state.head,
        applied=ledger.applied,
        refused=ledger.refused,
        last_pause_ms=ledger.last_pause_ms,
        last_reason=ledger.last_reason,
    )
