"""A replica's engine of several ranks, and the results that the tests compare.

For each of SCENARIOS, versions A, B, A ... are applied under load and single ranks are damaged; then a server with a
coordinator is killed. `drivers.py` runs it. Each part is in a fork, which is the server's part of the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.consumers import engine_driver as engines
from tests.consumers.bit_flip import flip_on_rank
from tests.consumers.drivers import forked
from tidemill.consumers.replica.config import KvPolicy, ReplicaSettings
from tidemill.consumers.replica.ledger import WriteRefusedError
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.checkpoint import map_checkpoint, specs_of
from tidemill.kernels.weights.mirror import ElementChange

TOKENS, REQUESTS, MOVES = 64, 4, 5
END_S = 120.0
STEPS, SLOW_S = 8, 0.5
"""In `under_load`: steps after a commit at full speed, and the duration of the further ones. So the requests outlast
the versions, also if the server gets no processor for seconds."""
OTHER_VERSION = "another version"
_record: dict[str, list[int]] = {}
"""In a worker: the version that each forward pass of a request used, counted by the worker's own commits."""
_held = [0]
_steps, _slow = [0], [False]
_torn = [0]
"""In a worker: exchanges of tokens between engine cores that did not hold the same version."""


def install() -> None:
    """Patch the workers to record and to fail on request; call it before the engine starts."""
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from tidemill.consumers.replica import live_weights
    from tidemill.consumers.replica.extension import ReplicaExtension

    execute, commit, undo = (
        GPUModelRunner.execute_model,
        ReplicaExtension.tidemill_commit,
        ReplicaExtension.tidemill_undo,
    )
    taken_over, gather_rows = live_weights.taken_over, CpuCommunicator.all_gatherv
    broken: list[str] = []

    def execute_model(runner: Any, scheduled: Any, *rest: Any, **options: Any) -> Any:
        for request in scheduled.num_scheduled_tokens:
            _record.setdefault(request, []).append(_held[0])
        _steps[0] += 1
        if _slow[0] and _steps[0] > STEPS:
            time.sleep(SLOW_S)
        return execute(runner, scheduled, *rest, **options)

    def all_gatherv(group: Any, given: list[Any], dim: int, sizes: list[int]) -> list[Any]:
        held = [torch.zeros(1, dtype=torch.int64) for _ in sizes]
        torch.distributed.all_gather(held, torch.tensor(_held), group=group.device_group)
        _torn[0] += len({int(version) for version in held}) > 1
        return gather_rows(group, given, dim, sizes)

    def tidemill_commit(worker: Any) -> Any:
        if "commit" in broken:
            broken.clear()
            worker._tidemill.live._writes += 1  # as if other code had written
        answer = commit(worker)
        _held[0] += not answer["fault"]
        _steps[0] = 0
        return answer

    def tidemill_undo(worker: Any) -> Any:
        answer = undo(worker)
        _held[0] -= not answer["fault"]
        return answer

    def slow(_worker: Any, on: bool) -> None:
        _slow[0] = on

    def take(path: str, digest: str) -> Any:
        if "shard" in broken:
            broken.clear()
            return taken_over(path, digest[::-1])
        return taken_over(path, digest)

    GPUModelRunner.execute_model = execute_model
    live_weights.taken_over, CpuCommunicator.all_gatherv = take, all_gatherv
    ReplicaExtension.tidemill_commit, ReplicaExtension.tidemill_undo = tidemill_commit, tidemill_undo
    ReplicaExtension.test_record = lambda worker: _record
    ReplicaExtension.test_slow = slow
    ReplicaExtension.test_torn = lambda worker: _torn[0]
    ReplicaExtension.test_break = lambda worker, rank, what: broken.append(what) if worker.rank == rank else None
    ReplicaExtension.test_flip = lambda worker, rank, *place: worker.rank == rank and flip_on_rank(worker, *place)


class Versions:
    """Two versions of a checkpoint, and an engine that alternates between them."""

    def __init__(self, engine: Any, views: list[Any]) -> None:
        self.engine, self.views, self.number = engine, views, 0
        self.totals = [engines.total(view) for view in views]

    async def move(self) -> Any:
        """Apply the other version."""
        old, new = self.views[self.number % 2], self.views[(self.number + 1) % 2]
        changes = []
        for name in new:
            where = np.random.default_rng(0).permutation(np.flatnonzero(old[name] != new[name]))
            changes.append(ElementChange(name, where, new[name].reshape(-1)[where]))
        applied = await self.engine.apply(changes, self.number + 1)
        self.number += 1
        return applied

    async def proved(self) -> str:
        """Return an empty string if the ranks hold the version, otherwise the reason."""
        proof = await self.engine.prove()
        right = proof.total == self.totals[self.number % 2]
        return proof.damage or ("" if right else OTHER_VERSION)


async def start(directory: Path, settings: ReplicaSettings, specs: list[TensorSpec] | None = None) -> Any:
    """Start an engine on a checkpoint, which is version 0."""
    from tidemill.consumers.replica.engine import ReplicaEngine
    from tidemill.consumers.replica.server import server_arguments

    specs = specs or specs_of(map_checkpoint(directory))
    arguments = server_arguments(str(directory), settings)
    return await ReplicaEngine.start(arguments, specs, 0, KvPolicy.STALE, settings.expert_ids)


async def request(engine: Any, number: int, **sampling: Any) -> Any:
    """Return one finished answer."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": [(7 * number + 3 * i) % 190 + 5 for i in range(12)]}
    async for output in engine.generate(prompt, SamplingParams(ignore_eos=True, **sampling), f"request-{number}."):
        last = output
    return last


async def greedy(engine: Any) -> list[list[int]]:
    """Return the tokens of three greedy answers."""
    found = [request(engine, 1000 + n, temperature=0, max_tokens=12) for n in range(3)]
    return [list(output.outputs[0].token_ids) for output in await asyncio.gather(*found)]


async def under_load(
    engine: Any, versions: Versions, moves: int, first: int = 0, *, slow: bool = False
) -> dict[str, Any]:
    """Apply versions while requests run, numbered from `first`; return proofs, timings, and a comparison of the
    version spans with the workers' own record. With `slow`, the requests wait for the versions (`STEPS`)."""
    await engine._cores("collective_rpc", "test_slow", None, [slow], None)
    numbers = range(first, first + REQUESTS)
    load = [asyncio.create_task(request(engine, n, temperature=1.0, max_tokens=TOKENS)) for n in numbers]
    objections, applied = [], []
    for _ in range(moves):
        applied.append(await versions.move())
        objections.append(await versions.proved())
        await asyncio.sleep(0)
    running = sum(not task.done() for task in load)
    await engine._cores("collective_rpc", "test_slow", None, [False], None)
    outputs = await asyncio.gather(*load)
    wrong, spans = 0, 0
    cores = await engine._cores("collective_rpc", "test_record", None, [], None)
    records = [record for ranks in cores for record in ranks]
    for output in outputs:
        made = [record[each] for record in records for each in record if each.startswith(output.request_id)]
        told = output.outputs[0].weight_versions
        spans += len(told)
        said = [int(span.version) for span in told for _ in range(span.start, span.end)]
        # Every rank of the engine that answered has a record of the request, and all these records are equal.
        wrong += sum(one != other for each in made for one, other in zip(said, each, strict=True)) + (not made)
    return {
        "objections": objections, "running": running, "wrong": wrong, "spans": spans,
        "pauses": [one.pause_ms for one in applied], "steps": [one.decode_step_ms for one in applied],
        "stages": [one.stage_ms for one in applied],
    }  # fmt: skip


async def damages(engine: Any, versions: Versions) -> dict[str, Any]:
    """Damage only the last rank; return the engine's errors and the state after each."""
    found: dict[str, Any] = {}
    await versions.move()  # an update that could be undone
    for what in ("shard", "commit"):
        await engine.collective_rpc("test_break", args=(1, what))
        try:
            await versions.move()
        except WriteRefusedError as error:
            found[what] = str(error)
        found[f"{what} then"] = await versions.proved()
        found[f"{what} version"] = engine.version
    await versions.move()
    found["moved"] = await versions.proved()
    await engine.undo()
    versions.number -= 1
    found["undone"], found["version"] = await versions.proved(), engine.version
    for name, index in (("model.norm.weight", 60), ("model.layers.1.self_attn.o_proj.weight", 127)):
        place = (1, name, index, 16)
        await engine.collective_rpc("test_flip", args=place)
        found[name] = await versions.proved()
        await engine.collective_rpc("test_flip", args=place)
    found["healed"] = await versions.proved()
    return found


async def under_fused_names(engine: Any, directory: Path) -> list[str]:
    """Apply a version and go back, with the in-memory names of transformers; return the proofs' errors."""
    view = engines.fused_view(directory)
    await engine.map([TensorSpec(name, bits.shape, "bfloat16") for name, bits in view.items()])
    versions, found = Versions(engine, [view, engines.driver.nudged(view, seed=3)]), []
    for _ in range(2):
        await versions.move()
        found.append(await versions.proved())
    assert sum("experts.down_proj" in name for name in view)
    return found


async def kill_a_rank(engine: Any, versions: Versions) -> str:
    """Send SIGKILL to the last worker when everything is staged; return the error of the next call."""
    done = engine._done

    async def killing(*arguments: Any) -> Any:
        await done("tidemill_answers")
        workers = [one for one in psutil.Process().children(recursive=True) if not one.children()]
        workers[-1].send_signal(signal.SIGKILL)
        psutil.wait_procs(workers[-1:], timeout=20)
        return await done(*arguments)

    engine._done = killing
    return await ending(versions.move())


async def kill_the_core(engine: Any) -> str:
    """Send SIGKILL to the engine core during a call, with its ranks suspended; return the error of the call."""
    (core,) = [one for one in psutil.Process().children() if one.children()]
    ranks = [one for one in core.children() if "resource_tracker" not in " ".join(one.cmdline())]
    assert len(ranks) == 2, "two ranks and vLLM's tracker of shared memory"
    for process in (core, *ranks):
        process.suspend()
    asked = asyncio.ensure_future(ending(engine._cores("tidemill_answers")))
    while not engine.engine_core.utility_results:
        await asyncio.sleep(0.01)
    core.kill()
    return await asked


async def on_core(engine: Any, number: int, method: str, *arguments: Any) -> Any:
    """Return the answer of the one rank of an engine core."""
    cores = engine.engine_core
    call = cores._call_utility_async("collective_rpc", method, None, arguments, None, engine=cores.core_engines[number])
    (answer,) = await call
    return answer


def one_by_one(engine: Any) -> None:
    """Send a write to the engine cores one after the other, as can happen by chance."""
    cores = engine.engine_core
    at_once = cores.call_utility_all_async

    async def ask(method: str, *arguments: Any) -> list[Any]:
        if method not in ("tidemill_commit", "tidemill_undo"):
            return await at_once(method, *arguments)
        return [await cores._call_utility_async(method, *arguments, engine=core) for core in cores.core_engines]

    cores.call_utility_all_async = ask


async def together(root: Path, settings: ReplicaSettings, kind: Any) -> dict[str, Any]:
    """Apply versions under load on two engine cores of one rank each, and damage only the second."""
    a = engines.make_model(kind, root / "a")
    old = engines.driver.view_of(a)
    install()
    engine = await start(a, settings)
    one_by_one(engine)
    versions = Versions(engine, [old, engines.driver.nudged(old, seed=1, fraction=0.2)])
    result: dict[str, Any] = {"first": await versions.proved(), "before": await greedy(engine)}
    result["load"] = await under_load(engine, versions, MOVES - 1, slow=True)
    result["after"] = await greedy(engine)
    await on_core(engine, 1, "test_break", 0, "commit")
    try:
        await versions.move()
    except WriteRefusedError as error:
        result["commit"] = str(error)
    result["commit then"] = await versions.proved()
    for name in ("model.norm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"):
        for found in (name, f"{name} then"):
            assert await on_core(engine, 1, "test_flip", 0, name, 60, 16), "the second engine core holds it"
            result[found] = await versions.proved()
    await versions.move()
    result["moved"] = await versions.proved()
    await engine.undo()
    versions.number -= 1
    result["undone"], result["version"] = await versions.proved(), engine.version
    result["torn"] = [await on_core(engine, number, "test_torn") for number in range(2)]
    engine.shutdown()
    return result


def shared_memory() -> list[str]:
    """Return the files of vLLM's shared memory that the ranks have mapped; `(deleted)` follows one without a name."""
    maps = [Path(f"/proc/{one.pid}/maps").read_text() for one in psutil.Process().children(recursive=True)]
    return sorted({line.split(maxsplit=5)[5] for text in maps for line in text.splitlines() if "cpushm" in line})


async def ending(work: Any) -> str:
    """Return the error with which a call ends."""
    try:
        await asyncio.wait_for(work, 60)
    except Exception as error:  # noqa: BLE001 - the test says which one it must be
        return f"{type(error).__name__}: {error}"
    return "nothing"


async def compare(root: Path, settings: ReplicaSettings, kind: Any) -> dict[str, Any]:
    """See the module's docstring."""
    a = engines.make_model(kind, root / "a")
    old = engines.driver.view_of(a)
    views = [old, engines.driver.nudged(old, seed=1, fraction=0.2)]
    b = engines.save_view(views[1], a, root / "b")
    install()
    started = time.monotonic()
    engine = await start(a, settings)
    result: dict[str, Any] = {"start_s": time.monotonic() - started}
    versions = Versions(engine, views)
    result["shared"] = shared_memory()
    result["first"], result["before"] = await versions.proved(), await greedy(engine)
    output = await request(engine, 2000, temperature=0, max_tokens=4)
    result["expert_ids"] = getattr(output.outputs[0].routed_experts, "shape", None)
    result["load"] = await under_load(engine, versions, MOVES, slow=True)
    result["after"] = await greedy(engine)
    await engine.load(a, versions.number + 1)
    versions.number += 1
    result["whole"], result["whole_greedy"] = await versions.proved(), await greedy(engine)
    result["damages"] = await damages(engine, versions)
    if kind.intermediate:
        await versions.move()  # to `a`, the first of the fused views
        result["fused"] = await under_fused_names(engine, a)
        await engine.map(specs_of(map_checkpoint(a)))
    result["killed"] = await kill_a_rank(engine, versions)
    children = psutil.Process().children(recursive=True)
    engine.shutdown()
    result["left"] = len(psutil.wait_procs(children, timeout=END_S)[1])
    # If there are experts, each of these ranks holds whole ones.
    fresh = await start(b, settings.model_copy(update={"expert_parallel": bool(kind.intermediate)}))
    result["fresh"] = await greedy(fresh)
    if kind.intermediate:
        result["whole_experts"] = await under_load(fresh, Versions(fresh, views[::-1]), MOVES - 1, slow=True)
        result["back"] = await greedy(fresh)
    children = psutil.Process().children(recursive=True)
    result["core_killed"] = await kill_the_core(fresh)
    fresh.shutdown()
    result["left"] += len(psutil.wait_procs(children, timeout=END_S)[1])
    return result


SCENARIOS: dict[str, tuple[Callable[..., Any], int, dict[str, Any]]] = {
    "dense": (compare, 0, {"tensor_parallel": 2}),
    "experts": (compare, 64, {"tensor_parallel": 2, "expert_ids": True}),
    "together": (together, 64, {"data_parallel": 2, "expert_parallel": True}),
}
"""By name: the function, the intermediate size of the experts (0 for a dense model), and settings of the replica."""


def coordinate(found: Path) -> None:
    """Start the coordinator of two engine cores side by side, write its process id, and die."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine.coordinator import DPCoordinator

    from tidemill.consumers.replica.plugin import register

    register()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    found.write_text(str(DPCoordinator(ParallelConfig(data_parallel_size=2)).proc.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def play(root: Path, scenario: Callable[..., Any], intermediate: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one of SCENARIOS."""
    settings = ReplicaSettings(kv_cache_mb=16, max_model_len=256, max_num_seqs=16, **given)
    kind = engines.Kind("float32", tied=True, intermediate=intermediate)
    found: dict[str, Any] = asyncio.run(scenario(root, settings, kind))
    return found


def drive(root: Path) -> dict[str, Any]:
    """Return the results of each scenario, and the process id of the coordinator."""
    results = {}
    for name, scenario in SCENARIOS.items():
        found = root / name / "found.json"
        assert forked(play, found, found.parent, *scenario) == 0, f"scenario {name} failed"
        results[name] = json.loads(found.read_text())
    pid = root / "coordinator"
    assert forked(coordinate, root / "none", pid) == -signal.SIGKILL
    return {**results, "coordinator": int(pid.read_text())}
