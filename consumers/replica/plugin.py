"""The replica's extension of vLLM's engine core: an update of all ranks that is atomic for every request, and its
proof.

A plugin of vLLM (entry point `vllm.general_plugins`), which vLLM loads in each of its processes. It

- turns off the packing of linear weights: oneDNN and the AMX kernels keep a private copy, so that a later write to the
  parameter would change nothing that is computed. Experts stay packed, in an order that `cpu_layers` learns;
- adds utility methods to `EngineCore`. A utility call runs strictly between two engine steps, so that one call that
  has every rank store its elements, and then stamps the version, is atomic for every request without pausing the
  scheduler (engine cores that compute together are paused all the same, by `engine`). It needs an engine without
  asynchronous scheduling, which it checks;
- with `replica.batch_invariant`, computes linear layers and attention on a CPU in shapes that do not depend on how many
  tokens there are;
- has each answer that a step ended say which experts its tokens were sent to, where that is asked for;
- updates in two phases: every rank stages, and answers, before any of them stores. Where a rank fails to store, all
  take the update back.

In the server's process, two more ways in which vLLM 0.32 is not as a replica needs it are mended: its search for
kernels, and outputs that say their versions only at their end.

Utilities answer `refused` where a rank could not do as it was asked, with the rank and the reason. Arguments and
answers are plain values, which vLLM's message encoding carries: arrays go as bytes.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from multiprocessing.connection import wait
from statistics import median
from typing import Any

import vllm.model_executor.layers.utils as linear_layers
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.engine import FinishReason
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCore

from tidemill.consumers.replica.environment import INVARIANT_VARIABLE, PARENT_VARIABLE
from tidemill.consumers.replica.linear import tiled_linear, unpacked_linear
from tidemill.consumers.replica.weight_map import UnsupportedModelError

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_WINDOW_S, _KEPT = 5.0, 1024
Answer = dict[str, Any]
"""The answer of a rank: `fault` (empty if there is none), and the values that its method returns."""


class CoreUpdates:
    """State of the replica inside one engine core: what is under way, and the time between its steps."""

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        """Whether the ranks keep the expert ids of tokens."""
        self.begun = ""
        """The work that the ranks were given last, and when."""
        self.begun_at = 0.0
        self.before: str | None = None
        """The version before the last update; None where it cannot be taken back."""
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._previous_end: float | None = None

    def record(self, start: float, end: float, busy_after: bool) -> None:
        """Note a step over [start, end) seconds; `busy_after` tells whether requests remain to be decoded."""
        begin = start if self._previous_end is None else self._previous_end
        self._gaps.append((end, end - begin))
        self._previous_end = end if busy_after else None

    def step_ms(self, now: float) -> float:
        """Median milliseconds between steps over the last seconds; 0 when idle."""
        recent = [gap for end, gap in self._gaps if now - end <= _WINDOW_S]
        return 1e3 * median(recent) if recent else 0.0


def _install(core: EngineCore, tensors: list[Any], version: int, expert_ids: bool = False) -> list[bytes]:
    """Map the checkpoint's tensors on every rank and take over: the engine holds `version`, unproved.

    With `expert_ids` the ranks keep those of every token. Returns what each rank holds (`ranks.HeldBoxes`).
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
    """Begin work (`extension.RankWeights`: stage, load or prove) in a thread of each rank, while the engine goes on."""
    updates: CoreUpdates = core.tidemill_updates
    updates.begun, updates.begun_at = work, time.monotonic()
    if work != "prove":
        # What an earlier update wrote stays: a refusal from here on has nothing to take back.
        updates.before = None
    return {"refused": _refused(_ranks(core, "tidemill_begin", work, arguments))}


def _answers(core: EngineCore) -> dict[str, Any] | None:
    """The result of the work that was begun: None while a rank works on it, else `refused` or the ranks' findings.

    A staging says `stage_ms`. A proof says `prints`, the `ranks.BoxPrints` of each rank, `proof_ms`, and `damage`:
    why there are none, else empty.
    """
    updates: CoreUpdates = core.tidemill_updates
    answers = _ranks(core, "tidemill_answer")
    if None in answers:
        return None
    refused = _refused(answers)
    if updates.begun != "prove":
        staged = {} if refused else {"stage_ms": max(answer["stage_ms"] for answer in answers)}
        return {"refused": refused, **staged}
    return {
        "refused": "",
        "prints": [] if refused else [answer["prints"].tobytes() for answer in answers],
        "damage": refused,
        "proof_ms": 1e3 * (time.monotonic() - updates.begun_at),
    }


def _commit(core: EngineCore, version: int, recompute: bool) -> dict[str, Any] | None:
    """Once all ranks have staged, have them write and stamp the version. Between steps, on all ranks or on none.

    Args:
        core: the engine core.
        version: the version that the engine then serves.
        recompute: drop the keys and values of running requests too.

    Returns:
        None while a rank is still staging, so that nothing was written. Else `refused`, or stage_ms and apply_ms (of
        the slowest rank), pause_ms (how long the engine's loop was held), decode_step_ms (the engine's own median time
        between steps over the last seconds), requests_in_flight.
    """
    begun = time.monotonic()
    updates: CoreUpdates = core.tidemill_updates
    staged = _answers(core)
    if staged is None or staged["refused"]:
        return staged
    whole, before, updates.before = updates.begun == "load", core.get_weight_version(), None
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
        "pause_ms": 1e3 * (ended - begun),
        "decode_step_ms": updates.step_ms(begun),
        "requests_in_flight": sum(core.scheduler.get_request_counts()),
    }


def _undo(core: EngineCore) -> dict[str, Any]:
    """Take the last update back on every rank, between steps; says the `version` that is served again, unproved."""
    updates: CoreUpdates = core.tidemill_updates
    version, updates.before = updates.before, None
    if version is None:
        return {"refused": "there is no update to undo"}
    refused = _refused(_ranks(core, "tidemill_undo"))
    core.set_weight_version(version)
    return {"refused": refused, "version": int(version)}


def _ranks(core: EngineCore, method: str, *arguments: Any) -> list[Any]:  # noqa: ANN401 - passed to vLLM
    """The answers of all ranks. Raises RuntimeError, naming them, if ranks have died."""
    try:
        answers: list[Any] = core.collective_rpc(method, args=arguments)
    except RuntimeError as error:
        # Not `is_alive`: vLLM's own thread may be asking the same, and then one of the two is told nothing.
        workers = getattr(core.model_executor, "workers", None) or ()
        dead = [f"rank {rank}" for rank, worker in enumerate(workers) if wait([worker.proc.sentinel], timeout=0)]
        if not dead:
            raise
        raise RuntimeError(f"{', '.join(dead)} of the engine died: {error}") from error
    return answers


def _refused(answers: Iterable[Answer]) -> str:
    """The faults of the ranks that have one, with their ranks; empty for none."""
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
        # Outputs that ended a request say the experts that its tokens were sent to.
        answers = _ranks(core, "tidemill_expert_ids", list(ended))
        if refused := _refused(answers):
            _log.warning("answers go without expert ids: %s", refused)
        else:
            for request, ids in answers[0]["ids"].items():
                ended[request].routed_experts = ids
    return result


def _with_parent(start: Callable[..., None]) -> Callable[..., None]:
    """A constructor of one of vLLM's processes that first has the process end with the server."""

    @wraps(start)
    def started(process: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed to vLLM
        die_with(int(os.environ[PARENT_VARIABLE]))
        start(process, *arguments, **options)

    return started


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its `parent` ends, unless it is the parent itself.

    vLLM's engine cores, and their coordinator, outlive a server that is killed with SIGKILL, and a rank that waits in a
    layer for another rank outlives its engine core; the kernel's signal depends on nobody. Raises SystemExit where the
    parent has ended.
    """
    if parent == os.getpid():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one is gone")


def _plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - vLLM's linear layers
    layer.cpu_linear = tiled_linear if fixed_shapes() else unpacked_linear


def fixed_shapes() -> bool:
    """Whether this process's engine computes in shapes that do not depend on the number of tokens."""
    return os.environ.get(INVARIANT_VARIABLE) == "1" and bool(current_platform.is_cpu())


_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)
"""How answers end that were not given up."""
_vllm_step, _coordinated = EngineCore.step, _with_parent(DPCoordinatorProc.__init__)
_METHODS: Mapping[str, Callable[..., Any]] = {
    "__init__": _with_parent(EngineCore.__init__),
    "tidemill_install": _install,
    "tidemill_begin": _begin,
    "tidemill_answers": _answers,
    "tidemill_commit": _commit,
    "tidemill_undo": _undo,
    "step": _timed_step,
}


def register() -> None:
    """Teach this process's vLLM; any number of times. A vLLM that is not a replica's is left as it is."""
    if PARENT_VARIABLE in os.environ:
        linear_layers.dispatch_cpu_unquantized_gemm = _plain_linear
        for name, method in _METHODS.items():
            setattr(EngineCore, name, method)
        DPCoordinatorProc.__init__ = _coordinated
        if fixed_shapes():
            register_backend(AttentionBackendEnum.CPU_ATTN, "tidemill.consumers.replica.cpu_layers.TokenwiseAttention")


def hide_llvmlite_from_kernel_search() -> None:
    """Make vLLM's kernel search pass over llvmlite; once a process, before an engine is started.

    At start vLLM looks for kernels in the namespaces of all imported modules and reads `vars()` of every value;
    llvmlite's library handle, which numba imports, answers any attribute with a function, `__dict__` included, and the
    search fails. No kernel of vLLM can be in llvmlite's modules.
    """
    # Imported here, and below, because only the server needs it.
    import vllm.triton_utils.dispatcher as dispatcher

    search = dispatcher._rebind_kernels
    if hasattr(search, "__wrapped__"):
        return

    @wraps(search)
    def without_llvmlite(*arguments: Any) -> Any:  # noqa: ANN401 - passed through to vLLM
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "llvmlite"}
        for name in hidden:
            del sys.modules[name]
        try:
            return search(*arguments)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = without_llvmlite


def tell_spans_before_the_end() -> None:
    """Make unfinished outputs carry the weight versions of their tokens so far; once a process.

    A client that is cut off must know them too, and vLLM says them only when a request is finished.
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
