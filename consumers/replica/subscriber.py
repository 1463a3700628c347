"""Follows the weight versions of a branch: fetch and check while tokens flow, apply between two steps, prove, say so.

The decisions are `state.ReplicaState`'s; this shell carries them out and keeps these true:

- the engine is touched only by a version that was checked on the CPU first, and by changed elements wherever that is
  the shorter pause: a re-sync and a roll-back write the difference to what is served;
- outside a move the mirror holds the last proved version, so that the engine can be brought back to it;
- a version is acknowledged as proved only after the live tensors' fingerprints were read back, and every version that
  is not served is acknowledged as refused, with the reason, except those that a move over several deltas passes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tidemill.consumers.replica.ledger import Applied, Ledger, Proof, Timings, WriteRefusedError
from tidemill.consumers.replica.staging import Prepared, Staging
from tidemill.consumers.replica.state import Move, ReplicaState, Said
from tidemill.kernels.weights.delta_fetch import FetchTimeoutError
from tidemill.kernels.weights.mirror import Mirror
from tidemill.kernels.weights.rebuild import RefusedAnchorError, RefusedDeltaError
from tidemill.schemas.records import AckStatus, Manifest

if TYPE_CHECKING:
    from tidemill.consumers.replica.engine import ReplicaEngine

FIRST_S = 0.5
LONGEST_S = 30.0


class Patience:
    """Waits twice as long after each failure in a row."""

    def __init__(self) -> None:
        self._wait_s = FIRST_S
        self._until = float("-inf")

    def failed(self, now: float) -> None:
        """A try failed at `now`."""
        self._until = now + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_S)

    def succeeded(self) -> None:
        """A try succeeded."""
        self._wait_s, self._until = FIRST_S, float("-inf")

    def may_try(self, now: float) -> bool:
        """Whether it is time to try again."""
        return now >= self._until


logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class ReplicaFault(RuntimeError):
    """The engine cannot be brought to a proved version: the process must be replaced."""


class Subscriber:
    """Carries out the plans for one engine. `receive` at any time, `advance` one at a time, in one event loop."""

    def __init__(
        self, engine: ReplicaEngine, state: ReplicaState, mirror: Mirror, staging: Staging, ledger: Ledger
    ) -> None:
        self._engine, self._state, self._mirror = engine, state, mirror
        self._staging, self._ledger = staging, ledger
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-staging")
        self._patience = Patience()
        self._late: Move | None = None
        """The move that only time can help."""
        self._write_whole: int | None = None
        """A version whose changed elements were written and could not be proved."""

    async def begin(self, manifest: Manifest, reason: str = "start") -> None:
        """Prove the version that the engine was started with, and enter it in the ledger.

        Raises:
            ReplicaFault: the live tensors are not that version.
        """
        proof = await self._engine.prove()
        objection = proof.objection(manifest.fingerprint, self._mirror.fingerprints)
        if objection:
            raise ReplicaFault(f"the engine did not load version {manifest.version}: {objection}")
        self._state.proved(manifest.version)
        times = Timings(proof_ms=proof.proof_ms, step_to_served_ms=self._ledger.since_us(manifest.trained_at))
        self._ledger.served(AckStatus.ANCHORED, manifest, Applied(0.0, 0.0, 0.0, 0), times, reason)

    def receive(self, record: Said) -> None:
        """Take in what a record says; `advance` acts on it."""
        objection = self._state.observe(record)
        if objection and isinstance(record, Manifest):
            self._refuse(record, objection)
        elif objection:
            logger.warning("left out: %s", objection)

    async def advance(self) -> None:
        """Go where the records so far lead, and say of every other version why not.

        Raises:
            ReplicaFault: the engine cannot be brought to any proved version.
        """
        while (move := self._state.plan()) is not None:
            waiting = move == self._late and not self._patience.may_try(time.monotonic())
            if waiting or not await self._carry_out(move):
                return
        for refusal in self._state.refusals():
            self._refuse(refusal.manifest, refusal.reason)

    async def observe(self, record: Said) -> None:
        """`receive`, then `advance`."""
        self.receive(record)
        await self.advance()

    def close(self) -> None:
        """End the staging threads once their work is done."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._staging.close()

    async def in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work beside the server, in the one staging thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: call(*args, **kwargs))

    async def _carry_out(self, move: Move) -> bool:
        """Whether the state may be asked again: the move ended, well or not; False when only time can help."""
        try:
            prepared = await self.in_thread(self._staging.prepare, move, self._mirror)
        except RefusedAnchorError as error:
            self._state.anchor_refused(error.manifest.version)
            self._refuse(error.manifest, str(error))
        except RefusedDeltaError as error:
            self._state.delta_refused(error.delta)
            self._refuse(error.delta.manifest, str(error))
        except FetchTimeoutError as error:
            self._late = move
            self._patience.failed(time.monotonic())
            self._refuse(move.target, str(error))
            return False
        else:
            self._patience.succeeded()
            await self._serve(move, prepared)
        return True

    async def _serve(self, move: Move, prepared: Prepared) -> None:
        target = move.target
        again = self._write_whole == target.version
        whole = prepared.whole or again
        try:
            if whole:
                directory = await self.in_thread(self._staging.save, self._mirror)
                applied = await self._engine.load(directory, target.version)
            else:
                applied = await self._engine.apply(prepared.changes, target.version)
        except WriteRefusedError as error:
            try:
                await self._take_back(target, prepared, whole)
            finally:
                self._refuse(target, f"the engine could not write it: {error}")
            return
        served_ms = self._ledger.since_us(target.trained_at)
        proof = await self._engine.prove()
        times = Timings(prepared.fetch_ms, prepared.decode_ms, proof.proof_ms, served_ms)
        objection = proof.objection(target.fingerprint, self._mirror.fingerprints)
        if objection:
            try:
                await self._take_back(target, prepared, whole)
            finally:
                self._refuse(target, f"the live tensors could not be proved: {objection}", times, proof.total)
            return
        prepared.draft.keep()
        self._state.proved(target.version)
        status = AckStatus.ANCHORED if again or move.path.anchor is not None else AckStatus.PROVED
        self._ledger.served(status, target, applied, times, move.reason)

    async def _take_back(self, target: Manifest, prepared: Prepared, whole: bool) -> None:
        """Return to the last proved version: by undoing the write, else by writing the whole mirror.

        Raises:
            ReplicaFault: the target was written in full, or the last version is, and is not there.
        """
        await self.in_thread(prepared.draft.revert)
        if whole:
            raise ReplicaFault(f"version {target.version} was written in full and is not there")
        self._write_whole = target.version
        with suppress(WriteRefusedError):  # nothing was written, or a rank cannot take it back: the proof tells
            await self._engine.undo()
        if self._objection_to_mirror(await self._engine.prove()):
            directory = await self.in_thread(self._staging.save, self._mirror)
            await self._engine.load(directory, self._mirror.version)
            objection = self._objection_to_mirror(await self._engine.prove())
            if objection:
                raise ReplicaFault(f"version {self._mirror.version} was written in full and is not there: {objection}")

    def _objection_to_mirror(self, proof: Proof) -> str:
        return proof.objection(self._mirror.fingerprint.hex(), self._mirror.fingerprints)

    def _refuse(self, manifest: Manifest, reason: str, times: Timings | None = None, fingerprint: str = "") -> None:
        logger.warning("version %d refused, version %s stays: %s", manifest.version, self._state.serving, reason)
        self._ledger.refuse(manifest, reason, times or Timings(), fingerprint)
