"""A policy that learns to avoid bad rewards: the two reward hacks seen in production with Composer, in a small model.

Tasks are easy or hard (an edit succeeds with probability 0.9 or 0.25). The policy edits, makes a broken tool call, or
asks the user. It learns by REINFORCE without a baseline. The real reward map computes the rewards from the real
signals: a thumb for an edit, an error report for a broken call, a question report for a question.
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
    """Return the default rules, with weight 0 for these kinds."""
    rules = default_rules()
    return rules | {kind: rules[kind].model_copy(update={"weight": 0.0}) for kind in kinds}


MAPS = {
    "broken calls are dropped": RewardMap(rules=without(SignalKind.TOOL_ERROR, SignalKind.QUESTION_ASKED)),
    "questions are free": RewardMap(rules=without(SignalKind.QUESTION_ASKED), no_signal=0.0),
    "every answer counts": RewardMap(),
}
"""Reward maps by their effect."""


def ending(reward_map: RewardMap, action: int, success: bool) -> RewardResult:
    """Compute the reward result of one answer from its signals."""
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
    """f8[2, 3]: the probability of each action, on easy and on hard tasks."""

    @property
    def on_hard(self) -> dict[str, float]:
        """The probability of each action on hard tasks."""
        return dict(zip(("edit", "broken", "question"), self.chances[HARD].round(3).tolist(), strict=True))


def learn(reward_map: RewardMap, seed: int = 0) -> Iterator[Checkpoint]:
    """Train, and yield a checkpoint every `EVERY` steps."""
    random = np.random.default_rng(seed)
    table = np.array([[ending(reward_map, a, s).reward or 0.0 for s in (False, True)] for a in range(3)])
    logits = np.tile(START, (2, 1))
    for step in range(STEPS + 1):
        chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        if step % EVERY == 0:
            yield Checkpoint(step, chances)
        task = random.integers(2, size=BATCH)
        action = (random.random((BATCH, 1)) > chances[task].cumsum(1)[:, :2]).sum(1)
        # An answer without a reward is not trained: same as reward 0, which changes nothing without a baseline.
        reward = table[action, (random.random(BATCH) < SUCCESS[task]).astype(int)]
        gradient = np.zeros_like(logits)
        np.add.at(gradient, task, reward[:, None] * (np.eye(3)[action] - chances[task]))
        logits += RATE * gradient / np.bincount(task, minlength=2)[:, None]


def answers(reward_map: RewardMap, chances: np.ndarray, arm: str, version: int, first: int, seed: int) -> list[Outcome]:
    """Return the outcomes of `USERS` users that the policy serves."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(first, first + USERS):
        task = random.integers(2)
        end = ending(reward_map, int(random.choice(3, p=chances[task])), bool(random.random() < SUCCESS[task]))
        made.append(outcome(number, arm, version, 1, end.reward, observed=dict(end.observed)))
    return made


def alerts(reward_map: RewardMap, before: Checkpoint, now: Checkpoint, origin: dict[str, float]) -> list[Alert]:
    """Return the guardrail alerts of the gate for two checkpoints that are served at the same time."""
    comparison = ArmComparison(GATE, 1, 0, 0.5, 0, origin)
    candidate = answers(reward_map, now.chances, "canary", 1, 0, now.step)
    baseline = answers(reward_map, before.chances, "stable", 0, USERS, now.step + 1)
    for pair in zip(candidate, baseline, strict=True):
        for made in pair:
            comparison.observe(made, 1)
    return comparison.alerts


def course(reward_map: RewardMap, seed: int = 0) -> Iterator[tuple[Checkpoint, list[Alert]]]:
    """Yield every checkpoint with the alerts of its comparison with the previous one."""
    points = list(learn(reward_map, seed))
    yield points[0], []
    for before, now in itertools.pairwise(points):
        yield now, alerts(reward_map, before, now, origin_of(points[0]))


def origin_of(first: Checkpoint) -> dict[str, float]:
    """Return the rates of the first policy in the form in which the gate stores them."""
    edit, broken, question = first.chances.mean(0)
    return {"edit_rate": float(edit), "tool_error_rate": float(broken), "question_rate": float(question)}
