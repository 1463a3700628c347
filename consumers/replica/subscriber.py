"""Follows the weight versions of a branch: fetches and checks while the engine samples, applies between two steps,
proves, and writes acknowledgements. `state.ReplicaState` decides; this module carries the updates out. Invariants:

- only a version that was checked on the CPU is written to the engine, and only its changed elements if that makes the
  pause shorter: a re-sync and a roll-back write the difference from the served version;
- outside an update the mirror holds the last proved version, so that the engine can return to it;
- a version is acknowledged as proved only after the live tensors' fingerprints were computed, and every version that
  is not served is acknowledged as refused, with the reason, except the intermediate ones of a path of several deltas.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.consumers.replica.ledger import Applied, Ledger, WriteRefusedError
from tidemill.consumers.replica.staging import Backoff, PreparedUpdate, StoppedError, UpdateStaging
from tidemill.consumers.replica.state import ReplicaState, Said, UpdateAction
from tidemill.kernels.weights.graph import Delta
from tidemill.kernels.weights.mirror import Mirror
from tidemill.kernels.weights.rebuild import RefusedStepError
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.liveness import Liveness
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import AckStatus, GateDecision, Manifest, SkipDelta
from tidemill.schemas.stored_object import StoreUnavailableError

if TYPE_CHECKING:
    from tidemill.consumers.replica.engine import ReplicaEngine

logger = logging.getLogger(__name__)
IDLE_S = 0.25
"""Time between checks for the retry of a timed-out update while no record arrives, in seconds."""
BATCH = 500


class ReplicaFault(RuntimeError):
    """Error for an engine that cannot return to a proved version: the process must be replaced."""


class Subscriber:
    """Carries out the updates of one engine. In one event loop: `receive` at any time, one `advance` at a time."""

    def __init__(
        self, engine: ReplicaEngine, state: ReplicaState, mirror: Mirror, staging: UpdateStaging, ledger: Ledger
    ) -> None:
        self._engine, self._state, self._mirror = engine, state, mirror
        self._staging, self._ledger = staging, ledger
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-staging")
        self._patience = Backoff()
        self._late: UpdateAction | None = None
        """The update that timed out and is retried after the backoff."""
        self._write_whole: int | None = None
        """A version whose changed elements were written but could not be proved."""

    async def begin(self, manifest: Manifest, reason: str = "start") -> None:
        """Prove the version that the engine was started with, and record it in the ledger.

        Raises:
            ReplicaFault: the live tensors are not that version.
        """
        proof = await self._engine.prove()
        objection = proof.objection(manifest.fingerprint, self._mirror.fingerprints)
        if objection:
            raise ReplicaFault(f"the engine did not load version {manifest.version}: {objection}")
        self._state.proved(manifest.version)
        cost = Applied(proof_ms=proof.proof_ms, step_to_served_ms=self._ledger.since_us(manifest.trained_at))
        self._ledger.served(AckStatus.ANCHORED, manifest, cost, reason)

    def receive(self, record: Said) -> None:
        """Add a record to the state; `advance` acts on it."""
        objection = self._state.observe(record)
        if objection and isinstance(record, Manifest):
            self._refuse(record, objection)
        elif objection:
            logger.warning("left out: %s", objection)

    async def advance(self, begins: Callable[[], None] = lambda: None) -> None:
        """Carry out the updates that the records so far require, and refuse every other version with a reason.

        Returns early after a timeout, which needs a later retry, and if the replica is stopping.

        Args:
            begins: called before each update. Versions that arrive during an update cause the next one, so that this
                call may be long although each update is short.

        Raises:
            ReplicaFault: the engine cannot return to any proved version.
        """
        loop = asyncio.get_running_loop()
        while (move := self._state.plan()) is not None:
            if move == self._late and not self._patience.may_try(time.monotonic()):
                return
            begins()
            try:
                prepared = await loop.run_in_executor(self._worker, self._staging.prepare, move, self._mirror)
            except RefusedStepError as error:
                self._state.refused(error.step)
                self._refuse(error.step.manifest if isinstance(error.step, Delta) else error.step, str(error))
            except (TimeoutError, StoreUnavailableError) as error:
                self._late = move
                self._patience.failed(time.monotonic())
                self._refuse(move.target, str(error))
                return
            except StoppedError:
                return
            else:
                self._patience.succeeded()
                await self._serve(move, prepared)
        for manifest, reason in self._state.refusals():
            self._refuse(manifest, reason)

    def close(self) -> None:
        """Finish the work of the staging threads and end them."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._staging.close()

    async def _serve(self, move: UpdateAction, prepared: PreparedUpdate) -> None:
        target, cost, fingerprint = move.target, Applied(), ""
        again = self._write_whole == target.version
        whole = prepared.whole or again
        try:
            cost = await (self._load() if whole else self._engine.apply(prepared.changes, target.version))
        except WriteRefusedError as error:
            refusal = f"the engine could not write it: {error}"
        else:
            served_ms = self._ledger.since_us(target.trained_at)
            proof = await self._engine.prove()
            fetch_ms, decode_ms = prepared.fetch_ms, prepared.decode_ms
            cost = replace(
                cost, fetch_ms=fetch_ms, decode_ms=decode_ms, proof_ms=proof.proof_ms, step_to_served_ms=served_ms
            )
            objection = proof.objection(target.fingerprint, self._mirror.fingerprints)
            if not objection:
                prepared.draft.keep()
                self._state.proved(target.version)
                status = AckStatus.ANCHORED if again or move.path.anchor is not None else AckStatus.PROVED
                self._ledger.served(status, target, cost, move.reason)
                return
            refusal, fingerprint = f"the live tensors could not be proved: {objection}", proof.total
        try:
            await self._take_back(target, prepared, whole)
        finally:
            self._refuse(target, refusal, cost, fingerprint)

    async def _take_back(self, target: Manifest, prepared: PreparedUpdate, whole: bool) -> None:
        """Return to the last proved version: undo the write, or write the whole mirror.

        Raises:
            ReplicaFault: the target, or the last version, was written in full and could not be proved.
        """
        await asyncio.get_running_loop().run_in_executor(self._worker, prepared.draft.revert)
        if whole:
            raise ReplicaFault(f"version {target.version} was written in full and is not there")
        self._write_whole = target.version
        with suppress(WriteRefusedError):  # nothing was written, or a rank cannot undo it: the proof shows it
            await self._engine.undo()
        expected = self._mirror.fingerprint.hex(), self._mirror.fingerprints
        if (await self._engine.prove()).objection(*expected):
            await self._load()
            if objection := (await self._engine.prove()).objection(*expected):
                raise ReplicaFault(f"version {self._mirror.version} was written in full and is not there: {objection}")

    async def _load(self) -> Applied:
        """Load the mirror's whole version into the engine."""
        directory = await asyncio.get_running_loop().run_in_executor(self._worker, self._staging.save, self._mirror)
        return await self._engine.load(directory, self._mirror.version)

    def _refuse(self, manifest: Manifest, reason: str, cost: Applied | None = None, fingerprint: str = "") -> None:
        logger.warning("version %d refused, version %s stays: %s", manifest.version, self._state.serving, reason)
        self._ledger.refuse(manifest, reason, cost or Applied(), fingerprint)


async def follow(
    subscriber: Subscriber,
    log: LogReader,
    bury: Callable[[ConsumedRecord, str], None],
    stop: asyncio.Event,
    *,
    check: Callable[[], None] = lambda: None,
    poll_interval_s: float = 0.05,
    acting: Liveness | None = None,
    move_timeout_s: float = 0.0,
) -> None:
    """Run a subscriber until stopped: one task reads the log as it grows, another acts on the records.

    The tasks are separate so that a replica knows how far it is behind while it fetches a version, and so that a whole
    backlog is known and the cheapest path over it is used, instead of record by record.

    Args:
        log: manifests, skip-deltas and gate decisions; read only here.
        bury: writes an unusable record, with the reason, as a dead letter; reading continues.
        check: called before each poll; raises if the replica cannot serve any more.
        poll_interval_s: how long one poll waits for a record, in seconds.
        acting: receives a heartbeat when each update begins, and when there is none left to do.
        move_timeout_s: longest time for an update, in seconds.
    """
    acting, news, ended = acting or Liveness("", 0.0), asyncio.Event(), asyncio.Event()

    async def read() -> None:
        while not (ended.is_set() or stop.is_set()):
            check()
            for located in await asyncio.to_thread(log.poll, poll_interval_s, BATCH):
                if isinstance(located.record, Manifest | SkipDelta | GateDecision):
                    subscriber.receive(located.record)
                else:
                    kind = type(located.record).__name__
                    bury(located, located.error or f"a {kind} is not followed by a replica")
                news.set()

    async def act() -> None:
        while not (ended.is_set() or stop.is_set()):
            news.clear()
            await subscriber.advance(lambda: acting.beat("a change to another version", move_timeout_s))
            acting.beat("waiting for records")
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), IDLE_S)

    tasks = [asyncio.create_task(read()), asyncio.create_task(act())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        # The other task ends by itself: a cancelled poll or update would leave its thread running.
        ended.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
