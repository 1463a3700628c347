"""The replica's extension of vLLM's engine core: an update of all ranks that is atomic for every request, and its
proof.

A plugin of vLLM (entry point `vllm.general_plugins`), which vLLM loads in each of its processes. It

- turns off the packing of linear weights: oneDNN and the AMX kernels keep a private copy, so that a later write to the
  parameter would not change the computation. Experts stay packed, in an order that `cpu_layers` determines;
- adds utility methods to `EngineCore`. A utility call runs strictly between two engine steps. So one call, in which
  every rank stores its elements and which then sets the version, is atomic for every request without a pause of the
  scheduler (engine cores that compute together are still paused, by `engine`). It needs an engine without asynchronous
  scheduling, and checks this;
- rounds the inputs of linear layers and experts on a CPU, if the version asks for it (`activations`);
- with `replica.batch_invariant`, computes linear layers and attention on a CPU in shapes that do not depend on the
  number of tokens;
- adds to each answer that a step ended the experts to which its tokens were sent, if requested;
- updates in two phases: every rank stages, and answers, before any rank stores. If a rank fails to store, all ranks
  undo the update;
- hands the reason to the server if a process of the engine cannot start;
- lets the engine's processes end without a search for garbage.

In the server's process, it corrects two more properties of vLLM 0.32: its search for kernels, and outputs that contain
their versions only at their end.

Utilities return `refused`, with rank and reason, if a rank failed. Arguments and answers are plain values, which vLLM's
message encoding supports: arrays are sent as bytes.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import vllm.model_executor.layers.utils as linear_layers
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.engine import FinishReason
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.multiproc_executor import WorkerProc

from tidemill.consumers.replica.activations import Product, product_of
from tidemill.consumers.replica.environment import FAULT_VARIABLE, INVARIANT_VARIABLE, PARENT_VARIABLE
from tidemill.consumers.replica.linear import tiled_linear, unpacked_linear
from tidemill.consumers.replica.weight_map import UnsupportedModelError

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_WINDOW_S, _KEPT = 5.0, 1024
Answer = dict[str, Any]
"""The answer of a rank: `fault` (empty if there is none), and the values that its method returns."""


class CoreUpdates:
    """State of the replica inside one engine core: the work in progress, and the times between steps."""

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        """Whether the ranks store the expert ids of tokens."""
        self.work = ""
        """The last work of the ranks, and its start."""
        self.work_started = 0.0
        self.before: str | None = None
        """The version before the last update; None if the update cannot be undone."""
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._previous_end: float | None = None

    def record(self, start: float, end: float, busy_after: bool) -> None:
        """Record a step over [start, end) seconds; `busy_after`: whether requests remain to be decoded."""
        begin = start if self._previous_end is None else self._previous_end
        self._gaps.append((end, end - begin))
        self._previous_end = end if busy_after else None

    def step_ms(self, now: float) -> float:
        """Return the median milliseconds between steps over the last seconds; 0 when idle."""
        recent = [gap for end, gap in self._gaps if now - end <= _WINDOW_S]
        return 1e3 * median(recent) if recent else 0.0


def _install(core: EngineCore, tensors: list[Any], version: int, expert_ids: bool = False) -> list[bytes]:
    """Map the checkpoint's tensors on every rank and set the version: the engine holds `version`, unproved.

    With `expert_ids` the ranks store the expert ids of every token. Returns the `ranks.HeldBoxes` of each rank.
    """
    die_with(int(os.environ[PARENT_VARIABLE]))
    if core.batch_queue is not None:
        raise UnsupportedModelError("an atomic update needs an engine without asynchronous scheduling")
    answers = _ranks(core, "tidemill_map", tensors)
    if refused := _refused(answers):
        raise UnsupportedModelError(refused)
    if expert_ids and (refused := _refused(_ranks(core, "tidemill_capture"))):
        raise UnsupportedModelError(refused)
    core.tidemill_updates = CoreUpdates(expert_ids)
    core.set_weight_version(str(version))
    return [answer["boxes"].tobytes() for answer in answers]


def _begin(core: EngineCore, work: str, arguments: list[str]) -> dict[str, Any]:
    """Start work (`RankWeights`: stage, load, prove) in a thread of each rank; the engine continues."""
    updates: CoreUpdates = core.tidemill_updates
    updates.work, updates.work_started = work, time.monotonic()
    if work != "prove":
        # The elements of an earlier update are kept: a refusal from here on has nothing to undo.
        updates.before = None
    return {"refused": _refused(_ranks(core, "tidemill_begin", work, arguments))}


def _answers(core: EngineCore) -> dict[str, Any] | None:
    """Return the result of the last work: None while a rank is working, else `refused` or the ranks' results.

    A staging returns `stage_ms`. A proof returns `prints`, the `ranks.BoxPrints` of each rank, `proof_ms`, and
    `damage`: why there are no prints, or empty.
    """
    updates: CoreUpdates = core.tidemill_updates
    answers = _ranks(core, "tidemill_answer")
    if None in answers:
        return None
    refused = _refused(answers)
    if updates.work != "prove":
        staged = {} if refused else {"stage_ms": max(answer["stage_ms"] for answer in answers)}
        return {"refused": refused, **staged}
    return {
        "refused": "",
        "prints": [] if refused else [answer["prints"].tobytes() for answer in answers],
        "damage": refused,
        "proof_ms": 1e3 * (time.monotonic() - updates.work_started),
    }


def _commit(core: EngineCore, version: int, recompute: bool) -> dict[str, Any] | None:
    """If all ranks have staged, let them write, and set the version. Between steps, on all ranks or on none. With
    `recompute`, also drop the keys and values of running requests.

    Returns:
        None while a rank is still staging; nothing is written then. Otherwise `refused`, or stage_ms and apply_ms (of
        the slowest rank), pause_ms (how long the engine's loop was stopped), decode_step_ms (the engine's own median
        time between steps over the last seconds), requests_in_flight.
    """
    started = time.monotonic()
    updates: CoreUpdates = core.tidemill_updates
    staged = _answers(core)
    if staged is None or staged["refused"]:
        return staged
    whole, before, updates.before = updates.work == "load", core.get_weight_version(), None
    answers = _ranks(core, "tidemill_commit")
    if refused := _refused(answers):
        back = _ranks(core, "tidemill_undo")
        left = [{"fault": "" if one["fault"] else after["fault"]} for one, after in zip(answers, back, strict=True)]
        torn = _refused(left)
        return {"refused": f"{refused}; not taken back: {torn}" if torn else refused}
    updates.before = None if whole else before
    core.set_weight_version(str(version))
    if recompute:
        core.reset_prefix_cache(reset_running_requests=True)
    ended = time.monotonic()
    return {
        **staged,
        "apply_ms": max(answer["apply_ms"] for answer in answers),
        "pause_ms": 1e3 * (ended - started),
        "decode_step_ms": updates.step_ms(started),
        "requests_in_flight": sum(core.scheduler.get_request_counts()),
    }


def _undo(core: EngineCore) -> dict[str, Any]:
    """Undo the last update on every rank, between steps; return the `version` that is served again, unproved."""
    updates: CoreUpdates = core.tidemill_updates
    version, updates.before = updates.before, None
    if version is None:
        return {"refused": "there is no update to undo"}
    refused = _refused(_ranks(core, "tidemill_undo"))
    core.set_weight_version(version)
    return {"refused": refused, "version": int(version)}


def _ranks(core: EngineCore, method: str, *arguments: Any) -> list[Any]:  # noqa: ANN401 - passed to vLLM
    """Call a method on all ranks and return their answers. Raises RuntimeError with the names of ranks that died."""
    try:
        answers: list[Any] = core.collective_rpc(method, args=arguments)
    except RuntimeError as error:
        # Not `is_alive`: if vLLM's own thread calls it at the same time, one of the two gets no answer.
        workers = getattr(core.model_executor, "workers", None) or ()
        dead = [f"rank {rank}" for rank, worker in enumerate(workers) if wait([worker.proc.sentinel], timeout=0)]
        if not dead:
            raise
        raise RuntimeError(f"{', '.join(dead)} of the engine died: {error}") from error
    return answers


def _refused(answers: Iterable[Answer]) -> str:
    """Return the faults of ranks, each with the rank's number; empty if there is none."""
    return "; ".join(f"rank {rank}: {answer['fault']}" for rank, answer in enumerate(answers) if answer["fault"])


def _timed_step(core: EngineCore) -> Any:  # noqa: ANN401 - vLLM's own step result, passed through
    started = time.monotonic()
    result = _vllm_step(core)
    updates: CoreUpdates | None = getattr(core, "tidemill_updates", None)
    if updates is None:
        return result
    if result[1]:
        updates.record(started, time.monotonic(), core.scheduler.has_unfinished_requests())
    outputs = (output for outputs in result[0].values() for output in outputs.outputs) if updates.captures else ()
    ended = {output.request_id: output for output in outputs if output.finish_reason in _WHOLE}
    if ended:
        # Outputs that ended a request contain the experts to which its tokens were sent.
        answers = _ranks(core, "tidemill_expert_ids", list(ended))
        if refused := _refused(answers):
            _log.warning("answers go without expert ids: %s", refused)
        else:
            for request, ids in answers[0]["ids"].items():
                ended[request].routed_experts = ids
    return result


def _with_parent(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a vLLM process so that the process ends with the server."""

    @wraps(start)
    def started(process: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed to vLLM
        die_with(int(os.environ[PARENT_VARIABLE]))
        start(process, *arguments, **options)

    return started


def _telling_why(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a vLLM process so that the server's message, not a traceback, names its error."""

    @wraps(start)
    def started(process: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed to vLLM
        try:
            start(process, *arguments, **options)
        except Exception as error:
            if FAULT_VARIABLE not in os.environ or os.environ.get("TIDEMILL_TRACEBACK"):
                raise
            with suppress(FileExistsError), Path(os.environ[FAULT_VARIABLE]).open("x") as fault:
                fault.write(str(error) or repr(error))
            raise SystemExit(1) from error

    return started


def _without_collection(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap the end of a vLLM process so that it collects no garbage: vLLM does this three times in all that is loaded,
    which takes seconds, and the system frees the memory of the process anyway."""

    @wraps(end)
    def ended(process: Any) -> None:  # noqa: ANN401 - passed to vLLM
        collect = gc.collect
        gc.collect = lambda generation=2: 0
        try:
            end(process)
        finally:
            gc.collect = collect

    return ended


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its `parent` ends, unless it is the parent itself.

    vLLM's engine cores and their coordinator survive a server that is killed with SIGKILL, and a rank that waits in a
    layer for another rank survives its engine core; the kernel's signal needs no other process. Raises SystemExit if
    the parent has ended.
    """
    if parent == os.getpid():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one is gone")


def _plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - vLLM's linear layers
    layer.cpu_linear = product_of(layer, plain_product())


def plain_product() -> Product:
    """Return the product of linear layers and experts of this process's engine."""
    return tiled_linear if fixed_shapes() else unpacked_linear


def fixed_shapes() -> bool:
    """Return whether this process's engine computes in shapes that do not depend on the number of tokens."""
    return os.environ.get(INVARIANT_VARIABLE) == "1" and bool(current_platform.is_cpu())


_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""Finish reasons of complete answers."""
_vllm_step, _coordinated = EngineCore.step, _with_parent(DPCoordinatorProc.__init__)
_worked = _telling_why(WorkerProc.__init__)
_worker_ended = _without_collection(WorkerProc.shutdown)
_METHODS: Mapping[str, Callable[..., Any]] = {
    "__init__": _with_parent(_telling_why(EngineCore.__init__)),
    "tidemill_install": _install,
    "tidemill_begin": _begin,
    "tidemill_answers": _answers,
    "tidemill_commit": _commit,
    "tidemill_undo": _undo,
    "step": _timed_step,
    "shutdown": _without_collection(EngineCore.shutdown),
}


def register() -> None:
    """Install the extension in this process's vLLM, if the process belongs to a replica; may be repeated."""
    if PARENT_VARIABLE in os.environ:
        linear_layers.dispatch_cpu_unquantized_gemm = _plain_linear
        for name, method in _METHODS.items():
            setattr(EngineCore, name, method)
        DPCoordinatorProc.__init__, WorkerProc.__init__ = _coordinated, _worked
        WorkerProc.shutdown = _worker_ended
        if fixed_shapes():
            register_backend(AttentionBackendEnum.CPU_ATTN, "tidemill.consumers.replica.cpu_layers.TokenwiseAttention")


def limit_kernel_search_to_vllm() -> None:
    """Let vLLM search for its kernels only in its own modules; once per process, before an engine is started.

    At start vLLM searches the namespaces of all imported modules, thousands, and reads `vars()` of every value. The
    search would fail at llvmlite's library handle, which numba imports: it returns a function for any attribute, also
    for `__dict__`.
    """
    # Imported here, and below, because only the server needs it.
    import vllm.triton_utils.dispatcher as dispatcher

    search = dispatcher._rebind_kernels
    if hasattr(search, "__wrapped__"):
        return

    @wraps(search)
    def within_vllm(*arguments: Any) -> Any:  # noqa: ANN401 - passed through to vLLM
        own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
        dispatcher.sys = SimpleNamespace(modules=own)
        try:
            return search(*arguments)
        finally:
            dispatcher.sys = sys

    dispatcher._rebind_kernels = within_vllm


def tell_spans_before_the_end() -> None:
    """Add the weight versions of the tokens so far to unfinished outputs; once per process.

    A client whose connection breaks must know them too, but vLLM adds them only when a request is finished.
    """
    from vllm.v1.engine.output_processor import RequestState

    made = RequestState._new_completion_output
    if hasattr(made, "__wrapped__"):
        return

    @wraps(made)
    def with_spans(state: RequestState, *arguments: Any) -> Any:  # noqa: ANN401 - passed through to vLLM
        output = made(state, *arguments)
        if output.weight_versions is None:
            output.weight_versions = state._weight_version_spans()
        return output

    RequestState._new_completion_output = with_spans
