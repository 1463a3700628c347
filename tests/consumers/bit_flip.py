"""Damage for tests: flip one bit of a live tensor inside the engine core of a real replica.

    bit_flip.install()                                  in the server's process, before its engine core is forked
    await bit_flip.flip(engine, name, index, bit)       if the test has the `ReplicaEngine`
    bit_flip.flip_from_outside(pid)                     if it has only the server's process id: flips the bit that
                                                        `TIDEMILL_TEST_FLIP="name index bit"` named at its start

The engine core is a fork of the server, so that it inherits patches installed before the fork. `bit` counts within the
engine's own element: bits 0 to 15 of an fp32 element are below bf16; if one is flipped, no version has the value.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import psutil

VARIABLE = "TIDEMILL_TEST_FLIP"


def install() -> None:
    """Patch vLLM's engine core to flip a bit on a utility call, and on SIGUSR1 if the environment names the bit."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    busy_loop = EngineCoreProc.run_busy_loop

    def run_busy_loop(core: Any) -> Any:
        if VARIABLE in os.environ:
            name, index, bit = os.environ[VARIABLE].split()
            signal.signal(signal.SIGUSR1, lambda *_: flip_bit(core, name, int(index), int(bit)))
        return busy_loop(core)

    EngineCore.tidemill_flip_bit = flip_bit
    EngineCoreProc.run_busy_loop = run_busy_loop


def flip_bit(core: Any, name: str, index: int, bit: int) -> None:
    """Flip one bit of the live element that holds checkpoint element `index` of tensor `name`, on every rank."""
    assert any(core.collective_rpc(flip_on_rank, args=(name, index, bit)))


def flip_on_rank(worker: Any, name: str, index: int, bit: int) -> bool:
    """Flip the bit if this rank holds the element; return whether it does."""
    live = worker._tidemill.live
    layout = live.layouts[name]
    if not layout.boxes:
        return False
    storage = live._storage[layout.parameter]
    places, _, _ = storage.find([(layout, np.array([index]), np.zeros(1, live.patterns(name)[1]))])
    storage.elements[places] ^= storage.elements.dtype.type(1 << bit)
    return len(places) > 0


async def flip(engine: Any, name: str, index: int, bit: int) -> None:
    """Call `flip_bit` between two steps of a running `ReplicaEngine`."""
    await engine.engine_core.call_utility_async("tidemill_flip_bit", name, index, bit)


def flip_from_outside(pid: int) -> None:
    """Signal the engine core below the server `pid`; the bit is flipped before the core's next utility call."""
    cores = [child for child in psutil.Process(pid).children(recursive=True) if _handles_usr1(child.pid)]
    assert cores, f"no process below {pid} was taught to flip a bit: was {VARIABLE} set, and install() called?"
    for core in cores:
        core.send_signal(signal.SIGUSR1)


def _handles_usr1(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        (caught,) = [int(line.split()[1], 16) for line in status if line.startswith("SigCgt")]
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)
