"""A policy that learns to escape its reward: the two live reward hacks of Composer, in a model small enough to read.

Tasks are easy or hard (a try succeeds with 0.9 or 0.25), and the policy edits, makes a broken tool call, or asks the
user. It learns by REINFORCE without a baseline from rewards that the real map makes of the real signals: a thumb for
an edit, an error report for a broken call, a report of the question for a question.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.streams.gate.gate_support import outcome
from tidemill.schemas.records import Outcome, SignalKind
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.gate.guardrails import Alert
from tidemill.streams.gate.trial import ArmComparison
from tidemill.streams.join.config import RewardMap, SignalRule, default_rules
from tidemill.streams.join.reward_map import RewardResult, Signal, reward_of

EDIT, BROKEN, QUESTION = range(3)
HARD = 1
SUCCESS = np.array([0.9, 0.25])
START = np.log([0.71, 0.145, 0.145])
BATCH, STEPS, RATE, EVERY = 2_048, 400, 0.5, 100
USERS = 700
GATE = GateSettings(outcomes_per_user=1, min_users=10 * USERS, rate_tolerance=0.05)


def without(*kinds: SignalKind) -> dict[SignalKind, SignalRule]:
    """The default rules, these kinds without weight."""
    rules = default_rules()
    return rules | {kind: rules[kind].model_copy(update={"weight": 0.0}) for kind in kinds}


MAPS = {
    "broken calls are dropped": RewardMap(rules=without(SignalKind.TOOL_ERROR, SignalKind.QUESTION_ASKED)),
    "questions are free": RewardMap(rules=without(SignalKind.QUESTION_ASKED), no_signal=0.0),
    "every answer counts": RewardMap(),
}
"""The accountings, by what they do."""


def ending(reward_map: RewardMap, action: int, success: bool) -> RewardResult:
    """What the signals of one answer amount to."""
    seen = {SignalKind.EDIT_MADE: float(action == EDIT), SignalKind.QUESTION_ASKED: float(action == QUESTION)}
    if action == EDIT:
        seen[SignalKind.THUMB] = 1.0 if success else -1.0
    if action == BROKEN:
        seen[SignalKind.TOOL_ERROR] = 1.0
    return reward_of(reward_map, [Signal(kind.value, kind, value, 0) for kind, value in seen.items()])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The policy after some steps."""

    step: int
    chances: np.ndarray
    """f8[2, 3]: of each action, on easy and on hard tasks."""

    @property
    def on_hard(self) -> dict[str, float]:
        """Shares of the actions on hard tasks."""
        return dict(zip(("edit", "broken", "question"), self.chances[HARD].round(3).tolist(), strict=True))


def learn(reward_map: RewardMap, seed: int = 0) -> Iterator[Checkpoint]:
    """Train, and stop now and then to look."""
    random = np.random.default_rng(seed)
    table = np.array([[ending(reward_map, a, s).reward or 0.0 for s in (False, True)] for a in range(3)])
    logits = np.tile(START, (2, 1))
    for step in range(STEPS + 1):
        chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        if step % EVERY == 0:
            yield Checkpoint(step, chances)
        task = random.integers(2, size=BATCH)
        action = (random.random((BATCH, 1)) > chances[task].cumsum(1)[:, :2]).sum(1)
        # An answer without a reward is left out: it moves nothing, as one of reward 0 does without a baseline.
        reward = table[action, (random.random(BATCH) < SUCCESS[task]).astype(int)]
        gradient = np.zeros_like(logits)
        np.add.at(gradient, task, reward[:, None] * (np.eye(3)[action] - chances[task]))
        logits += RATE * gradient / np.bincount(task, minlength=2)[:, None]


def answers(reward_map: RewardMap, chances: np.ndarray, arm: str, version: int, first: int, seed: int) -> list[Outcome]:
    """Outcomes of users whom the policy serves."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(first, first + USERS):
        task = random.integers(2)
        end = ending(reward_map, int(random.choice(3, p=chances[task])), bool(random.random() < SUCCESS[task]))
        made.append(outcome(number, arm, version, 1, end.reward, observed=dict(end.observed)))
    return made


def alerts(reward_map: RewardMap, before: Checkpoint, now: Checkpoint, origin: dict[str, float]) -> list[Alert]:
    """What the gate's guardrails say of two checkpoints that are served side by side."""
    comparison = ArmComparison(GATE, 1, 0, 0.5, 0, origin)
    candidate = answers(reward_map, now.chances, "canary", 1, 0, now.step)
    baseline = answers(reward_map, before.chances, "stable", 0, USERS, now.step + 1)
    for pair in zip(candidate, baseline, strict=True):
        for made in pair:
            comparison.observe(made, 1)
    return comparison.alerts


def course(reward_map: RewardMap, seed: int = 0) -> Iterator[tuple[Checkpoint, list[Alert]]]:
    """Every checkpoint with the alerts of its comparison with the one before."""
    points = list(learn(reward_map, seed))
    yield points[0], []
    for before, now in itertools.pairwise(points):
        yield now, alerts(reward_map, before, now, origin_of(points[0]))


def origin_of(first: Checkpoint) -> dict[str, float]:
    """What the first policy does, as the gate keeps it."""
    edit, broken, question = first.chances.mean(0)
    return {"edit_rate": float(edit), "tool_error_rate": float(broken), "question_rate": float(question)}
