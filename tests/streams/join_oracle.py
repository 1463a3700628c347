"""The join computed in another way: each interaction separately, from both complete logs at once.

It does not model bots or forgetting: use it for logs without bots that are shorter than the memory of the join.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from join_support import RUN_ID, SECOND_US, TwoLogs

from tidemill.schemas.records import Feedback, Interaction, SignalKind, UserRequest, UserWish
from tidemill.streams.join.config import JoinSettings

Ending = tuple[int, float | None, str, int]
"""Revision, reward, exclusion, event time."""


@dataclass(frozen=True)
class Placed:
    at: int
    rank: int
    offset: int
    record: object
    key: bytes | None


def in_order(logs: TwoLogs) -> list[Placed]:
    placed = []
    for rank, records in enumerate(logs.inputs.values()):
        clock = 0
        for found in records:
            clock = max(clock, found.timestamp_ms * 1000)
            record = "tombstone" if found.value is None else found.record
            placed.append(Placed(clock, rank, found.offset, record, found.key))
    return sorted(placed, key=lambda p: (p.at, p.rank, p.offset))


def endings(logs: TwoLogs, settings: JoinSettings) -> dict[str, list[Ending]]:
    """Return all outcomes of each interaction of the run."""
    placed = in_order(logs)
    first: dict[str, Placed] = {}
    for p in placed:
        if isinstance(p.record, Interaction):
            first.setdefault(p.record.interaction_id, p)
    return {name: _endings_of(p.record, p, placed, settings) for name, p in first.items() if p.record.run_id == RUN_ID}


def _endings_of(served: Interaction, arrival: Placed, placed: list[Placed], settings: JoinSettings) -> list[Ending]:
    requests = [p for p in placed if isinstance(p.record, UserRequest) and p.record.user_id == served.user_id]
    if _erased_by([p for p in requests if p.at <= arrival.at and _before(p, arrival)], served):
        return [(0, None, "erased", arrival.at)]
    if arrival.at - served.served_at > settings.late_s * SECOND_US:
        return [(0, None, "too_late", arrival.at)]
    full = round(max(served.served_at + 20 * SECOND_US, arrival.at) + settings.grace_s * SECOND_US)
    votes: list[tuple[int, Feedback]] = []
    found: list[Ending] = []
    for at, event, place in _timeline(served, arrival, placed, settings):
        # Early feedback is applied at the moment when the interaction arrives.
        if not found and not _before(place, arrival) and _due(votes, full, settings, arrival.at) <= at:
            due = _due(votes, full, settings, arrival.at)
            found.append(_first_ending(served, votes, [p for p in requests if _before(p, place)], due))
        if found and found[0][2] not in ("", "no_signal"):
            break
        if event == "erase":
            return found or [(0, None, "erased", at)]
        if isinstance(event, Feedback) and event.event_id not in [vote.event_id for _, vote in votes]:
            votes.append((at, event))
            reward = _reward([vote for _, vote in votes])
            if found and reward != found[-1][1] and not _opted_out([p for p in requests if p.at <= at], served):
                found.append((found[-1][0] + 1, reward, "" if reward is not None else "no_signal", at))
    return found


def _before(p: Placed, q: Placed) -> bool:
    return (p.at, p.rank, p.offset) < (q.at, q.rank, q.offset)


def _timeline(
    served: Interaction, arrival: Placed, placed: list[Placed], settings: JoinSettings
) -> Iterable[tuple[int, object, Placed]]:
    """Yield the events of an interaction after its arrival, in order: votes that count, "erase", or None for others."""
    for p in placed:
        match p.record:
            case Feedback() as vote if vote.interaction_id == served.interaction_id and _counts(vote, served):
                if not _before(p, arrival):
                    yield p.at, vote, p
                elif p.at + settings.early_wait_s * SECOND_US > arrival.at and not _was_erased(p, arrival, placed):
                    yield arrival.at, vote, p
            case UserRequest() as demand if not _before(p, arrival) and _erased_by([p], served):
                if demand.user_id == served.user_id:
                    yield p.at, "erase", p
            case "tombstone" if not _before(p, arrival) and p.key == served.interaction_id.encode():
                yield p.at, "erase", p
            case _:
                if not _before(p, arrival):
                    yield p.at, None, p


def _was_erased(vote: Placed, arrival: Placed, placed: list[Placed]) -> bool:
    """Whether an early vote was erased, by its user's request or a tombstone, before the interaction arrived."""
    return any(
        (_demands(p, vote.record) or (p.record == "tombstone" and p.key == vote.record.interaction_id.encode()))
        and _before(vote, p)
        and _before(p, arrival)
        for p in placed
    )


def _demands(p: Placed, vote: Feedback) -> bool:
    return (
        isinstance(p.record, UserRequest)
        and (p.record.wish, p.record.user_id) == (UserWish.ERASE, vote.user_id)
        and min(p.record.at, p.at) >= vote.observed_at
    )


HORIZONS = {SignalKind.THUMB: 10, SignalKind.RETRY: 20, SignalKind.TOOL_ERROR: 10, SignalKind.EDIT_MADE: 10}
WEIGHTS = {SignalKind.THUMB: 1.0, SignalKind.RETRY: -0.5, SignalKind.TOOL_ERROR: -1.0}


def _counts(vote: Feedback, served: Interaction) -> bool:
    earliest = served.served_at - 10_000 - 2 * SECOND_US
    return vote.user_id == served.user_id and (
        earliest <= vote.observed_at <= served.served_at + HORIZONS[vote.kind] * SECOND_US
    )


def _holding(votes: list[Feedback]) -> list[Feedback]:
    left = [
        v
        for v in votes
        if v.value is not None and not any(w.corrects == v.event_id and w.kind is v.kind for w in votes)
    ]
    newest = []
    for vote in left:
        rivals = [(w.observed_at, w.event_id) for w in left if w.kind is vote.kind]
        if (vote.observed_at, vote.event_id) == max(rivals):
            newest.append(vote)
    return newest


def _reward(votes: list[Feedback]) -> float | None:
    told = [WEIGHTS[v.kind] * v.value for v in _holding(votes) if v.kind in WEIGHTS]
    return max(-1.0, min(1.0, sum(told))) if told else None


def _due(votes: list[tuple[int, Feedback]], full: int, settings: JoinSettings, arrived: int) -> int:
    """Return the time at which an interaction ends, given its votes so far."""
    holding = _holding([vote for _, vote in votes])
    thumbs = [at for at, vote in votes if vote in holding and vote.kind is SignalKind.THUMB]
    last = max([arrived, *(at for at, _ in votes)])
    ends = min([full, *(at + round(settings.settle_s * SECOND_US) for at in thumbs)])
    return max(ends, last) if votes else ends


def _erased_by(requests: list[Placed], served: Interaction) -> bool:
    return any(
        p.record.wish is UserWish.ERASE
        and p.record.user_id == served.user_id
        and min(p.record.at, p.at) >= served.served_at
        for p in requests
    )


def _opted_out(requests: list[Placed], served: Interaction) -> bool:
    words = [
        (min(p.record.at, p.at), p.record.request_id, p.record.wish)
        for p in requests
        if p.record.wish is not UserWish.ERASE and min(p.record.at, p.at) <= served.served_at
    ]
    return bool(words) and max(words)[2] is UserWish.OPT_OUT


def _first_ending(served: Interaction, votes: list[tuple[int, Feedback]], requests: list[Placed], due: int) -> Ending:
    if not served.consent:
        return 0, None, "no_consent", due
    if _opted_out(requests, served):
        return 0, None, "opted_out", due
    if not served.sampled_tokens:
        return 0, None, "no_tokens", due
    reward = _reward([vote for _, vote in votes])
    return 0, reward, "" if reward is not None else "no_signal", due
