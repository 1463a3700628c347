"""A small sound run, written topic by topic, and the faults that can be planted in it.

`PLANTED_FAULTS` names each fault and the one check of the audit that must find it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tests.consumers.product_support import interaction, member, online_batch, outcome, request
from tests.consumers.sink_support import ack, manifest
from tests.records import build
from tidemill.consumers.operate.audit.audit import AuditReport, judge
from tidemill.consumers.operate.audit.endings import AuditedRun, AuditRules
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.streams.assembly import GroupAssembler
from tidemill.streams.config import StreamSettings
from tidemill.streams.machine import OutputRecord, Rejected

RUN = "run"
SECOND = 1_000_000
START_US = (now_us() // SECOND - 7200) * SECOND
"""Recent, because a broker deletes records past their topic's retention."""
TIME_US = 60 * SECOND
"""Time from the issue of a task to its deadline."""
OVERDUE_US = 662 * SECOND
"""Time from the issue of a task until it is overdue."""
TOKENS = 4
"""Tokens of each completed rollout."""
INCARNATION = "first"
GARBAGE = b"no record at all"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a partition, or bytes that are not a record."""

    key: bytes
    value: bytes | None
    timestamp_ms: int


@lru_cache(maxsize=4096)
def decoded(value: bytes | None) -> tuple[r.Record | None, str]:
    """Return the record of a value, or the reason why there is none."""
    try:
        return Codec().decode(value), ""
    except DecodeError as failure:
        return None, str(failure)


class WrittenLog:
    """A log in memory: partition 0 of each topic, and the dead letters."""

    def __init__(self) -> None:
        self.codec = Codec()
        self.entries: defaultdict[Topic, list[Entry]] = defaultdict(list)
        self.low: dict[Topic, int] = {}
        """First offset that is kept, if it is not 0."""
        self.hidden: set[tuple[Topic, int]] = set()
        """Offsets that no reader receives."""
        self.letters: dict[tuple[Topic, int], str] = {}

    def put(self, record: r.Record, *, at: int, key: str | None = None) -> int:
        """Append a record at an event time in microseconds; return its offset."""
        # A record type that belongs to several topics is written to the topic whose first type it is.
        holders = sorted(CATALOGUE.values(), key=lambda spec: spec.values[0] is not type(record))
        spec = next(spec for spec in holders if isinstance(record, spec.values))
        return self.put_bytes(spec.topic, key or str(getattr(record, spec.key)), self.codec.encode(record), at)

    def put_bytes(self, topic: Topic, key: str, value: bytes | None, at: int) -> int:
        """Append bytes, or a tombstone; return their offset."""
        self.entries[topic].append(Entry(key.encode(), value, at // 1000))
        return len(self.entries[topic]) - 1

    def located(self, topic: Topic) -> list[ConsumedRecord]:
        """Return the records of a topic that a reader receives."""
        found = [self._located(topic, offset, entry) for offset, entry in enumerate(self.entries[topic])]
        kept = [one for one in found if one.offset >= self.low.get(topic, 0)]
        return [one for one in kept if (topic, one.offset) not in self.hidden]

    def _located(self, topic: Topic, offset: int, entry: Entry) -> ConsumedRecord:
        record, error = decoded(entry.value)
        return ConsumedRecord(topic, 0, offset, entry.timestamp_ms, entry.key, entry.value, record, error)

    def all(self) -> Iterator[ConsumedRecord]:
        """Yield every record, topic by topic."""
        for topic in self.entries:
            yield from self.located(topic)

    def change(self, topic: Topic, of: type, which: int = 0, **changes: Any) -> None:
        """Change the n-th record of a type in place; `which` may count from the end."""
        offsets = [one.offset for one in self.located(topic) if isinstance(one.record, of)]
        offset = offsets[which]
        record: Any = self._located(topic, offset, self.entries[topic][offset]).record
        value = self.codec.encode(replace(record, **changes))
        self.entries[topic][offset] = replace(self.entries[topic][offset], value=value)

    def records(self, topic: Topic, of: type) -> list[Any]:
        """Return the records of a type."""
        return [one.record for one in self.located(topic) if isinstance(one.record, of)]

    def audit(self, **rules: Any) -> AuditReport:
        """Audit the log in memory."""
        run = AuditedRun(AuditRules(run_id=RUN, **rules))
        run.expect({(topic, 0): (self.low.get(topic, 0), len(entries)) for topic, entries in self.entries.items()})
        for consumed in self.all():
            run.observe(consumed)
        run.letters = {Position(topic.value, 0, offset): why for (topic, offset), why in self.letters.items()}
        return judge(run)

    def write(self, kafka: KafkaSettings) -> None:
        """Write the whole log to an empty Kafka with one partition per topic: the offsets are the same."""
        names = Names(kafka.topic_prefix)
        with RecordProducer(kafka, "test-ledger") as producer:
            for topic, entries in self.entries.items():
                for entry in entries:
                    producer.send_bytes(names.of(topic), entry.value, key=entry.key, timestamp_ms=entry.timestamp_ms)
            for (topic, offset), why in self.letters.items():
                located = self._located(topic, offset, self.entries[topic][offset])
                send_dead_letter(producer, names, located, why, "test")


def task(name: str, size: int = 2, mode: r.Mode = r.Mode.TRAIN, at: int = START_US) -> r.Task:
    return build(r.Task, task_id=f"t-{name}", group_id=name, mode=mode, group_size=size, max_turns=4, issued_at=at,
                 deadline_at=at + TIME_US)  # fmt: skip


def of_task(given: r.Task) -> dict[str, Any]:
    """Return the fields that a task's rollouts copy from it."""
    return {name: getattr(given, name) for name in ("group_id", "task_id", "run_id")}


def rollout(of: r.Task, index: int, reward: float | None, version: int = 0, **changes: Any) -> r.Rollout:
    """Return a rollout of a task; `reward=None` means failed."""
    done = reward is not None
    played = {
        "status": r.RolloutStatus.COMPLETED, "success": bool(reward), "turns": 1, "sampled_tokens": TOKENS,
        "version_min": version, "version_max": version, "incarnation": INCARNATION,
    }  # fmt: skip
    failed = {"status": r.RolloutStatus.FAILED, "failure": "deadline", "version_min": -1, "version_max": -1}
    made = build(
        r.Rollout, **of_task(of), rollout_id=f"{of.group_id}/{index}", environment=of.environment, mode=of.mode,
        index=index, group_size=of.group_size, deadline_at=of.deadline_at, reward=reward, prompt_tokens=3,
        replica_id="replica-0", started_at=of.issued_at, finished_at=of.issued_at + SECOND,
        **(played if done else failed),
    )  # fmt: skip
    return replace(made, **changes)


def dispatch(of: r.Task) -> r.Dispatch:
    size = of.group_size
    return build(r.Dispatch, **of_task(of), indexes=list(range(size)), resumed_turns=[0] * size,
                 lease_until=of.deadline_at, at=of.issued_at)  # fmt: skip


def turn(of: r.Task, index: int, version: int) -> r.Turn:
    sampled = bytes(4 * TOKENS)
    return build(r.Turn, **of_task(of), rollout_id=f"{of.group_id}/{index}", replica_id="replica-0", n_tokens=TOKENS,
                 incarnation=INCARNATION, token_ids=sampled, logprobs=sampled,
                 spans=[r.VersionSpan(version, 0, TOKENS)], at=of.issued_at)  # fmt: skip


class RunLog(WrittenLog):
    """Writes a run's log as its roles would: the groups come from group assembly itself."""

    def __init__(self) -> None:
        super().__init__()
        self.assembler = GroupAssembler(0, RUN, StreamSettings())
        self.fingerprints = {0: "w0"}
        self.group_offsets: dict[str, list[int]] = defaultdict(list)
        self.put(self.manifest_of(0, None), at=START_US)
        self.prove(0)

    # Rollouts

    def issue(self, of: r.Task, version: int = 0) -> r.Task:
        """Issue a task that a worker accepted, with a turn for each of its rollouts."""
        self.put(of, at=of.issued_at)
        self.put(dispatch(of), at=of.issued_at)
        for index in range(of.group_size):
            self.put(turn(of, index, version), at=of.issued_at)
        return of

    def play(self, of: r.Task, *rewards: float | None, version: int = 0) -> r.Task:
        """Issue a task, and write a rollout for each reward."""
        self.issue(of, version)
        for index, reward in enumerate(rewards):
            self.roll(rollout(of, index, reward, version), at=of.issued_at + SECOND)
        return of

    def roll(self, record: r.Rollout | r.Tick, at: int) -> None:
        """Write a rollout or a tick, and the results of group assembly."""
        key = record.group_id if isinstance(record, r.Rollout) else "tick"
        self.put(record, at=at, key=key)
        self._assemble(at)

    def spoil(self, topic: Topic, at: int) -> None:
        """Write bytes that are not a record, with their dead letter."""
        self.letters[topic, self.put_bytes(topic, "?", GARBAGE, at)] = "unknown framing"
        if topic is Topic.ROLLOUTS:
            self._assemble(at)

    def _assemble(self, at: int) -> None:
        for output in self.assembler.observe(self.located(Topic.ROLLOUTS)[-1]):
            if isinstance(output, OutputRecord) and isinstance(output.record, r.Group):
                offset = self.put(output.record, at=at)
                self.group_offsets[output.record.group_id].append(offset)
            elif isinstance(output, Rejected):
                self.letters[output.located.topic, output.located.offset] = output.reason

    def group(self, offset: int) -> r.Group:
        """Return the group at an offset."""
        found = self._located(Topic.GROUPS, offset, self.entries[Topic.GROUPS][offset]).record
        assert isinstance(found, r.Group)
        return found

    # Steps

    def train(
        self,
        groups: Sequence[int],
        excluded: Sequence[tuple[int, str]] = (),
        *,
        batch: int | None = None,
        left_out: Sequence[r.OnlineMember] = (),
        at: int = START_US + 10 * SECOND,
        parent: int | None = None,
    ) -> r.TrainStep:
        """Plan, take, record and publish a step on the groups at some offsets and the online batch at one offset."""
        number = len(self.records(Topic.STEPS, r.TrainStep)) + 1
        parent = number - 1 if parent is None else parent
        inputs: list[r.StepInput] = []
        members: list[r.GroupMember | r.OnlineMember] = []
        if batch is not None:
            found = self.records(Topic.ONLINE_BATCHES, r.OnlineBatch)[batch]
            inputs.append(r.StepInput(found.batch_id, Topic.ONLINE_BATCHES.value, 0, batch))
            members += [one for one in found.members if one not in left_out]
        for offset in groups:
            inputs.append(r.StepInput(self.group(offset).group_id, Topic.GROUPS.value, 0, offset))
            members += [one for one in self.group(offset).members if one.reward is not None]
        exclusions = [
            r.StepExclusion(group.group_id, Topic.GROUPS.value, 0, offset, reason, len(group.members))
            for offset, reason in excluded
            for group in (self.group(offset),)
        ]
        exclusions += (
            r.StepExclusion(one.interaction_id, one.topic, one.partition, one.offset, "erased", 1) for one in left_out
        )
        lag: dict[int, int] = defaultdict(int)
        for one in members:
            lag[parent - one.version_min] += one.sampled_tokens
        step = build(
            r.TrainStep, step=number, parent_version=parent, inputs=inputs, exclusions=exclusions, seed=number,
            config_hash="c", metrics={"policy_lag_bound": 4.0},
            lag=[r.LagCount(behind, tokens) for behind, tokens in sorted(lag.items())], rollouts=len(members),
            tokens=sum(one.sampled_tokens for one in members), fingerprint=f"w{number}",
            parent_fingerprint=self.fingerprints[parent], started_at=at, finished_at=at + SECOND,
            incarnation=INCARNATION,
        )  # fmt: skip
        self.put(plan_of(step), at=at)
        self.put(step, at=at)
        self.fingerprints[number] = step.fingerprint
        self.put(self.manifest_of(number, parent), at=at)
        self.prove(number)
        return step

    def manifest_of(self, version: int, parent: int | None) -> r.Manifest:
        """Return the manifest of a version."""
        anchor = r.Anchor("file:///anchor", 10) if parent is None else None
        return replace(
            manifest(version),
            parent=parent,
            fingerprint=self.fingerprints[version],
            anchor=anchor,
            incarnation=INCARNATION,
        )

    def prove(self, version: int) -> None:
        """Write that a replica serves a version."""
        weights = self.fingerprints[version]
        said = replace(ack(version, r.AckStatus.PROVED), fingerprint=weights, expected_fingerprint=weights)
        self.put(said, at=START_US)


def plan_of(step: r.TrainStep, trainer: str = "trainer-0") -> r.StepPlan:
    return r.StepPlan(
        step.run_id, step.step, step.parent_version, step.inputs, step.exclusions, step.seed, step.config_hash, {},
        step.incarnation, trainer, step.started_at,
    )  # fmt: skip


def sound_log() -> RunLog:
    """Return three steps with held-out, failed, late, repeated, stale, unreadable, online and erased inputs."""
    log = RunLog()
    log.play(task("g0"), 1.0, 0.0)
    log.play(task("g1"), 0.0, 1.0)
    log.play(task("held", mode=r.Mode.EVAL), 1.0, 0.0)
    log.train([0, 1])
    log.play(task("g2", 3), 1.0, 0.0, None, version=1)
    log.play(task("old"), 1.0, 0.0)
    log.train([3], [(2, "eval"), (4, "stale")], parent=1)
    _disorder(log)
    _traffic(log)
    batch = log.records(Topic.ONLINE_BATCHES, r.OnlineBatch)[0]
    again, copy, few, late = 5, 6, 7, 8
    log.train([again], [(copy, "duplicate"), (few, "too_few"), (late, "late")], batch=0, left_out=[batch.members[1]])
    log.put(replace(ack(4, r.AckStatus.REFUSED), serving_version=3), at=START_US)
    log.issue(task("under-way", at=START_US + 300 * SECOND), version=3)
    log.play(task("waits", at=START_US + 200 * SECOND), 1.0, 0.0, version=3)
    return log


def _disorder(log: RunLog) -> None:
    """Write a rollout twice, a group twice, bytes that are not records, a rollout that does not belong to its
    group, a group closed by its deadline, and its straggler."""
    of = log.issue(task("g3"), version=2)
    for reward in (1.0, 0.5):
        log.roll(rollout(of, 0, reward, 2), at=of.issued_at + 2 * SECOND)
    log.roll(rollout(of, 1, 0.0, 2), at=of.issued_at + 2 * SECOND)
    again = log.group_offsets["g3"][0]
    log.put(log.group(again), at=START_US + 3 * SECOND)
    log.spoil(Topic.TASKS, START_US + 3 * SECOND)
    log.spoil(Topic.ROLLOUTS, START_US + 3 * SECOND)
    log.roll(replace(rollout(of, 0, 1.0), rollout_id="stray", group_id="stray", index=5), at=START_US + 3 * SECOND)
    slow = log.issue(task("slow"))
    log.roll(rollout(slow, 0, 1.0, 2), at=START_US + 4 * SECOND)
    log.roll(r.Tick("test", START_US + 61 * SECOND), at=START_US + 61 * SECOND)
    log.roll(rollout(slow, 1, 1.0, 2), at=START_US + 62 * SECOND)


def _traffic(log: RunLog) -> None:
    """Write answers to users: two in a batch, one excluded, one open, one erased, and one erasure request."""
    users = {"i0": "ann", "i1": "bob", "i2": "cid", "i3": "dan"}
    served = [
        replace(interaction(name, user, version=2, served_at=START_US), incarnation=INCARNATION)
        for name, user in users.items()
    ]
    places = [(0, log.put(one, at=one.served_at)) for one in served]
    log.put(interaction("gone", "bob", version=2, served_at=START_US), at=START_US)
    ends = [outcome(one, 1.0, place=place) for one, place in zip(served[:2], places, strict=False)]
    for end in (*ends, outcome(served[2], None, "no_signal", place=places[2])):
        log.put(end, at=end.closed_at)
    members = [member(end, place) for end, place in zip(ends, places, strict=False)]
    batch = online_batch(0, members, version=2)
    log.put(batch, at=START_US + 20 * SECOND)
    log.put(request("bob", r.UserWish.ERASE, START_US + 5 * SECOND), at=START_US + 5 * SECOND)
    log.put_bytes(Topic.INTERACTIONS, "gone", None, START_US + 6 * SECOND)


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A fault, the function that plants it in the sound log, and the one check that must find it."""

    name: str
    check: str
    at: str
    """The offending record that the check names first."""
    plant: Callable[[RunLog], None]


def _train_again(log: RunLog) -> None:
    log.train([log.group_offsets["g0"][0]], parent=3)


def _train_batch_again(log: RunLog) -> None:
    members = log.records(Topic.ONLINE_BATCHES, r.OnlineBatch)[0].members
    log.train([], batch=0, left_out=[members[1]], parent=3)


def _end_twice(log: RunLog) -> None:
    log.train([log.group_offsets["waits"][0]], [(log.group_offsets["g1"][0], "stale")], parent=3)


def _lose(log: RunLog) -> None:
    log.put(task("lost", 1), at=START_US)
    log.roll(r.Tick("test", START_US + OVERDUE_US), at=START_US + OVERDUE_US)


def _pass_over(log: RunLog) -> None:
    """Train two steps on newer groups than one that waits in their partition."""
    for number in range(2):
        log.play(task(f"younger{number}", at=START_US + (210 + number) * SECOND), 1.0, 0.0, version=3)
        log.train([log.group_offsets[f"younger{number}"][0]], parent=3 + number)


def _lose_result(log: RunLog) -> None:
    """Write a rollout that no group counts."""
    of = log.issue(task("uncounted"))
    log.put(rollout(of, 0, 1.0), at=START_US, key=of.group_id)
    log.put(rollout(of, 1, 1.0), at=START_US + OVERDUE_US, key=of.group_id)


def member_with(**changes: Any) -> Callable[[RunLog], None]:
    """Change fields of the first member of the first group."""

    def plant(log: RunLog) -> None:
        first, *others = log.group(0).members
        log.change(Topic.GROUPS, r.Group, 0, members=[replace(first, **changes), *others])

    return plant


def _contradict(log: RunLog) -> None:
    log.put(replace(log.group(log.group_offsets["waits"][0]), closed_at=1), at=START_US)


def _swap_inputs(log: RunLog) -> None:
    """Change the last step's input to another group with the same number of rollouts and tokens."""
    step = log.records(Topic.STEPS, r.TrainStep)[-1]
    other = r.StepInput("waits", Topic.GROUPS.value, 0, log.group_offsets["waits"][0])
    lag = [r.LagCount(-1, 2 * TOKENS), r.LagCount(0, step.tokens - 2 * TOKENS)]
    log.change(Topic.STEPS, r.TrainStep, -1, inputs=[step.inputs[0], other], lag=lag)


def _disagree(log: RunLog) -> None:
    """Let a restarted trainer plan another step 4 than the trainer before it."""
    waiting = r.StepInput("waits", Topic.GROUPS.value, 0, log.group_offsets["waits"][0])
    last = log.records(Topic.STEPS, r.TrainStep)[-1]
    step = replace(last, step=4, parent_version=3, inputs=[waiting], exclusions=[])
    log.put(plan_of(step), at=START_US)
    log.put(plan_of(replace(step, inputs=[], seed=9), "trainer-1"), at=START_US)


def plan_on_answer(log: RunLog, name: str, user: str) -> r.TrainStep:
    """Plan step 4 on a new online batch of one answer to a user; return the step as it would be recorded."""
    made = interaction(name, user, version=3, served_at=START_US + 20 * SECOND)
    served = replace(made, incarnation=INCARNATION)
    place = (0, log.put(served, at=served.served_at))
    end = outcome(served, 1.0, place=place)
    log.put(end, at=end.closed_at)
    offset = log.put(online_batch(1, [member(end, place)], version=3), at=START_US + 40 * SECOND)
    last = log.records(Topic.STEPS, r.TrainStep)[-1]
    batch = r.StepInput(log.records(Topic.ONLINE_BATCHES, r.OnlineBatch)[-1].batch_id, "online-batches", 0, offset)
    at = START_US + 50 * SECOND
    step = replace(last, step=4, parent_version=3, inputs=[batch], exclusions=[], started_at=at)
    log.put(plan_of(step), at=at)
    return step


def plan_anew(log: RunLog, step: r.TrainStep, **changes: Any) -> None:
    """Let a restarted trainer plan a step without any of the planned inputs."""
    log.put(plan_of(replace(step, inputs=[], **changes), "trainer-1"), at=step.started_at + SECOND)


def _replan_for_another_user(log: RunLog) -> None:
    """A user of the run was erased, but the replaced plan reads none of their records."""
    plan_anew(log, plan_on_answer(log, "i9", "eve"))


def _replan_before_erasure(log: RunLog) -> None:
    step = plan_on_answer(log, "i9", "eve")
    plan_anew(log, step)
    log.put_bytes(Topic.INTERACTIONS, "i9", None, step.started_at + AuditRules(RUN).grace_us + SECOND)


def _replan_from_the_same_version(log: RunLog) -> None:
    """The gate rejected a version, but both plans start from another one."""
    step = plan_on_answer(log, "i9", "eve")
    log.put(r.GateDecision(RUN, "main", r.GateVerdict.REJECT, 2, "worse", "gate", {}, START_US), at=step.started_at)
    plan_anew(log, step)


def _serve_unproved(log: RunLog) -> None:
    log.put(replace(ack(3, r.AckStatus.REFUSED), replica_id="replica-1", serving_version=3), at=START_US)


def _prove_otherwise(log: RunLog) -> None:
    log.change(Topic.ACKS, r.WeightAck, 2, fingerprint="flipped", expected_fingerprint="flipped")


def _spoil_silently(log: RunLog) -> None:
    log.put_bytes(Topic.TASKS, "?", GARBAGE, START_US)
    log.roll(r.Tick("test", START_US + OVERDUE_US), at=START_US + OVERDUE_US)


def _two_outcomes(log: RunLog) -> None:
    end = log.records(Topic.OUTCOMES, r.Outcome)[2]
    log.put(replace(end, exclusion="bot"), at=end.closed_at)


def _two_batches(log: RunLog) -> None:
    batch = log.records(Topic.ONLINE_BATCHES, r.OnlineBatch)[0]
    member = batch.members[0]
    log.put(
        replace(batch, batch_id="run/main/1", sequence=1, members=[member], tokens=member.sampled_tokens), at=START_US
    )


def _train_erased(log: RunLog) -> None:
    """A user's erasure request came long before the step that trained on their answer."""
    log.put(request("ann", r.UserWish.ERASE, START_US - 3600 * SECOND + 1), at=START_US)
    name = log.records(Topic.INTERACTIONS, r.Interaction)[0]
    log.change(Topic.INTERACTIONS, r.Interaction, 0, served_at=name.served_at - 7200 * SECOND)


def _train_erased_twice(log: RunLog) -> None:
    """The user came back, and was erased a second time after the step."""
    _train_erased(log)
    log.put(request("ann", r.UserWish.ERASE, START_US + 7200 * SECOND), at=START_US)


def _play_unasked(log: RunLog) -> None:
    of = task("unasked", 1)
    log.roll(rollout(of, 0, 1.0), at=START_US)


def _other_incarnation(log: RunLog) -> None:
    log.change(Topic.ROLLOUTS, r.Rollout, 0, incarnation="second")


def _truncate(log: RunLog) -> None:
    log.low[Topic.ROLLOUTS] = 1


def _hide(log: RunLog) -> None:
    """Hide an offset of a topic that has no transactions."""
    log.put(r.Feedback("e", "i0", "ann", r.SignalKind.THUMB, 1.0, START_US, "sdk"), at=START_US)
    log.put(r.StepPlan(RUN, 4, 3, [], [], 0, "c", {}, INCARNATION, "t", START_US), at=START_US)
    spare = log.put(r.GateDecision(RUN, "main", r.GateVerdict.HOLD, 1, "", "me", {}, START_US), at=START_US)
    log.hidden.add((Topic.GATE, spare))


PLANTED_FAULTS: tuple[PlantedFault, ...] = (
    PlantedFault("a group trained by two steps", "trained_once", "train.steps[0]@7", _train_again),
    PlantedFault("an online batch trained by two steps", "trained_once", "train.steps[0]@7", _train_batch_again),
    PlantedFault("a group trained and excluded", "endings", "train.steps[0]@7", _end_twice),
    PlantedFault("a rollout that was asked for and never came", "endings", "tasks[0]@10", _lose),
    PlantedFault("a group that the trainer passed over", "endings", "groups[0]@9", _pass_over),
    PlantedFault("a rollout that no group counts", "endings", "rollouts[0]@21", _lose_result),
    PlantedFault(
        "a group whose member has another reward than its rollout", "groups", "groups[0]@0", member_with(reward=0.75)
    ),
    PlantedFault(
        "a group whose advantages do not follow from its rewards", "groups", "groups[0]@0", member_with(advantage=0.9)
    ),
    PlantedFault(
        "a group that refers to a rollout that is not there", "groups", "groups[0]@0", member_with(offset=10_000)
    ),
    PlantedFault("a second record of a group with other contents", "groups", "groups[0]@10", _contradict),
    PlantedFault(
        "a step with other weights than its version",
        "versions",
        "weights.manifests[0]@3",
        lambda log: log.change(Topic.STEPS, r.TrainStep, -1, fingerprint="forged"),
    ),
    PlantedFault("a step with other inputs than were planned", "plans", "train.steps[0]@5", _swap_inputs),
    PlantedFault("two plans of a step that disagree", "plans", "train.steps[0]@7", _disagree),
    PlantedFault(
        "a plan replaced though another user was erased", "plans", "train.steps[0]@7", _replan_for_another_user
    ),
    PlantedFault(
        "a plan replaced before what it reads was erased", "plans", "train.steps[0]@7", _replan_before_erasure
    ),
    PlantedFault(
        "a plan replaced though the gate left its version", "plans", "train.steps[0]@7", _replan_from_the_same_version
    ),
    PlantedFault(
        "a step that counts a rollout too many",
        "inputs",
        "train.steps[0]@1",
        lambda log: log.change(Topic.STEPS, r.TrainStep, 0, rollouts=5),
    ),
    PlantedFault(
        "a step that tells a smaller policy lag",
        "inputs",
        "train.steps[0]@5",
        lambda log: log.change(Topic.STEPS, r.TrainStep, 2, lag=[r.LagCount(-1, 10)]),
    ),
    PlantedFault(
        "a step that starts from other weights than were made",
        "steps",
        "train.steps[0]@3",
        lambda log: log.change(Topic.STEPS, r.TrainStep, 1, parent_fingerprint="forged"),
    ),
    PlantedFault(
        "a version that continues one that was never published",
        "versions",
        "weights.manifests[0]@2",
        lambda log: log.change(Topic.MANIFESTS, r.Manifest, 2, parent=17),
    ),
    PlantedFault("a replica that serves what it never proved", "served", "weights.acks[0]@5", _serve_unproved),
    PlantedFault(
        "a replica that proved other weights than were published", "served", "weights.acks[0]@2", _prove_otherwise
    ),
    PlantedFault("a step on rollouts of another incarnation", "incarnations", "train.steps[0]@1", _other_incarnation),
    PlantedFault("a topic whose beginning was deleted", "retention", "rollouts[0]@1", _truncate),
    PlantedFault("an offset without a record", "offsets", "gate.decisions[0]@0", _hide),
    PlantedFault("an unreadable record without a dead letter", "dead_letters", "tasks[0]@10", _spoil_silently),
    PlantedFault("a rollout of a task that was never issued", "tasks", "rollouts[0]@21", _play_unasked),
    PlantedFault("an interaction with two outcomes", "interactions", "outcomes[0]@3", _two_outcomes),
    PlantedFault("an interaction in two online batches", "batches", "online-batches[0]@1", _two_batches),
    PlantedFault("a step on a user's answer after their erasure", "erasures", "train.steps[0]@5", _train_erased),
    PlantedFault("a step after the first of two erasures", "erasures", "train.steps[0]@5", _train_erased_twice),
)
"""Faults of a log, each with the check that must report it."""
