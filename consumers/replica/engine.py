"""The replica's engine client: vLLM's `AsyncLLM` with versioned weights.

Invariants:

- `version` is the version that every engine core serves, and changes only after all have confirmed it;
- a delta is passed to the ranks once, and no rank writes it before all have staged it;
- engine cores that compute one forward pass together (a mixture of experts with `replica.data_parallel`) are paused
  while the weights are written, so that no pass sees two versions;
- a version is proved by the sum over the ranks of all engine cores;
- every request is salted with the version at its admission, so that it never reuses a prefix that older weights
  computed: vLLM's prefix cache survives a weight change. A request may finish under a newer version; no new request
  gets its salt then.
"""

from __future__ import annotations

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from tidemill.consumers.replica.config import KvPolicy
from tidemill.consumers.replica.environment import ACTIVATIONS_VARIABLE, FAULT_VARIABLE
from tidemill.consumers.replica.ledger import Applied, Proof, WriteRefusedError
from tidemill.consumers.replica.plugin import limit_kernel_search_to_vllm, register, tell_spans_before_the_end
from tidemill.consumers.replica.ranks import RankCoverage, handed_over, objections
from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.kernels.quantise import ROW_FORMATS
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.mirror import ElementChange
from tidemill.schemas.shutdown import ended_by_signals

_FIRST_LOOK_S, _LONGEST_WAIT_S = 0.001, 0.02
_DEATH_CHECK_S = 1.0
_PROBED, _ANSWERED = 256, 4
"""Tokens of the longest context with which `batch_invariant` is checked, and the number of them that are sampled."""
_TIMES = ("apply_ms", "pause_ms", "decode_step_ms", "stage_ms")


class ReplicaEngine(AsyncLLM):  # type: ignore[misc]  # vLLM is read without its types
    """`AsyncLLM` with versioned weights. Create it with `start`."""

    version: int
    epoch: int = 0
    """Number of weight writes, including those that were undone: a version that is served again after a roll-back has
    another salt, because requests that were admitted under it at first have continued under other weights."""
    kv_policy: KvPolicy
    holdings: RankCoverage
    """The elements that each rank holds, engine core by engine core."""

    @classmethod
    async def start(
        cls,
        arguments: Namespace,
        tensors: Sequence[TensorSpec],
        version: int,
        kv_policy: KvPolicy,
        expert_ids: bool = False,
        activations: str = "",
    ) -> ReplicaEngine:
        """Load the checkpoint that `arguments` name, map its tensors and call it `version`.

        Args:
            expert_ids: return the expert ids of its tokens with each answer; on a GPU an argument of vLLM does it.
            activations: the manifest's `serving_activations`.

        Raises:
            SystemExit: SIGINT or SIGTERM arrived while the engine started.
            RuntimeError: the engine did not start, with its reason, or its form of the model cannot be mapped.
        """
        require_rounding(activations)
        options = AsyncEngineArgs.from_cli_args(arguments)
        config = options.create_engine_config()
        if config.model_config.quantization:
            raise UnsupportedModelError(
                f"the model is quantized ({config.model_config.quantization}): its runtime weights cannot be written "
                "bit by bit; serve an unquantized checkpoint"
            )
        parallel = config.parallel_config
        if parallel.data_parallel_size > 1 and config.model_config.is_moe and not parallel.enable_expert_parallel:
            raise UnsupportedModelError(
                "replica.data_parallel of a mixture of experts needs replica.expert_parallel: the engines share the "
                "experts"
            )
        limit_kernel_search_to_vllm()
        tell_spans_before_the_end()
        # Forked processes inherit the plugin from here; spawned processes load it by its entry point.
        register()
        # On a CPU vLLM would spawn, which imports everything a second time; a fork is safe here because no compute
        # thread has run and no client of the log is open yet.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.environ[ACTIVATIONS_VARIABLE] = activations
        engine: ReplicaEngine
        with TemporaryDirectory(prefix="tidemill-engine-") as folder:
            fault = Path(folder) / "fault"
            os.environ[FAULT_VARIABLE] = str(fault)
            try:
                with ended_by_signals():
                    engine = cls.from_vllm_config(config, disable_log_stats=options.disable_log_stats)
            except RuntimeError as error:
                reason = (fault.read_text() if fault.is_file() else str(error)).rstrip(". ")
                raise RuntimeError(
                    f"vLLM's engine cannot start: {reason}. Change the model, or vLLM's arguments in [replica]: for "
                    "example kv_cache_mb (the memory of the KV cache), max_model_len or vllm_args"
                ) from error
            finally:
                del os.environ[FAULT_VARIABLE]
        engine.version, engine.kv_policy = version, kv_policy
        try:
            await engine.map(tensors, expert_ids and current_platform.is_cpu())
        except BaseException:
            engine.shutdown()
            raise
        return engine

    async def map(self, tensors: Sequence[TensorSpec], expert_ids: bool = False) -> None:
        """Map these tensors on every rank: the engine holds `version`, unproved.

        Raises RuntimeError or UnsupportedModelError if they cannot be mapped.
        """
        specs = [(spec.name, list(spec.shape), spec.dtype) for spec in tensors]
        try:
            cores = await self._cores("tidemill_install", specs, self.version, expert_ids)
        except Exception as error:
            # vLLM reports an error of a method as a plain Exception with its text.
            if type(error) is not Exception:
                raise
            reason = str(error).removeprefix("Call to tidemill_install method failed: ")
            raise UnsupportedModelError(f"this replica cannot serve the model: {reason}") from error
        if not self._together:
            for boxes in cores:
                RankCoverage(tensors, boxes)  # each engine is whole by itself
        self.holdings = RankCoverage(tensors, [held for boxes in cores for held in boxes])

    @property
    def _together(self) -> bool:
        """Whether the engine cores compute each forward pass together."""
        return len(self.engine_core.core_engines) > 1 and bool(self.model_config.is_moe)

    async def _cores(self, method: str, *arguments: Any) -> list[Any]:  # noqa: ANN401 - vLLM's untyped utility calls
        """Return the answers of all engine cores. Raises vLLM's EngineDeadError if one has died."""
        asked: asyncio.Future[list[Any]] = asyncio.ensure_future(
            self.engine_core.call_utility_all_async(method, *arguments)
        )
        try:
            # vLLM never ends a call that an engine core accepted before it died.
            while not (await asyncio.wait({asked}, timeout=_DEATH_CHECK_S))[0]:
                if self.errored:
                    raise self.dead_error
            return asked.result()
        finally:
            asked.cancel()

    async def _done(self, method: str, *arguments: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - vLLM's utility calls
        """Wait until the work in progress is finished, and return the answers of all engine cores."""
        wait_s = _FIRST_LOOK_S
        while None in (answers := await self._cores(method, *arguments)):
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)
        return _accepted(answers)

    async def require_invariance(self) -> None:
        """Raise UnsupportedModelError if a prompt has other logprobs in a batch with other prompts than alone."""
        words = self.model_config.get_vocab_size()
        length = min(self.model_config.max_model_len, _PROBED) - _ANSWERED
        prompt = [7 * place % min(words, 997) for place in range(length)]
        alone = await self._logprobs("probe alone", prompt)
        others = [self._logprobs(f"probe {place}", prompt[place:]) for place in range(1, length, 11)]
        beside, *_ = await asyncio.gather(self._logprobs("probe beside", prompt), *others)
        if beside != alone:
            raise UnsupportedModelError(
                "numerics.batch_invariant: this engine gives a prompt other logprobs beside other prompts than by "
                "itself; set it to false"
            )

    async def _logprobs(self, request: str, prompt: list[int]) -> Hashable:
        """Return a short greedy answer to a prompt, and the logprobs of all tokens of both."""
        asked = SamplingParams(
            temperature=0, max_tokens=_ANSWERED, ignore_eos=True, logprobs=0, prompt_logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        outputs = [output async for output in self.generate({"prompt_token_ids": prompt}, asked, request)]
        (answer,) = outputs[-1].outputs
        entries = [*(outputs[-1].prompt_logprobs or [])[1:], *(answer.logprobs or [])]
        return tuple(answer.token_ids), tuple(tuple(one.logprob for one in entry.values()) for entry in entries)

    async def apply(self, changes: Sequence[ElementChange], version: int) -> Applied:
        """Write the changed elements and serve `version` from the next engine step on.

        Everything except the stores happens while the engine samples.

        Raises:
            WriteRefusedError: a rank could not write the changes; unless the message says otherwise, none were written.
        """
        with ExitStack() as stack:
            handed = await asyncio.to_thread(stack.enter_context, handed_over(changes))
            return await self._write(version, "stage", *handed)

    async def load(self, directory: Path, version: int) -> Applied:
        """Overwrite every tensor from a checkpoint directory, read while the engine samples, and serve `version`.

        Raises WriteRefusedError, as `apply`.
        """
        return await self._write(version, "load", str(directory))

    async def _write(self, version: int, work: str, *arguments: str) -> Applied:
        _accepted(await self._cores("tidemill_begin", work, arguments))
        if len(self.engine_core.core_engines) > 1:
            # No engine writes before the ranks of all have staged. A single engine checks this in its commit.
            await self._done("tidemill_answers")
        started = time.monotonic()
        async with self._paused():
            try:
                reports = await self._done("tidemill_commit", version, self.kv_policy is KvPolicy.RECOMPUTE)
            except WriteRefusedError:
                # An engine core that has written undoes it; one that has refused has nothing to undo. Prefixes that it
                # computed in between have the present salt: it is not used again.
                await self._cores("tidemill_undo")
                self.epoch += 1
                raise
        self.version, self.epoch = version, self.epoch + 1
        slowest = {name: max(report[name] for report in reports) for name in _TIMES}
        if self._together:
            slowest["pause_ms"] = 1e3 * (time.monotonic() - started)
        return Applied(**slowest, requests_in_flight=sum(report["requests_in_flight"] for report in reports))

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause computation if the engine cores compute together; otherwise they continue."""
        if not self._together:
            yield
            return
        # vLLM's cores agree on the step after which they stop. Requests in flight and new requests wait.
        try:
            await self._cores("pause_scheduler", "keep", False)
            yield
        finally:
            await self._cores("resume_scheduler")

    async def undo(self) -> None:
        """Undo the last `apply`. Raises WriteRefusedError if there is none, or a rank cannot undo it."""
        async with self._paused():
            answers = _accepted(await self._cores("tidemill_undo"))
        self.version, self.epoch = answers[0]["version"], self.epoch + 1

    async def prove(self) -> Proof:
        """Fingerprint the live tensors of every rank while the engine samples. Nothing may be applied meanwhile."""
        _accepted(await self._cores("tidemill_begin", "prove", []))
        return self.holdings.proof(await self._done("tidemill_answers"))

    async def abort_all(self) -> int:
        """Abort every request in flight, with the tokens sampled so far. Returns the number of requests."""
        requests = list(self.output_processor.request_states)
        await self.abort(requests, internal=True)
        return len(requests)

    def generate(
        self,
        prompt: Any,  # noqa: ANN401 - vLLM's own types
        sampling_params: SamplingParams,
        *rest: Any,  # noqa: ANN401 - vLLM's own types
        **options: Any,  # noqa: ANN401 - vLLM's own types
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run vLLM's `generate`, salted with the version served now, in addition to the request's own salt.

        Raises VLLMValidationError for a seeded request on a CPU.
        """
        if sampling_params.seed is not None and current_platform.is_cpu():
            # On a CPU a seeded request that is prefilled in two pieces crashes the engine core (vLLM 0.32).
            raise VLLMValidationError("this replica takes no per-request seeds: leave `seed` out", parameter="seed")
        salt = f"version-{self.version}-{self.epoch}-{prompt.get('cache_salt') or ''}"
        salted = {**prompt, "cache_salt": salt}
        outputs: AsyncGenerator[RequestOutput, None] = super().generate(salted, sampling_params, *rest, **options)
        return outputs


def require_rounding(activations: str) -> None:
    """Raise UnsupportedModelError unless an engine on this device can round its inputs to a format; empty: none."""
    if activations and activations not in ROW_FORMATS:
        raise UnsupportedModelError(
            f"the version has serving_activations {activations}, and this replica knows {', '.join(ROW_FORMATS)}"
        )
    if activations and not current_platform.is_cpu():
        raise UnsupportedModelError(
            f"the version has serving_activations {activations}, which only a replica on a CPU can compute: serve it "
            "on one, or train a new run with trainer.serving_activations none"
        )


def _accepted(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if refused := objections(answers, "refused"):
        raise WriteRefusedError("; ".join(refused))
    return answers
