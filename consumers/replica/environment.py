"""Environment of the engine, set before vLLM is imported (`vllm.envs` reads most variables once, at import), and a way
to import large libraries in less time.

Reasons for the variables: for one rank the multiprocessing executor would add a process and two hops to every call
(for several ranks vLLM uses it in any case); ranks that share a NUMA node cannot be bound to separate nodes; the one
compiled logprob helper costs seconds at the first request; splitting the KV loop over threads makes a token's logprob
depend on the thread count; and the integer-GiB cache variable would override `kv_cache_memory_bytes`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_VARIABLE = "TIDEMILL_ENGINE_PARENT"
"""Process id of the server, so that its engine core ends with it."""
INVARIANT_VARIABLE = "TIDEMILL_BATCH_INVARIANT"
"""1 if a token's result must not depend on the rest of the batch."""
ACTIVATIONS_VARIABLE = "TIDEMILL_SERVING_ACTIVATIONS"
"""Format to which the engine rounds the inputs of its linear layers; empty, or not set, for none."""
FAULT_VARIABLE = "TIDEMILL_ENGINE_FAULT"
"""File into which a process of the engine that cannot start writes the reason; the first one that fails makes it."""
PLUGIN = "tidemill"
"""Name of the entry point of `plugin.register` in the group `vllm.general_plugins`."""

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": PLUGIN,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_NEVER = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_SERVER_DEV_MODE", "VLLM_BATCH_INVARIANT")


def prepare_environment(threads: int, batch_invariant: bool = False) -> None:
    """Set the variables of an engine with `threads` compute threads in this process.

    Raises:
        RuntimeError: vLLM was imported already, so that it would not read them; or its engine for this device cannot
            be `batch_invariant`.
    """
    wanted = {
        **_ALWAYS,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads)),
        INVARIANT_VARIABLE: str(int(batch_invariant)),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    settled = all(os.environ.get(name) == value for name, value in wanted.items())
    if "vllm" in sys.modules and not settled:
        raise RuntimeError("vLLM was imported before the replica's environment was set: call prepare_environment first")
    for name in _NEVER:
        os.environ.pop(name, None)
    os.environ.update(wanted)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    if not batch_invariant:
        return
    # vLLM reads the variable when it imports kernels, which the platform does not do yet. With it, a CPU engine crashes
    # in the first forward pass (vLLM 0.32): there the plugin replaces it.
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    elif not current_platform.is_cpu():
        raise RuntimeError(
            f"numerics.batch_invariant: vLLM has no such engine for {current_platform.device_name}; set it to false"
        )


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection during imports, because it takes a third of their time, and exclude the imported
    objects from later collections: vLLM collects several times while an engine starts."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
