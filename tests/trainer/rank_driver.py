"""A driver for tests: trainers of several ranks, forked from one process that has loaded the libraries.

    python -m tests.trainer.rank_driver JOBS    JOBS: a file with a list of `{"name", "ranks", "scenario", "options"}`

The ranks of a job connect as those of torchrun do. Consecutive jobs for the same number of ranks run in the same
processes, except those that start or end processes themselves (`APART`). The results of each rank are written to
`<name>-<rank>.json` in the directory of JOBS, the exit statuses of the ranks to `<name>.json`, and their output to
`<name>-<rank>.log`, with the name of the first job of the processes.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked_ranks import run_ranks
from tests.trainer.conftest import drawn_experts, fingerprint_of, make_trainable, make_trainable_batch, tiny_model
from tests.trainer.families import make_model
from tests.waiting import until
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.trainer import job as job_module
from tidemill.trainer import step as step_module
from tidemill.trainer import trained_weights
from tidemill.trainer.attention import UntrainableModelError
from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.job import Job, open_job
from tidemill.trainer.master import MasterWeights, own_part
from tidemill.trainer.mismatch import measure
from tidemill.trainer.replay.steps import StepReplay, follow_replay
from tidemill.trainer.run import run
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner
from tidemill.trainer.stored_model import NotByRowsError
from tidemill.trainer.trainable import TopicProgress, TrainableGroup
from tidemill.trainer.trained_weights import TrainedWeights, make_learner

TIMEOUT_S = 60.0
STEPS = 2
GROUPS = ("a", "b", "c")
Found = dict[str, Any]


def settings_of(**changes: Any) -> TrainerSettings:
    return TrainerSettings(**{"optimizer": {"learning_rate": 1e-3}, "row_tokens": 96, "device": "cpu", **changes})


def learner_of(settings: TrainerSettings, job: Job) -> Learner:
    if settings.experts is not None:
        return make_learner(settings, job)
    reference = tiny_model(3) if settings.kl.coefficient else None
    return Learner(tiny_model(), settings, reference, job)


def weights_of(settings: TrainerSettings, job: Job, store: str) -> TrainedWeights:
    return TrainedWeights(settings, learner_of(settings, job), CheckpointStore(store, "run", "main", 9), job=job)


def take(
    weights: TrainedWeights,
    step: int,
    groups: tuple[str, ...] = GROUPS,
    online: bool = False,
    experts: Sequence[int] = (),
) -> Found:
    batch = make_trainable_batch("q", (1.0, -1.0, 0.5)) if online else None
    outcome = weights.train([group_of(name, experts) for name in groups], step, step - 1, step, batch)
    apart = {
        f"{s.part}/{s.dimension}/{s.value}": [s.tokens, s.k3, s.max] for s in measure(outcome.trained, step - 1)[0]
    }
    return {"fingerprint": weights.snapshot(), "metrics": outcome.metrics, "tokens": outcome.tokens, "apart": apart}


def group_of(name: str, experts: Sequence[int]) -> TrainableGroup:
    """Make a group; if `experts` are given, each layer sent its tokens to two of these, drawn for each token."""
    group = make_trainable(name)
    return replace(group, expert_ids=drawn_experts(group, experts, layers=2)) if experts else group


def led(scenario: Callable[[TrainedWeights, Found], Found]) -> Callable[[Job, Found], Found]:
    """Make a job from a scenario that the first rank runs and the others follow."""

    def run(job: Job, options: Found) -> Found:
        settings = settings_of(**{"model": options["model"], **options["settings"]})
        with pytest.MonkeyPatch.context() as patch:
            if options.get("copies"):
                # As if the gathering did not round: the masters are separate from the model's parameters.
                patch.setattr(step_module, "MasterWeights", lambda *given, gathered_in_bf16: MasterWeights(*given))
            weights = weights_of(settings, job, options["store"])
        if not job.ranks.is_first:
            weights.follow()
            return {}
        found = scenario(weights, options)
        weights.let_go()
        return found

    return run


def trained(weights: TrainedWeights, options: Found) -> Found:
    """Take some steps and report each step and the final weights."""
    groups = tuple(options.get("groups", GROUPS))
    online, experts = options.get("online", False), options.get("routed", ())
    steps = [take(weights, n, groups, online, experts) for n in range(1, options.get("steps", STEPS) + 1)]
    view = {name: bits.reshape(-1).tolist() for name, bits in weights.whole().items()}
    return {"steps": steps, "view": view, "hash": settings_of(**options["settings"]).arithmetic_hash(weights.machine)}


def saved(weights: TrainedWeights, options: Found) -> Found:
    """Take a step, write a checkpoint, take a second step."""
    take(weights, 1)
    weights.save(state_of(1, weights.snapshot()), ())
    return take(weights, 2)


def saved_first(weights: TrainedWeights, options: Found) -> Found:
    """Take a step, write a checkpoint (its first moments are a multiple of the gradients), and return to the start."""
    start = weights.snapshot()
    found = take(weights, 1)
    weights.save(state_of(1, found["fingerprint"]), ())
    weights.restore(0)
    return {**found, "start": start, "restarted": weights.snapshot()}


def resaved(weights: TrainedWeights, options: Found) -> Found:
    """Restore the checkpoint, write it as another step, and take the next step."""
    state = weights.restore(options["restore"])
    assert state is not None
    before = weights.snapshot()
    weights.save(state_of(options["save"], before), ())
    return {"recorded": state.fingerprint, "restored": before, **take(weights, 2)}


def restarted(weights: TrainedWeights, options: Found) -> Found:
    """Take a step, then return to the weights that the run started from."""
    start = weights.snapshot()
    take(weights, 1)
    weights.restore(0)
    return {"start": start, "restarted": weights.snapshot()}


def laid(job: Job, options: Found) -> Found:
    """Compare a model of which each rank read its own rows with one that each rank loaded whole."""
    settings = settings_of(model=options["model"], kl={"coefficient": 0.05}, **options["settings"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_weights, "load_model", lambda *_: fail("raise"))
        own = make_learner(settings, job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_weights, "StoredModel", refuse)
        whole = make_learner(settings, job)
    held = [state_of_learner(one) for one in (own, whole)]
    found = {"differing": differing(*held), "names": sorted(held[0])}
    outcomes = [one.train([make_trainable("a")], 1, 0, 1) for one in (own, whole)]
    assert outcomes[0].metrics == outcomes[1].metrics
    return found | {"differing after a step": differing(*(one.masters.state() for one in (own, whole)))}


def refused(job: Job, options: Found) -> Found:
    """Report the error for a model that cannot be trained."""
    with pytest.raises(UntrainableModelError) as error:
        make_learner(settings_of(model=options["model"], **options["settings"]), job)
    return {"error": str(error.value)}


def refuse(*_: Any) -> None:
    raise NotByRowsError("for the comparison")


def state_of_learner(learner: Learner) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the masters and the reference, and the buffers."""
    found = learner.masters.state()
    for name, parameter in learner._reference.named_parameters():
        found[f"reference/{name}"] = own_part(parameter)
    return found | {f"buffer/{name}": buffer for name, buffer in learner.model.named_buffers()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


def failing(job: Job, options: Found) -> Found:
    """Let a rank fail or be killed within a module: the first rank reports it, or the others end without it."""
    weights = weights_of(settings_of(**{"model": options["model"], **options["settings"]}), job, options["store"])
    if job.ranks.rank == options.get("rank", 1):
        module = weights._learner.model.model.get_submodule(options.get("within", "layers.1"))
        module.register_forward_pre_hook(lambda *_: fail(options["how"], Path(options["result"])))
    if not job.ranks.is_first:
        weights.follow()
        return {}
    try:
        take(weights, 1)
    except RuntimeError as error:
        return {"error": str(error), "class": type(error).__name__}
    raise AssertionError("a step was taken without a rank that failed")


def killed_saving(job: Job, options: Found) -> Found:
    """Kill rank 1 before its checkpoint file has its final name."""
    weights = weights_of(settings_of(), job, options["store"])
    if job.ranks.rank == 1:
        weights.checkpoints._filesystem.mv = lambda *_names: fail("kill")
    if not job.ranks.is_first:
        weights.follow()
        return {}
    try:
        weights.save(state_of(1, weights.snapshot()), ())
    except RuntimeError as error:
        return {"error": str(error), "steps": weights.checkpoints.steps()}
    raise AssertionError("a checkpoint was written without a rank that was killed")


def fail(how: str, result: Path | None = None) -> None:
    """Raise an error, get killed, or hang until the first rank has written its result."""
    if result is not None and how == "hang":
        until(result.exists, "the result of the first rank")
        return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise MemoryError("no room for a row")


def different(job: Job, options: Found) -> Found:
    """Start ranks with different settings."""
    settings = settings_of(row_tokens=96 + 32 * job.ranks.rank)
    try:
        job.require_same({"trainer": settings})
    except ValueError as error:
        return {"error": str(error)}
    raise AssertionError("different settings were taken")


def role(options: Found) -> None:
    """Run the trainer role, and kill rank `kill[0]` within step `kill[1]`."""
    train_step = Learner.train

    def killed(learner: Learner, groups: Sequence[Any], step: int, *others: Any) -> Any:
        if [os.environ["RANK"], step] == options.get("kill"):
            learner.model.model.layers[1].register_forward_pre_hook(lambda *_: fail("kill"))
        return train_step(learner, groups, step, *others)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Learner, "train", killed)
        run(
            KafkaSettings(**options["kafka"]),
            RunSettings(**options["run"]),
            StoreSettings(root=options["store"]),
            TrainerSettings(**options["trainer"]),
        )


def replayed(job: Job, options: Found) -> Found:
    """Repeat recorded steps with the same number of ranks."""
    run_of, store = RunSettings(**options["run"]), StoreSettings(root=options["store"])
    settings = TrainerSettings(**options["trainer"])
    if not job.ranks.is_first:
        follow_replay(run_of, store, settings, job)
        return {}
    with StepReplay(KafkaSettings(**options["kafka"]), run_of, store, settings, job) as replay:
        return {"same": [made.same for made in replay.run(*options["steps"])]}


SCENARIOS = {
    "trained": led(trained), "saved": led(saved), "saved_first": led(saved_first),
    "resaved": led(resaved), "restarted": led(restarted),
    "failing": failing, "different": different, "replayed": replayed,
    "killed_saving": killed_saving, "laid": laid, "refused": refused,
}  # fmt: skip


def state_of(step: int, fingerprint: str) -> CheckpointState:
    return CheckpointState("run", "main", step, step, fingerprint, "hash", TopicProgress())


APART = ("failing", "killed_saving", "role")
"""Scenarios that need their own processes."""


def run_rank(jobs: Sequence[Found], number: int, out: Path) -> None:
    """Run the scenarios of some jobs on one rank."""
    if jobs[0]["scenario"] == "role":
        logging.basicConfig(level=logging.INFO)
        role(options_of(jobs[0], out))
        return
    with open_job(TIMEOUT_S) as opened:
        for job in jobs:
            found = SCENARIOS[job["scenario"]](opened, options_of(job, out))
            (out / f"{job['name']}-{number}.json").write_text(json.dumps(found))


def options_of(job: Found, out: Path) -> Found:
    """Return the options of a job with those that it does not give, and set the time for answers."""
    job_module.ANSWERS_S = job["options"].get("answers_s", job_module.ANSWERS_S)
    paths = {"store": out / "store", "model": out / "model", "result": out / f"{job['name']}-0.json"}
    return {"settings": {}, **{name: str(path) for name, path in paths.items()}, **job["options"]}


def processes(job: Found) -> tuple[int, str]:
    """Return what jobs that share processes have in common."""
    return job["ranks"], job["name"] if job["scenario"] in APART else ""


def warm_up() -> None:
    """Take a step in this process, so that its forks need neither import nor load what a first step does."""
    learner = Learner(make_model("Qwen3Moe"), settings_of(kl={"coefficient": 0}), None)
    learner.train([make_trainable("a")], 1, 0, 1)
    fingerprint_of(serving_view(learner.model))


def main() -> None:
    """Run all jobs in their order."""
    path = Path(sys.argv[1])
    out = path.parent
    torch.set_num_threads(1)
    warm_up()
    for (ranks, _), together in groupby(json.loads(path.read_text()), key=processes):
        jobs = list(together)
        work = partial(run_rank, jobs, out=out)
        ended = run_ranks(ranks, work, lambda number, name=jobs[0]["name"]: out / f"{name}-{number}.log")
        for job in jobs:
            (out / f"{job['name']}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
