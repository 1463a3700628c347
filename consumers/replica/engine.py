"""The replica's engine client: vLLM's `AsyncLLM` with versioned weights.

Keeps true:

- `version` is the version that the engine core serves, and changes only when the core has confirmed it;
- every request is salted with the version at its admission, so that it never reuses a prefix that older weights
  computed: vLLM's prefix cache outlives a weight change. It may finish under a newer version; its salt is then never
  given to a new request.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from tidemill.consumers.replica.compatibility import hide_llvmlite_from_kernel_search, tell_spans_before_the_end
from tidemill.consumers.replica.config import KvPolicy
from tidemill.consumers.replica.proof import Applied, Proof
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.mirror import ElementChange


class ReplicaEngine(AsyncLLM):  # type: ignore[misc]  # vLLM is read without its types
    """`AsyncLLM` whose weights have a version. Build it with `start`."""

    version: int
    epoch: int = 0
    """Times that the weights were written: a version that is served again after a roll-back has another salt, because
    requests that were admitted under the first one went on under other weights."""
    kv_policy: KvPolicy

    @classmethod
    async def start(
        cls, arguments: Namespace, tensors: Sequence[TensorSpec], version: int, kv_policy: KvPolicy
    ) -> ReplicaEngine:
        """Load the checkpoint that `arguments` name, map its tensors and call it `version`.

        Raises:
            RuntimeError: the engine did not start, or holds the model in a way that cannot be mapped.
        """
        engine = cls._forked(AsyncEngineArgs.from_cli_args(arguments))
        engine.version, engine.kv_policy = version, kv_policy
        specs = [(spec.name, list(spec.shape), spec.dtype) for spec in tensors]
        try:
            await engine._call("tidemill_install", specs, version)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    @classmethod
    def _forked(cls, arguments: AsyncEngineArgs) -> ReplicaEngine:
        config = arguments.create_engine_config()
        hide_llvmlite_from_kernel_search()
        tell_spans_before_the_end()
        # vLLM chooses to spawn on a CPU, which imports everything a second time; a fork is safe here because nothing
        # has used a compute thread or opened a client of the log yet.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        engine: ReplicaEngine = cls.from_vllm_config(config, disable_log_stats=arguments.disable_log_stats)
        return engine

    async def _call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 - vLLM's untyped utility calls
        return await self.engine_core.call_utility_async(method, *arguments)

    async def apply(self, changes: Sequence[ElementChange], version: int) -> Applied:
        """Write the changed elements and serve `version` from the next engine step on. Raises on a refused write.

        Everything but the stores happens while tokens flow.
        """
        packed = await asyncio.to_thread(_packed, changes)
        return await self._commit(await self._call("tidemill_stage", *packed), version)

    async def load(self, directory: Path, version: int) -> Applied:
        """Overwrite every tensor from a checkpoint directory, read while tokens flow, and serve `version`."""
        return await self._commit(await self._call("tidemill_stage_checkpoint", str(directory)), version)

    async def _commit(self, staged: Mapping[str, float], version: int) -> Applied:
        report = await self._call("tidemill_commit", version, self._recompute)
        self.version, self.epoch = version, self.epoch + 1
        return _applied({**staged, **report})

    async def undo(self) -> None:
        """Take the last `apply` back."""
        self.version, self.epoch = int(await self._call("tidemill_undo")), self.epoch + 1

    async def prove(self) -> Proof:
        """Fingerprint the live tensors while tokens flow. Nothing may be applied meanwhile."""
        report = await self._call("tidemill_prove")
        return Proof(report["total"], report["tensors"], report["damage"], report["proof_ms"])

    async def abort_all(self) -> int:
        """End every request in flight with what was sampled so far, as aborted. Returns how many there were."""
        requests = list(self.output_processor.request_states)
        await self.abort(requests, internal=True)
        return len(requests)

    @property
    def _recompute(self) -> bool:
        return self.kv_policy is KvPolicy.RECOMPUTE

    def generate(
        self,
        prompt: Any,  # noqa: ANN401 - vLLM's own types
        sampling_params: SamplingParams,
        *rest: Any,  # noqa: ANN401 - vLLM's own types
        **options: Any,  # noqa: ANN401 - vLLM's own types
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's `generate`, salted with the version served now. Raises VLLMValidationError for a seeded request."""
        if sampling_params.seed is not None:
            # On a CPU a seeded request that is prefilled in two pieces ends the engine core (vLLM 0.32).
            raise VLLMValidationError("this replica takes no per-request seeds: leave `seed` out", parameter="seed")
        salted = {**prompt, "cache_salt": f"version-{self.version}-{self.epoch}"}
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(salted, sampling_params, *rest, **options)
        return outputs


def _applied(report: Mapping[str, float]) -> Applied:
    times = (report["apply_ms"], report["pause_ms"], report["decode_step_ms"])
    return Applied(*times, int(report["requests_in_flight"]), report["stage_ms"])


def _packed(changes: Sequence[ElementChange]) -> tuple[list[str], list[int], bytes, bytes]:
    indices = b"".join(change.indices.astype("<i8", copy=False).tobytes() for change in changes)
    bits = b"".join(change.bits.tobytes() for change in changes)
    return [change.name for change in changes], [len(change.indices) for change in changes], indices, bits
