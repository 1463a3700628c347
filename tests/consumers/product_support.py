"""Records of product traffic for the tests of rights, trace, sink and queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.consumers.sink_support import START_US, ack, segment, step
from tests.records import build
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic, feedback_key
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer, partition_of

SECOND = 1_000_000


def interaction(
    name: str,
    user: str,
    *,
    arm: str = "stable",
    version: int = 1,
    served_at: int = START_US,
    claim: r.Claim | None = None,
) -> r.Interaction:
    return build(
        r.Interaction, interaction_id=name, user_id=user, arm=arm, propensity=0.9, claim=claim,
        segments=[] if claim else [segment([version])], prompt_tokens=3, sampled_tokens=2, version_min=version,
        version_max=version, replica_id="replica-0", first_token_ms=20.0, latency_ms=100.0, served_at=served_at,
    )  # fmt: skip


def feedback(
    name: str,
    interaction_id: str,
    user: str,
    value: float | None = 1.0,
    *,
    kind: r.SignalKind = r.SignalKind.THUMB,
    observed_at: int = START_US + SECOND,
    corrects: str | None = None,
) -> r.Feedback:
    return r.Feedback(name, interaction_id, user, kind, value, observed_at, "sdk", corrects)


def outcome(
    served: r.Interaction,
    reward: float | None = None,
    exclusion: str = "",
    *,
    signals: Sequence[r.SignalUse] = (),
    observed: dict[str, float] | None = None,
    place: tuple[int, int] = (0, 0),
    revision: int = 0,
    previous: float | None = None,
) -> r.Outcome:
    same = ("interaction_id", "run_id", "branch", "user_id", "arm", "version_min", "version_max", "sampled_tokens",
            "latency_ms", "served_at")  # fmt: skip
    return build(
        r.Outcome, **{name: getattr(served, name) for name in same}, topic=Topic.INTERACTIONS.value,
        partition=place[0], offset=place[1], reward=reward, exclusion=exclusion, signals=list(signals),
        observed=observed if observed is not None else {use.kind.value: use.value for use in signals},
        map_version="default/abc", revision=revision, previous_reward=previous,
        feedback_at=served.served_at + SECOND if signals else None, closed_at=served.served_at + 10 * SECOND,
    )  # fmt: skip


def use(event_id: str, value: float = 1.0, kind: r.SignalKind = r.SignalKind.THUMB) -> r.SignalUse:
    return r.SignalUse(kind, event_id, value, value, Topic.FEEDBACK.value, 0, 0)


def member(ended: r.Outcome, place: tuple[int, int] = (0, 0), *, correction: bool = False) -> r.OnlineMember:
    reward = ended.reward or 0.0
    same = ("interaction_id", "user_id", "sampled_tokens", "version_min", "version_max", "arm", "feedback_at")
    return build(
        r.OnlineMember, **{name: getattr(ended, name) for name in same}, topic=Topic.INTERACTIONS.value,
        partition=place[0], offset=place[1], correction=correction,
        reward=reward - (ended.previous_reward or 0.0) if correction else reward,
    )  # fmt: skip


def online_batch(
    sequence: int, members: Sequence[r.OnlineMember], *, version: int = 1, dropped: dict[str, int] | None = None
) -> r.OnlineBatch:
    return build(
        r.OnlineBatch, batch_id=f"run/main/{sequence}", sequence=sequence, version=version,
        members=sorted(members, key=lambda one: one.interaction_id), tokens=sum(one.sampled_tokens for one in members),
        closed_by=r.BatchClose.TOKENS, dropped=dropped or {},
        selection={"served/reward": 0.25, "trained/reward": 0.5}, map_version="default/abc", opened_at=START_US,
        closed_at=START_US + (20 + sequence) * SECOND,
    )  # fmt: skip


def decision(
    verdict: r.GateVerdict, version: int | None, reason: str = "better", numbers: dict[str, float] | None = None
) -> r.GateDecision:
    return r.GateDecision("run", "main", verdict, version, reason, "gate", numbers or {}, START_US + 60 * SECOND)


def request(user: str, wish: r.UserWish, at: int) -> r.UserRequest:
    return r.UserRequest(f"{user}/{wish.value}/{at}", user, wish, "tester", at)


class ProductLog:
    """Writes product records to the topics and partitions that their producers use."""

    def __init__(self, kafka: KafkaSettings, partitions: int) -> None:
        self._producer = RecordProducer(kafka, "test-product")
        self._partitions = partitions

    def write(self, *records: r.Interaction | r.Feedback | r.Outcome | r.OnlineBatch) -> None:
        """Write records and wait until the log has acknowledged them."""
        for record in records:
            match record:
                case r.Interaction():
                    self._producer.send(Topic.INTERACTIONS, record, key=record.interaction_id)
                case r.Feedback():
                    key = feedback_key(record.interaction_id, record.event_id)
                    place = partition_of(record.interaction_id, self._partitions)
                    self._producer.send(Topic.FEEDBACK, record, key=key, partition=place)
                case r.Outcome():
                    self._producer.send(Topic.OUTCOMES, record, key=record.interaction_id)
                case r.OnlineBatch():
                    self._producer.send(Topic.ONLINE_BATCHES, record, key=record.batch_id)
        self._producer.flush()


def product_run() -> list[r.Record]:
    """Return records of seven answers in two arms, two batches and one step; many twice, as in at-least-once delivery.

    i0 and i1 are in the trained batch; the trainer excluded i1, and its reward is corrected later. i2 has no signal,
    i3 is from a bot, i5 is open. Of i4 and i6, one was dropped and one waits.
    """
    served = [interaction(f"i{n}", f"user{n}", arm="canary" if n > 3 else "stable") for n in range(7)]
    made = {0: 0.0, 4: 0.0, 6: 1.0}
    rewarded = {
        n: outcome(served[n], 1.0, signals=[use(f"e{n}")], observed={"thumb": 1.0, "edit_made": made[n]}) for n in made
    }
    down = outcome(served[1], -1.0, signals=[use("e1", -1.0)], observed={"thumb": -1.0, "edit_made": 1.0})
    corrected = outcome(served[1], 1.0, signals=[use("e2")], revision=1, previous=-1.0)
    excluded = [outcome(served[2], None, "no_signal"), outcome(served[3], None, "bot")]
    first = online_batch(0, [member(rewarded[0]), member(down)])
    second = online_batch(1, [member(corrected, correction=True)], dropped={"old_version": 1, "erased": 1})
    trained = step(
        2,
        [r.StepInput(first.batch_id, Topic.ONLINE_BATCHES.value, 0, 0)],
        [r.StepExclusion("i1", Topic.INTERACTIONS.value, 0, 1, "stale", 1)],
    )
    return [
        *served,
        served[0],
        feedback("e0", "i0", "user0"),
        feedback("e0", "i0", "user0"),
        feedback("e1", "i1", "user1", -1.0),
        feedback("made", "i1", "user1", kind=r.SignalKind.EDIT_MADE),
        feedback("e2", "i1", "user1", corrects="e1"),
        feedback("e4", "i4", "user4"),
        rewarded[0],
        rewarded[0],
        down,
        *excluded,
        rewarded[4],
        rewarded[6],
        corrected,
        first,
        first,
        second,
        trained,
        trained,
        replace(ack(3, r.AckStatus.PROVED), at=START_US + 31 * SECOND),
        replace(ack(4, r.AckStatus.PROVED), at=START_US + 90 * SECOND),
        decision(r.GateVerdict.CANARY, 2, "on trial", {"share": 0.1}),
        decision(r.GateVerdict.PROMOTE, 2),
    ]


def two_people() -> list[r.Record]:
    """Return an interaction each of ann and bob, the outcomes, their and a judge's signals, and the batch with both."""
    records: list[r.Record] = []
    ends = []
    for user in ("ann", "bob"):
        served = interaction(f"i-{user}", user)
        ends.append(outcome(served, 1.0, signals=[use("e")]))
        records += [served, ends[-1], feedback("e", served.interaction_id, user), feedback("j", f"i-{user}", "judge")]
    return [*records, online_batch(0, [member(end) for end in ends])]
