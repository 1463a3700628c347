"""The reward of one interaction from its signals: a pure function of the map and the signals, independent of order.

Invariants: the map decides the reward without signals, it is never silently zero; the latest of several signals of one
kind counts; a corrected or withdrawn event does not count, even if it is read after its correction.

Target rate: accepted 1-rate, rejected -rate, not shown 0 (Cursor, "Improving Cursor Tab with online RL").
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

from tidemill.schemas.record_class import record
from tidemill.schemas.records import SignalKind
from tidemill.schemas.signals import LEGAL, YES_OR_NO
from tidemill.streams.join.config import RewardMap, SignalRule

HASH_DIGITS = 12
_NAMES = {kind: kind.value for kind in SignalKind}
"""Cached strings: reading `value` of each kind takes six times as long."""


@record(frozen=True, slots=True)
class Signal:
    """One signal about an interaction."""

    event_id: str
    kind: SignalKind
    value: float | None
    """None: the event that it corrects is withdrawn."""
    observed_at: int
    """Event time, microseconds."""
    corrects: str | None = None
    offset: int = 0
    """Its offset in its partition of the feedback topic."""


CountedSignal = tuple[Signal, float]
"""A signal that is part of the reward, and its contribution."""


@record(frozen=True, slots=True)
class RewardResult:
    """The reward of an interaction from its signals."""

    reward: float | None
    """None: no signal counts alone, and the map excludes such interactions."""
    uses: tuple[CountedSignal, ...]
    """Sorted by event id."""
    observed: Mapping[str, float]
    """The value of each kind that was observed, with or without a weight."""


def map_version(reward_map: RewardMap) -> str:
    """Return name and hash of a map: equal for equal settings."""
    canonical = json.dumps(reward_map.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return f"{reward_map.name}-{hashlib.sha256(canonical.encode()).hexdigest()[:HASH_DIGITS]}"


def reward_of(reward_map: RewardMap, signals: Iterable[Signal]) -> RewardResult:
    """Return the reward of an interaction with these signals, which must be within the horizons of their kinds."""
    latest = standing(signals)
    rules, targeted = reward_map.rules, reward_map.target_kinds
    uses: list[CountedSignal] = []
    enough = False
    for kind, signal in latest.items():
        rule = rules.get(kind)
        if rule is not None and rule.weight and kind not in targeted:
            uses.append((signal, rule.weight * _read(rule, signal)))
            # A "no" of a yes-or-no kind (nothing asked, nothing done) is reported for every answer: it is no opinion.
            silent = not signal.value and LEGAL[kind] is YES_OR_NO
            enough = enough or (rule.alone and not silent)
    if (target := reward_map.target_rate) is not None:
        accepted, shown = latest.get(target.accepted_by), latest.get(target.shown_by)
        if accepted is not None:
            is_accepted = _value(accepted) >= target.accepted_from
            uses.append((accepted, 1 - target.rate if is_accepted else -target.rate))
        elif shown is not None:
            uses.append((shown, -target.rate if shown.value else 0.0))
        enough = enough or accepted is not None or shown is not None
    observed = {_NAMES[kind]: _value(signal) for kind, signal in latest.items()}
    if not enough:
        reward = None if reward_map.no_signal == "exclude" else reward_map.no_signal
        return RewardResult(reward, (), observed)
    total = math.fsum([contribution for _, contribution in uses])
    bounded = min(max(total, reward_map.low), reward_map.high)
    return RewardResult(bounded, tuple(sorted(uses, key=lambda use: use[0].event_id)), observed)


def standing(signals: Iterable[Signal]) -> dict[SignalKind, Signal]:
    """Return the valid signal of each kind: not corrected by another, and the latest (at equal times, by event id)."""
    distinct = list(signals)
    corrected = {(signal.kind, signal.corrects) for signal in distinct if signal.corrects is not None}
    held = [s for s in distinct if s.value is not None and (s.kind, s.event_id) not in corrected]
    return {signal.kind: signal for signal in sorted(held, key=lambda s: (s.observed_at, s.event_id))}


def _value(signal: Signal) -> float:
    if signal.value is None:
        raise ValueError(f"signal {signal.event_id!r} is a withdrawal and has no value")
    return signal.value


def _read(rule: SignalRule, signal: Signal) -> float:
    value = _value(signal)
    match rule.reading:
        case "linear":
            return value
        case "clipped":
            return min(max(value, rule.low), rule.high)
        case "threshold":
            return rule.high if value >= rule.threshold else rule.low
