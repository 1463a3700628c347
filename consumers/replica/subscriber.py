"""Follows the weight versions of a branch: fetch and check while tokens flow, apply between two steps, prove, say so.

The decisions are `state.ReplicaState`'s; this shell carries them out and keeps these true:

- the engine is touched only by a version that was checked on the CPU first;
- the mirror always holds the last proved version, so that the engine can be brought back to it whatever happens;
- a version is acknowledged as proved only after the live tensors' fingerprints were read back, and every version that
  is not served is acknowledged as refused, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from tidemill.consumers.replica.fetch import FetchTimeoutError
from tidemill.consumers.replica.ledger import Ledger, Timings
from tidemill.consumers.replica.live_weights import ElementChange
from tidemill.consumers.replica.mirror import Mirror
from tidemill.consumers.replica.proof import Applied, Proof
from tidemill.consumers.replica.staging import Prepared, RefusedAnchorError, RefusedDeltaError, Staging
from tidemill.consumers.replica.state import Apply, Refuse, ReplicaState, Resync
from tidemill.schemas.records import AckStatus, Manifest

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class ReplicaFault(RuntimeError):
    """The engine cannot be brought to a proved version: the process must be replaced."""


class Engine(Protocol):
    """The part of `ReplicaEngine` that the subscriber drives."""

    async def apply(self, changes: Sequence[ElementChange], version: int) -> Applied:
        """Write changed elements and serve `version`."""

    async def load(self, directory: Path, version: int) -> Applied:
        """Overwrite everything from a directory and serve `version`."""

    async def undo(self) -> None:
        """Take the last `apply` back."""

    async def prove(self) -> Proof:
        """Fingerprint the live tensors."""


class Subscriber:
    """Carries out the plans for one engine. One manifest at a time; not safe to call concurrently."""

    def __init__(self, engine: Engine, state: ReplicaState, mirror: Mirror, staging: Staging, ledger: Ledger) -> None:
        self._engine, self._state, self._mirror = engine, state, mirror
        self._staging, self._ledger = staging, ledger
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-staging")

    async def begin(self, manifest: Manifest) -> None:
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
        self._ledger.served(AckStatus.ANCHORED, manifest, Applied(0.0, 0.0, 0.0, 0), times, "start")

    async def observe(self, manifest: Manifest) -> None:
        """Do what one manifest asks for."""
        plan = self._state.observe(manifest)
        match plan:
            case Apply():
                await self._apply(plan.manifest)
            case Resync():
                await self._resync(plan)
            case Refuse():
                self._refuse(plan.manifest, plan.reason)
            case _:
                logger.debug("version %d: %s", manifest.version, plan.reason)

    async def retry(self) -> None:
        """Try to reach a version that was missed, when there is a way."""
        plan = self._state.catch_up()
        if plan is not None:
            await self._resync(plan)

    def close(self) -> None:
        """End the staging thread once its work is done."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work beside the server, in the one staging thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, lambda: call(*args, **kwargs))

    async def _apply(self, manifest: Manifest) -> None:
        try:
            prepared = await self.in_thread(self._staging.prepare, manifest, self._mirror)
        except RefusedDeltaError as error:
            self._state.delta_refused(manifest.version)
            self._refuse(manifest, str(error))
            await self.retry()
            return
        except FetchTimeoutError as error:
            self._refuse(manifest, str(error))
            return
        await self._serve(manifest, prepared)

    async def _serve(self, manifest: Manifest, prepared: Prepared) -> None:
        applied = await self._engine.apply(prepared.staged.changes, manifest.version)
        served_ms = self._ledger.since_us(manifest.trained_at)
        proof = await self._engine.prove()
        times = Timings(prepared.fetch_ms, prepared.decode_ms, proof.proof_ms, served_ms)
        expected = {tensor.name: tensor.fingerprint for tensor in manifest.tensors}
        objection = proof.objection(manifest.fingerprint, expected)
        if objection:
            await self._take_back(manifest, objection, times, proof.total)
            return
        await self.in_thread(self._mirror.commit, prepared.staged)
        self._state.proved(manifest.version)
        self._ledger.served(AckStatus.PROVED, manifest, applied, times)

    async def _take_back(self, manifest: Manifest, objection: str, times: Timings, fingerprint: str) -> None:
        """Return to the last proved version: by undoing the delta, else by writing the whole mirror."""
        await self._engine.undo()
        if self._objection_to_mirror(await self._engine.prove()):
            await self._write_mirror()
        self._refuse(manifest, f"the live tensors could not be proved: {objection}", times, fingerprint)
        await self.retry()

    async def _write_mirror(self) -> Applied:
        directory = await self.in_thread(self._staging.save, self._mirror)
        applied = await self._engine.load(directory, self._mirror.version)
        objection = self._objection_to_mirror(await self._engine.prove())
        if objection:
            raise ReplicaFault(f"version {self._mirror.version} was written in full and is not there: {objection}")
        return applied

    def _objection_to_mirror(self, proof: Proof) -> str:
        return proof.objection(self._mirror.fingerprint.hex(), self._mirror.fingerprints)

    async def _resync(self, plan: Resync) -> None:
        attempt: Resync | None = plan
        while attempt is not None and not await self._try_resync(attempt):
            attempt = self._state.catch_up()

    async def _try_resync(self, plan: Resync) -> bool:
        """Whether nothing is left to try: the plan succeeded, or only time can help."""
        try:
            mirror, _ = await self.in_thread(self._staging.build, plan)
        except RefusedAnchorError as error:
            self._state.anchor_refused(error.manifest.version)
            self._refuse(error.manifest, str(error))
            return False
        except RefusedDeltaError as error:
            self._state.delta_refused(error.manifest.version)
            self._refuse(error.manifest, str(error))
            return False
        except FetchTimeoutError as error:
            self._refuse(plan.target, str(error))
            return True
        await self._replace(mirror, plan)
        return True

    async def _replace(self, mirror: Mirror, plan: Resync) -> None:
        self._mirror = mirror
        applied = await self._write_mirror()
        self._state.proved(plan.target.version)
        times = Timings(step_to_served_ms=self._ledger.since_us(plan.target.trained_at))
        self._ledger.served(AckStatus.ANCHORED, plan.target, applied, times, plan.reason)

    def _refuse(self, manifest: Manifest, reason: str, times: Timings | None = None, fingerprint: str = "") -> None:
        logger.warning("version %d refused, version %s stays: %s", manifest.version, self._state.serving, reason)
        self._ledger.refuse(manifest, reason, times or Timings(), fingerprint)
