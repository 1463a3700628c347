"""What the replica adds to vLLM's engine core process: unpacked weights, an atomic update, a proof of what is served.

vLLM imports this module (as `worker_extension_cls`) in the process of its engine core, before the model is loaded. It

- turns off the packing of linear weights: oneDNN and the AMX kernels keep a private copy, so that a later write to the
  parameter would change nothing that is computed. Experts stay packed, in an order that `experts` learns;
- adds utility methods to `EngineCore`. A utility call runs strictly between two engine steps, so that writing the
  elements and stamping the version in ONE call is atomic for every request without pausing the scheduler: the route
  through `pause_generation` does the same with four calls and a fixed 20 ms sleep. It needs the worker in the engine
  core's own process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) and no asynchronous scheduling, both of which it checks;
- stages a version and proves it in threads while tokens flow. Between two steps nothing happens but the stores: what
  goes where, and what an undo would write, is worked out before.

Arguments are plain lists and bytes, which vLLM's message encoding carries without copies of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.model_executor.layers.utils as linear_layers
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tidemill.consumers.replica.environment import PARENT_VARIABLE
from tidemill.consumers.replica.experts import orders_of_experts
from tidemill.consumers.replica.linear import unpacked_linear
from tidemill.consumers.replica.live_weights import LiveWeights, NotRepresentableError, WeightWrite
from tidemill.consumers.replica.step_clock import StepClock
from tidemill.consumers.replica.weight_map import Bits, UnsupportedModelError, record_map
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey, fingerprint
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint
from tidemill.kernels.weights.mirror import ElementChange

_PR_SET_PDEATHSIG = 1


class ReplicaExtension:
    """Methods mixed into vLLM's worker. Only the engine core's methods below call them, between steps."""

    _tidemill: LiveWeights

    def tidemill_map(self, tensors: list[tuple[str, list[int], str]]) -> list[str]:
        """Record the map for checkpoint tensors (name, shape, dtype); returns their names."""
        model: torch.nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in tensors]
        self._tidemill = LiveWeights(model, record_map(model, specs, orders_of_experts(model)), specs)
        return self._tidemill.names

    def tidemill_live(self) -> LiveWeights:
        """The live weights; the engine core is in this process, so that this is a reference and not a copy."""
        return self._tidemill


class _Update:
    """State of the replica inside one engine core: the live weights, what is staged, the last update, its clock."""

    def __init__(self, core: EngineCore) -> None:
        if not isinstance(core.model_executor, UniProcExecutor) or core.batch_queue is not None:
            raise UnsupportedModelError(
                "an atomic update needs its worker in the engine core's process, no async scheduling"
            )
        self.live: LiveWeights = core.collective_rpc("tidemill_live")[0]
        self.clock = StepClock()
        self.stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-stage")
        self.prover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-proof")
        self.staged: WeightWrite | dict[str, Bits] | None = None
        self.undo: tuple[str, WeightWrite] | None = None


def _install(core: EngineCore, tensors: list[Any], version: int) -> list[str]:
    """Map the checkpoint's tensors and take over: the engine holds `version`, unproved."""
    names: list[str] = core.collective_rpc("tidemill_map", args=(tensors,))[0]
    core.tidemill_state = update = _Update(core)
    update.live.warm()
    core.set_weight_version(str(version))
    return names


def _stage(
    core: EngineCore, names: list[str], counts: list[int], indices: bytes, bits: bytes
) -> Future[dict[str, float]]:
    """Prepare a write in a thread, while the engine goes on; it replaces what was staged before.

    Args:
        core: the engine core.
        names: tensors that change.
        counts: number of changed elements of each.
        indices: i8[sum(counts)], flat indices within each tensor, little-endian.
        bits: the new patterns, counts[k] of them in the width of tensor k's type, little-endian.

    Returns:
        stage_ms.
    """
    update: _Update = core.tidemill_state

    def prepare() -> WeightWrite:
        return update.live.prepare(_unpack(update.live, names, counts, indices, bits))

    return _in_background(update, prepare)


def _stage_checkpoint(core: EngineCore, directory: str) -> Future[dict[str, float]]:
    """Read every tensor of a checkpoint directory in a thread, like `_stage`."""
    update: _Update = core.tidemill_state

    def read() -> dict[str, Bits]:
        tensors = map_checkpoint(Path(directory))
        whole = {name: bits_in_memory(tensors, name) for name in update.live.names}
        update.live.check_whole(whole)
        return whole

    return _in_background(update, read)


def _in_background(update: _Update, make: Callable[[], WeightWrite | dict[str, Bits]]) -> Future[dict[str, float]]:
    update.staged = None

    def run() -> dict[str, float]:
        started = time.monotonic()
        update.staged = make()
        return {"stage_ms": 1e3 * (time.monotonic() - started)}

    return update.stager.submit(run)


def _unpack(live: LiveWeights, names: list[str], counts: list[int], indices: bytes, bits: bytes) -> list[ElementChange]:
    changes, index_at, bits_at = [], 0, 0
    for name, count in zip(names, counts, strict=True):
        pattern = live.pattern_type(name)
        where = np.frombuffer(indices, "<i8", count, index_at)
        changes.append(ElementChange(name, where, np.frombuffer(bits, pattern, count, bits_at)))
        index_at, bits_at = index_at + 8 * count, bits_at + pattern.itemsize * count
    return changes


def _commit(core: EngineCore, version: int, recompute: bool) -> dict[str, float]:
    """Write what was staged and stamp its version. Between steps, whole or not at all.

    Args:
        core: the engine core.
        version: the version that the engine then serves.
        recompute: drop the keys and values of running requests too.

    Returns:
        apply_ms, pause_ms (how long the engine's loop was held), decode_step_ms (the engine's own median time between
        steps over the last seconds), requests_in_flight.

    Raises:
        ValueError: nothing is staged, or not for the weights as they are; nothing was written.
    """
    begun = time.monotonic()
    update: _Update = core.tidemill_state
    staged, update.staged = update.staged, None
    if staged is None:
        raise ValueError("nothing is staged that could be written")
    if isinstance(staged, WeightWrite):
        update.live.commit(staged)
        update.undo = (core.get_weight_version(), staged)
    else:
        update.live.write_all(staged)
        update.undo = None
    return _stamp(core, version, recompute, begun, 1e3 * (time.monotonic() - begun))


def _stamp(core: EngineCore, version: int, recompute: bool, begun: float, apply_ms: float) -> dict[str, float]:
    core.set_weight_version(str(version))
    if recompute:
        core.reset_prefix_cache(reset_running_requests=True)
    ended = time.monotonic()
    return {
        "apply_ms": apply_ms,
        "pause_ms": 1e3 * (ended - begun),
        "decode_step_ms": core.tidemill_state.clock.median_ms(begun),
        "requests_in_flight": float(core.scheduler.get_num_unfinished_requests()),
    }


def _undo(core: EngineCore) -> str:
    """Take the last update back, between steps; returns the version that is served again, unproved."""
    update: _Update = core.tidemill_state
    if update.undo is None:
        raise ValueError("there is no update to undo")
    version, write = update.undo
    update.live.take_back(write)
    update.undo = None
    core.set_weight_version(version)
    return version


def _prove(core: EngineCore) -> Future[dict[str, Any]]:
    """Fingerprint the live tensors in a thread, while the engine goes on; nothing may be applied before it is done."""
    update: _Update = core.tidemill_state
    return update.prover.submit(fingerprint_live, update.live)


def fingerprint_live(live: LiveWeights) -> dict[str, Any]:
    """Fingerprints of the live tensors, read back in checkpoint coordinates.

    Returns:
        `tensors` name -> hex, `total` hex (their sum), `proof_ms`; `damage` says why there is none, else empty.
    """
    started = time.monotonic()
    try:
        tensors = {name: _fingerprint_tensor(live, name) for name in live.names}
    except NotRepresentableError as error:
        return {"tensors": {}, "total": "", "damage": str(error), "proof_ms": 1e3 * (time.monotonic() - started)}
    total = sum(tensors.values(), start=ZERO)
    proof_ms = 1e3 * (time.monotonic() - started)
    return {
        "tensors": {n: f.hex() for n, f in tensors.items()},
        "total": total.hex(),
        "damage": "",
        "proof_ms": proof_ms,
    }


def _fingerprint_tensor(live: LiveWeights, name: str) -> Fingerprint:
    key = TensorKey.of(name)
    return sum((fingerprint(bits, key, start) for start, bits in live.pieces(name)), start=ZERO)


def _timed_step(core: EngineCore) -> Any:  # noqa: ANN401 - vLLM's own step result, passed through
    started = time.monotonic()
    result = _vllm_step(core)
    update: _Update | None = getattr(core, "tidemill_state", None)
    if update is not None and result[1]:
        update.clock.record(started, time.monotonic(), core.scheduler.has_unfinished_requests())
    return result


def _plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401 - vLLM's linear layers
    layer.cpu_linear = unpacked_linear


def _die_with_parent(parent: int) -> None:
    # vLLM's engine core outlives a server that is killed with SIGKILL; the kernel's signal depends on nobody.
    if parent == os.getpid():
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the server that started this engine is gone")


def _extend_engine() -> None:
    linear_layers.dispatch_cpu_unquantized_gemm = _plain_linear
    for name, method in _METHODS.items():
        setattr(EngineCore, name, method)


_vllm_step = EngineCore.step
_METHODS = {
    "tidemill_install": _install,
    "tidemill_stage": _stage,
    "tidemill_stage_checkpoint": _stage_checkpoint,
    "tidemill_commit": _commit,
    "tidemill_undo": _undo,
    "tidemill_prove": _prove,
    "step": _timed_step,
}
_extend_engine()
if PARENT_VARIABLE in os.environ:
    _die_with_parent(int(os.environ[PARENT_VARIABLE]))
