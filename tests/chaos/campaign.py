"""One run under one storm, from an empty log to a verdict: the events, the repeated work and the errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.course import NOTES_NAME, Course, course_of, steps_of
from tests.chaos.execute import READ, Endured, Execution
from tests.chaos.observed_users import Noted, noted
from tests.chaos.site import Site, make_model, settings_for, site_of
from tests.chaos.storm import FaultKind, Share, Storm, counted, draw
from tests.chaos.tally import FEED
from tests.chaos.verdict import Answer, Chains, audit, steps_again, train_undisturbed
from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.processes import Supervisor
from tidemill.schemas.log.reader import LogReader

BROKER_FAULTS = frozenset({FaultKind.BROKER_KILL, FaultKind.BROKER_PAUSE})
OFFENDERS = 10
"""The greatest number of lost or repeated items that a result names."""
CALM_STEPS = 2
"""Steps after that of the last fault, in which the run must recover from the storm."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """The settings of a run under a storm."""

    directory: Path
    seed: int
    steps: int
    model: Path | None
    counts: dict[FaultKind, int]
    roles: Sequence[str] = ()
    """The roles that the faults hit; empty: every role."""
    brokers: int = 1
    gap_s: float = 6.0
    longest_s: float = math.inf
    """No fault is injected later; the run still continues to its end."""
    stall_s: float = 420.0
    """A run without a step and without a fault for this many seconds is wedged."""
    plan: Path | None = None
    """A recorded storm, used instead of one drawn from the seed."""
    changes: Sequence[str] = ()
    in_order: bool = False
    """The deterministic mode: weights depend only on the log, and are compared with those of an undisturbed trainer."""
    act: Act = Act.ONE
    ranks: int = 1
    """Ranks of the trainer, and of each replica's engine (tensor parallel)."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that exclude each other."""
        if self.ranks == 1 and self.counts.get(FaultKind.RANK_KILL):
            raise ValueError("a rank is killed where there are several: give --ranks 2")
        if self.in_order and self.ranks > 1:
            raise ValueError("--in-order compares with a trainer of one process: leave out --ranks")
        if self.in_order and self.act is not Act.ONE:
            raise ValueError("--in-order is of act one: what users do is no function of the log")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a run under a storm."""

    storm: Storm
    endured: Endured
    audit: Answer
    again: Answer
    chains: Chains | None
    """None if the run was not in the deterministic mode."""
    sink_rows_twice: int
    order: Order
    directory: Path
    told: Noted
    """The answers and acknowledgements that users received; empty in a run without users."""

    @property
    def clean(self) -> bool:
        """Whether nothing is lost or done twice, and every step computed again gives the recorded weights."""
        wrong = self.lost() or self.twice() or self.endured.tally.repeated.groups_changed or self.sink_rows_twice
        equal = self.again.clean and (self.chains is None or self.chains.equal)
        return self.audit.clean and equal and not wrong

    def lost(self) -> list[str]:
        """Return the requested rollouts without a record, and what users received that is not in the log."""
        tally = self.endured.tally
        rollouts = [f"rollout {index} of {task} was asked for and has no record" for task, index in tally.lost()]
        return [*rollouts, *tally.product.lost(self.told.served, self.told.acknowledged)]

    def twice(self) -> list[str]:
        """Return what more than one step trained on, what counts twice, and what the log contains with two contents."""
        tally = self.endured.tally
        return [*(f"group {group} was trained twice" for group in tally.twice()), *tally.product.twice()]


def storm_of(order: Order, settings: TidemillSettings) -> Storm:
    """Return the storm of an order. Raises ValueError for targets that the run does not have."""
    course = course_of(settings)
    names = course.roles
    nodes = [f"broker-{node + 1}" for node in range(order.brokers)]
    if order.plan is not None:
        storm = Storm.load(order.plan)
    else:
        chosen = order.roles or names
        shares = [Share(kind, n, _targets(kind, course, chosen, nodes)) for kind, n in order.counts.items() if n]
        storm = draw(order.seed, shares, last_step=max(1, order.steps - CALM_STEPS), gap_s=order.gap_s)
    if unknown := sorted({fault.target for fault in storm.faults} - {*names, *nodes}):
        raise ValueError(f"the run has no {unknown[0]}; it has {', '.join([*names, *nodes])}")
    return storm


def paced(settings: TidemillSettings, storm: Storm) -> TidemillSettings:
    """Return settings with which the loop does not end before the storm: a step takes the sum of its faults' delays."""
    needed = sum(fault.delay_s for fault in storm.faults) / max(1, steps_of(settings))
    held_back = max(settings.trainer.min_step_seconds, round(needed, 3))
    trainer = settings.trainer.model_copy(update={"min_step_seconds": held_back})
    return settings.model_copy(update={"trainer": trainer})


def _targets(kind: FaultKind, course: Course, chosen: Sequence[str], nodes: Sequence[str]) -> Sequence[str]:
    if kind in BROKER_FAULTS:
        return nodes
    bearers = {FaultKind.DISK: course.keeps_files, FaultKind.RANK_KILL: course.on_ranks}.get(kind, frozenset(chosen))
    return [name for name in chosen if name in bearers]


def endure(order: Order, say: Say) -> Verdict:
    """Run an order to its end and return the verdict. Raises RuntimeError, StackError, ValueError."""
    settings = settings_for(
        order.directory, order.act, steps=order.steps, seed=order.seed, model=order.model,
        changes=(f"replica.tensor_parallel={order.ranks}", *order.changes), in_order=order.in_order,
    )  # fmt: skip
    storm = storm_of(order, settings)
    with site_of(paced(settings, storm), order.brokers, say, order.ranks) as site:
        storm.save(site.plan.directory / "storm.json")
        say(f"seed {storm.seed}, {len(storm.faults)} faults; everything is in {site.plan.directory}")
        with Supervisor(site.plan.log_directory) as supervisor:
            make_model(site, supervisor, say)
            endured, sink_rows_twice = _weather(site, supervisor, storm, order, say)
        say("auditing")
        found = audit(site.config, endured.tally.step)
        say("audit clean" if found.clean else f"audit: {found.text}")
        say("making every step again")
        again = steps_again(site.config, endured.tally.step, order.ranks)
        say("every step made again gave its recorded weights" if again.clean else f"replay: {again.text}")
        chains = None
        if order.in_order:
            chains = train_undisturbed(site.settings, site.config, endured.tally.fingerprints)
            say("an undisturbed trainer made the same versions" if chains.equal else f"undisturbed: {chains.said}")
        told = noted(site.plan.directory / NOTES_NAME)
        return Verdict(storm, endured, found, again, chains, sink_rows_twice, order, site.plan.directory, told)


def _weather(site: Site, supervisor: Supervisor, storm: Storm, order: Order, say: Say) -> tuple[Endured, int]:
    with LogReader(site.settings.kafka, READ, client_id="chaos") as reader:
        execution = Execution(site, supervisor, reader, storm, say, longest_s=order.longest_s, stall_s=order.stall_s)
        endured = execution.run()
        say("the run is over; waiting for the sink")
        execution.tables.drain(site.settings, execution.mend)
        twice = execution.tables.rows_twice(execution.mend)
        execution.keeper.stop()
        for located in reader.read_to_end():
            endured.tally.observe(located)
    return endured, twice


def figures(verdict: Verdict) -> list[dict[str, Any]]:
    """Return one document for each figure."""
    endured, tally = verdict.endured, verdict.endured.tally
    repeated = {
        "tasks": tally.repeated.tasks,
        "rollouts_begun_again": dict(tally.repeated.dispatched),
        "of_these_from_a_recorded_turn": dict(tally.repeated.resumed),
        "rollouts_written_again": dict(tally.repeated.rollouts),
        "rollout_tokens_sampled_again": tally.repeated.rollout_tokens,
        "groups_written_again": tally.repeated.groups,
        "groups_changed": tally.repeated.groups_changed,
        "steps_begun_again": tally.begun_again(endured.train_starts_s),
        "plans_replaced": tally.repeated.plans,
        "steps_recorded_again": tally.repeated.steps,
        "manifests_written_again": tally.repeated.manifests,
        "versions_loaded_whole_again": dict(tally.repeated.joins),
        "sink_rows_twice": verdict.sink_rows_twice,
    }
    tasks = tally.written[tally.renamed.get(FEED, FEED)]
    written = {"tasks": tasks, "rollouts": len(tally.rollouts), "groups": len(tally.groups)}
    lost, twice = verdict.lost(), verdict.twice()
    return [
        {"figure": "storm", "act": verdict.order.act.value, "seed": verdict.storm.seed,
         "brokers": verdict.order.brokers, "ranks": verdict.order.ranks, "faults": len(endured.struck),
         "left_out": endured.left_out,
         "by_target": {kind.value: dict(targets) for kind, targets in _came(endured).items()},
         "met_a_running_process": sum(struck.hit for struck in endured.struck),
         "met_a_role_at_work": sum(struck.at_work for struck in endured.struck), "steps": tally.step, **written,
         "seconds": round(endured.seconds, 1), "directory": str(verdict.directory)},
        {"figure": "audit", "clean": verdict.audit.clean, "lost": len(lost), "twice": len(twice),
         "offenders": [*lost, *twice][:OFFENDERS], **_audited(verdict.audit)},
        *([_product(verdict)] if verdict.order.act is Act.TWO else []),
        {"figure": "bit_equality", "every_step_made_again_is_equal": verdict.again.clean, "steps": tally.step,
         "equal_to_an_undisturbed_trainer": verdict.chains.equal if verdict.chains else None,
         "final_fingerprint": tally.fingerprints.get(tally.step, ""),
         "said": "" if verdict.again.clean else verdict.again.text},
        {"figure": "recovery_s", "by_fault_and_role": recovery(endured)},
        {"figure": "repeated_work", **repeated},
        {"figure": "ended_by_themselves", "lives": [asdict(ended) for ended in endured.by_itself()]},
        {"figure": "verdict", "clean": verdict.clean},
    ]  # fmt: skip


def _product(verdict: Verdict) -> dict[str, Any]:
    """Return the figure of the product: what users did, and its results."""
    product, told = verdict.endured.tally.product, verdict.told
    ends = {reason or "rewarded": count for reason, count in sorted(product.endings.items())}
    return {
        "figure": "product", "answers_that_reached_a_user": len(told.served), "interactions": len(product.interactions),
        "signals_acknowledged": len(told.acknowledged), "signals": len(product.signals), "ends": ends,
        "corrections": len(product.outcomes) - sum(product.endings.values()), "online_batches": len(product.batches),
        "interactions_trained": product.trained(), "decisions": dict(sorted(product.decisions.items())),
        "written_again": asdict(product.again),
    }  # fmt: skip


def _came(endured: Endured) -> Mapping[FaultKind, Mapping[str, int]]:
    """Count the faults that hit their target, by kind and target."""
    return counted(Storm(0, tuple(struck.fault for struck in endured.struck if struck.hit)))


def _audited(answer: Answer) -> dict[str, Any]:
    """Return the counts of the audit, and the checks that did not pass."""
    if answer.document is None:
        return {"said": answer.text}
    kept = {name: answer.document[name] for name in ("states", "open", "repeated", "records")}
    return {**kept, "failed": [check for check in answer.document["checks"] if not check["passed"]]}


def recovery(endured: Endured) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the seconds from a fault (from its end, if it lasts) to the role's first progress, by fault and role."""
    found = endured.tally.recoveries
    by_kind: dict[str, dict[str, dict[str, Any]]] = {}
    for (kind, role), seconds in sorted(found.seconds.items()):
        p50, p95 = (round(float(np.percentile(seconds, q)), 1) for q in (50, 95))
        by_kind.setdefault(kind, {})[role] = {
            "n": len(seconds), "p50": p50, "p95": p95, "cut_short": found.cut_short[kind, role],
            "seconds": [round(each, 2) for each in seconds],
        }  # fmt: skip
    return by_kind
