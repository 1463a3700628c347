"""The pure parts of a replay: parsing, order, pace, filter, references, and copying from any point of interruption."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.consumers.operate.replay_support import group, rollout, step
from tests.records import build
from tidemill.consumers.operate import no_progress
from tidemill.consumers.operate.replay.copy import carried_on, copy_records, pacing, speed_of
from tidemill.consumers.operate.replay.plan import LanePlan, LogOrigin, Plan, places_of_steps
from tidemill.consumers.operate.replay.records import RANK, Range, RawRecord, merged, references, relocated
from tidemill.consumers.operate.replay.selection import (
    Filter,
    NumberRange,
    OffsetRange,
    Selection,
    offset_range,
    span,
    utc_text,
)
from tidemill.consumers.operate.replay.target import (
    HEADER_REPLAY_BEGAN,
    ReplayStart,
    TargetState,
    beginning,
    check_prefix,
    copied_offset,
)
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import replay_id_of
from tidemill.schemas.records import Manifest, RolloutStatus, ShardPosition, Tick

LANES = [("rollouts", 0), ("rollouts", 1), ("groups", 0)]


@st.composite
def partitions(draw):
    """Draw records of a few partitions, with gaps between offsets and times that may decrease."""
    found = {}
    for topic, partition in LANES:
        offsets = sorted(draw(st.sets(st.integers(0, 30), max_size=8)))
        times = draw(st.lists(st.integers(0, 50), min_size=len(offsets), max_size=len(offsets)))
        found[topic, partition] = [
            RawRecord(topic, partition, offset, at, b"k", b"v%d" % offset)
            for offset, at in zip(offsets, times, strict=True)
        ]
    return found


def ordered_by_sorting(lanes):
    """Return the order of a replay, computed in another way."""
    keyed = []
    for records in lanes.values():
        reached = 0
        for record in records:
            reached = max(reached, record.timestamp_ms)
            keyed.append(((reached, RANK[record.topic], record.partition, record.offset), record))
    return [(key[0], record) for key, record in sorted(keyed, key=lambda pair: pair[0])]


def plan_of(lanes):
    plans = []
    for (topic, partition), records in lanes.items():
        lane = LanePlan(topic, partition, 0, 31)
        for record in records:
            lane.add(record)
        plans.append(lane)
    return Plan(plans, {"rollouts": 2, "groups": 1})


@given(partitions(), st.randoms())
def test_the_order_depends_on_the_records_and_not_on_how_they_arrive(lanes, random):
    left = {lane: list(records) for lane, records in lanes.items()}
    held = {}

    def more(held_bytes):
        nonlocal held
        held = held_bytes
        lane = random.choice(sorted(left))
        if left[lane]:
            return [left[lane].pop(0)], []
        del left[lane]
        return [], [lane]

    assert list(merged(lanes, more)) == ordered_by_sorting(lanes)
    assert not left, "every partition was read to its end"
    assert set(held) == set(lanes) and not any(held.values())


def test_records_that_wait_for_another_partition_are_counted():
    early = [RawRecord("rollouts", 0, n, n, b"k", b"value") for n in range(3)]
    late = RawRecord("groups", 0, 0, 9, b"k", b"value")
    arriving = iter([(early, []), ([late], []), ([], [("rollouts", 0)]), ([], [("groups", 0)])])
    sizes = []

    def more(held_bytes):
        sizes.append(dict(held_bytes))
        return next(arriving)

    found = [record for _, record in merged([("rollouts", 0), ("groups", 0)], more)]
    assert found == [*early, late]
    held = [size["rollouts", 0] for size in sizes]
    assert held[0] == held[2] == 0 < held[1], "the first is out, the others wait for the first group"


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3_000)), min_size=1), st.sampled_from([0.5, 1.0, 10.0])
)
def test_a_record_is_due_when_as_much_time_has_passed_as_between_the_originals(gaps, speed):
    now, reached, sent = 100.0, 5_000, []
    wait_s = pacing(speed, lambda: now)
    for gap_ms, work_ms in gaps:
        reached += gap_ms
        wait = wait_s(reached)
        assert wait >= 0
        now += wait
        sent.append((now, reached))
        now += work_ms / 1_000
    first_at, first_ms = sent[0]
    for at, ms in sent:
        assert at - first_at >= (ms - first_ms) / 1_000 / speed - 1e-6


def test_full_speed_never_waits_and_the_first_record_is_due_at_once():
    assert pacing(None, lambda: 0.0)(10**15) == 0
    assert pacing(1.0, lambda: 7.0)(10**15) == 0


@pytest.mark.parametrize(("text", "speed"), [("max", None), ("original", 1.0), ("10", 10.0), ("2.5x", 2.5)])
def test_speeds(text, speed):
    assert speed_of(text) == speed


@pytest.mark.parametrize("text", ["0", "-1", "fast", "nan", "inf", ""])
def test_an_invalid_speed_is_refused(text):
    with pytest.raises(ValueError, match="--speed"):
        speed_of(text)


def test_ranges_and_spans_are_read():
    assert offset_range("rollouts/3=100:200") == OffsetRange("rollouts", 3, 100, 200)
    assert offset_range("weights.deltas=:5") == OffsetRange("weights.deltas", None, None, 5)
    assert offset_range("rollouts.dlq/0=7:") == OffsetRange("rollouts.dlq", 0, 7, None)
    assert span("7") == NumberRange(7, 7)
    assert span("v7..v9") == NumberRange(7, 9)


@pytest.mark.parametrize("text", ["rollouts", "rollouts=5", "nothing=1:2", "rollouts/x=1:2", "rollouts=2:2", "=1:2"])
def test_an_invalid_range_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|no topic|empty"):
        offset_range(text)


@pytest.mark.parametrize("text", ["", "x", "9..7", "1..", "-3"])
def test_an_invalid_span_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|empty"):
        span(text)


def test_an_empty_selection_is_refused():
    with pytest.raises(ValueError, match="no records are selected"):
        Selection(where="True")
    with pytest.raises(ValueError, match="empty"):
        Selection(topics=("rollouts",), from_ms=5, to_ms=5)
    with pytest.raises(ValueError, match="no topic 'rolouts'"):
        Selection(topics=("rolouts",))


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_times_are_from_and_up_to(start, length, at):
    chosen = Selection(topics=("rollouts",), from_ms=start, to_ms=start + length + 1)
    assert chosen.in_times(at) == (at in range(start, start + length + 1))


def test_a_time_that_no_date_has_is_shown_as_a_number():
    assert utc_text(1_767_225_600_001) == "2026-01-01T00:00:00.001Z"
    assert utc_text(2**63 - 1) == "9223372036854775807 ms"
    assert utc_text(10**15) == "1000000000000000 ms"


def keeps(expression, record, topics=("rollouts", "groups"), headers=()):
    raw = RawRecord("rollouts", 3, 17, 1_000, b"g1", b"", tuple(headers))
    return Filter(expression, topics).keeps(raw, record)


def test_a_filter_chooses_by_decoded_fields():
    good = rollout("r1", "g1", reward=0.75)
    assert keeps('record.reward > 0.5 and record.mode == "train"', good)
    assert not keeps("record.reward > 0.8", good)
    assert keeps("len(record.segments) == 1 and record.segments[0].n_tokens >= 2", good)
    assert keeps('kind == "Rollout" and topic == "rollouts" and partition == 3 and offset in [17]', good)
    assert keeps('key == "g1" and headers["a"] == "b" and timestamp < 1001', good, headers=[("a", b"b")])
    assert keeps('record.rollout_id.startswith("r")', good)


def test_a_field_that_a_record_lacks_does_not_match():
    failed = replace(rollout("r1", "g1"), reward=None, status=RolloutStatus.FAILED)
    assert not keeps("record.reward > 0.5", failed)
    assert not keeps("not (record.reward > 0.5)", failed), "unknown is neither"
    assert keeps("record.reward is None", failed)
    assert not keeps("record.reward > 0.5", Tick("s", 1)), "a tick has no reward"
    assert not keeps("record.reward > 0.5", None), "it cannot be decoded"
    assert not keeps('headers["a"] == "b"', failed)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("record.rewrad > 1", "no record of these topics has a field 'rewrad'"),
        ("rollout.reward > 1", "no name 'rollout'"),
        ("record.reward >", "no expression"),
        ("", "give one expression"),
        ("x = 1", "give one expression"),
        ("True; False", "give one expression"),
        ("record.__class__", "no record of these topics"),
        ("record.mode.__class__", "nothing has a field '__class__'"),
        ("[x for x in record.segments]", "ListComp is not allowed"),
        ("(lambda: 1)()", "Lambda is not allowed"),
        ("__import__('os')", "no name '__import__'"),
        ("f'{record.reward}'", "JoinedStr is not allowed"),
        ("record.mode.format(1)", "nothing has a field 'format'"),
    ],
)
def test_an_expression_that_is_not_allowed_is_refused_before_anything_is_read(expression, why):
    with pytest.raises(ValueError, match=why):
        Filter(expression, ("rollouts",))


def test_an_expression_that_fails_names_the_record():
    with pytest.raises(ValueError, match=r"rollouts\[3\]@17"):
        keeps("record.reward / 0 > 1", rollout("r1", "g1"))


def test_references_of_every_kind_are_found_and_moved():
    made = group("g1", [("rollouts", 2, 5), ("rollouts", 2, 9)])
    assert list(references(made)) == [("rollouts", 2, 5), ("rollouts", 2, 9)]
    moved = relocated(made, lambda place: place[2] - 5 if place[2] == 5 else None)
    assert [member.offset for member in moved.members] == [0, 9]
    assert replace(moved, members=made.members) == made
    assert relocated(made, lambda place: place[2]) is made, "nothing moved, nothing written anew"
    shards = build(Manifest, version=1, shards=[ShardPosition(0, "weights.deltas", 1, [4, 6], 10, "d")])
    assert relocated(shards, lambda place: place[2] + 1).shards[0].offsets == [5, 7]
    assert list(references(step(3, [("groups", 0, 1)], [("groups", 0, 2)]))) == [("groups", 0, 1), ("groups", 0, 2)]


def test_steps_name_their_records_and_versions_their_steps():
    made = [step(1, [("groups", 0, 1)], []), step(2, [("groups", 0, 2)], [("groups", 1, 7)])]
    others = [replace(step(9, [("groups", 0, 3)], []), run_id="another"), None]
    records = [(("train.steps", 0, offset), record) for offset, record in enumerate([*made, *others])]

    def places(**chosen):
        return places_of_steps(records, Selection(run_id="run", **chosen))

    assert places(steps=(NumberRange(2, 2),)) == {("train.steps", 0, 1), ("groups", 0, 2), ("groups", 1, 7)}
    both = (NumberRange(1, 1), NumberRange(2, 2))
    assert places(versions=(NumberRange(1, 2),)) == places(steps=both) == places(versions=both[:1], steps=both[1:])
    with pytest.raises(LookupError, match=r"no step 2..3 of run 'run'; there are 1 to 2"):
        places(steps=(NumberRange(2, 3),))


class Log:
    """Topics in memory that store copies at the planned offsets."""

    def __init__(self):
        self.lanes, self.killed_after = {}, None

    def send_copy(self, record, value, headers, offset):
        if self.killed_after == sum(map(len, self.lanes.values())):
            raise KeyboardInterrupt
        lane = self.lanes.setdefault(record.lane, [])
        assert offset == len(lane)
        lane.append(RawRecord(*record.lane, offset, record.timestamp_ms, record.key, value, tuple(headers)))

    def flush(self):
        """Every copy is already in memory."""


def standing_of(log):
    standing = TargetState()
    for lane, records in log.lanes.items():
        standing.copied[lane] = [copied_offset(record) for record in records]
        for record in records:
            began = dict(record.headers).get(HEADER_REPLAY_BEGAN)
            standing.begun = beginning(began) if began else standing.begun
    return standing


def run(plan, lanes, log, begun, standing):
    base = dict.fromkeys(plan.lanes, 0)
    done = carried_on(plan, standing)
    wait_s = pacing(None, lambda: 0.0)
    records = ordered_by_sorting(lanes)
    return copy_records(records, plan, begun, "live.", done, base, Codec(), log, wait_s=wait_s)


@given(partitions(), st.lists(st.integers(0, 10), max_size=4))
def test_an_interrupted_copy_continues_without_gaps_or_duplicates(lanes, interruptions):
    plan, log = plan_of(lanes), Log()
    begun = ReplayStart("one", 7, "what", {lane: 31 for lane in lanes})
    for more in interruptions:
        standing = standing_of(log)
        assert (standing.begun or begun) == begun
        log.killed_after = standing.records + more
        if log.killed_after < plan.records:
            with pytest.raises(KeyboardInterrupt):
                run(plan, lanes, log, begun, standing)
    log.killed_after = None
    run(plan, lanes, log, begun, standing_of(log))
    for lane, records in lanes.items():
        copies = log.lanes.get(lane, [])
        assert [copied_offset(copy) for copy in copies] == [record.offset for record in records]
        assert [copy.value for copy in copies] == [record.value for record in records]
        assert all(replay_id_of(copy.headers) == "one" for copy in copies)
    marked = [copy for copies in log.lanes.values() for copy in copies if HEADER_REPLAY_BEGAN in dict(copy.headers)]
    assert len(marked) == min(1, plan.records)


def test_a_copy_of_a_changed_source_is_not_continued():
    lanes = {("rollouts", 0): [RawRecord("rollouts", 0, n, n, b"k", b"v") for n in (3, 5)]}
    standing = TargetState(copied={("rollouts", 0): [2]})
    with pytest.raises(ValueError, match="no longer the beginning"):
        carried_on(plan_of(lanes), standing)


def test_a_record_deleted_during_the_copy_is_reported():
    records = [RawRecord("rollouts", 0, n, n, b"k", b"v") for n in range(3)]
    plan = plan_of({("rollouts", 0): records})
    begun = ReplayStart("one", 7, "what", {})
    for kept in ([records[0], records[2]], records[:2]):
        with pytest.raises(ValueError, match="deleted from the source"):
            run(plan, {("rollouts", 0): kept}, Log(), begun, TargetState())


def test_copies_of_groups_refer_to_copies_of_rollouts():
    lanes = {
        ("rollouts", 0): [
            RawRecord("rollouts", 0, n, n, b"g", Codec().encode(rollout(f"r{n}", "g"))) for n in (4, 6, 7)
        ],
        ("groups", 0): [
            RawRecord("groups", 0, 2, 8, b"g", Codec().encode(group("g", [("rollouts", 0, 4), ("rollouts", 0, 7)])))
        ],
    }
    log = Log()
    copied = run(plan_of(lanes), lanes, log, ReplayStart("one", 7, "what", {}), TargetState())
    assert copied["relocated"] == 1
    made = Codec().decode(log.lanes["groups", 0][0].value)
    for member in made.members:
        assert Codec().decode(log.lanes["rollouts", 0][member.offset].value).rollout_id == member.rollout_id


def test_headers_of_a_copy_are_the_originals_and_name_the_replay():
    original = RawRecord("rollouts", 0, 4, 9, b"k", b"v", (("a", b"1"), ("a", None), ("tidemill-replay-id", b"older")))
    log = Log()
    run(
        plan_of({("rollouts", 0): [original]}),
        {("rollouts", 0): [original]},
        log,
        ReplayStart("new", 7, "w", {}),
        TargetState(),
    )
    (copy,) = log.lanes["rollouts", 0]
    assert copy.headers[:2] == (("a", b"1"), ("a", None))
    assert replay_id_of(copy.headers) == "new"
    assert dict(copy.headers)["tidemill-replay-source"] == b"live.rollouts/0/4"
    assert (copy.key, copy.timestamp_ms, copy.partition) == (b"k", 9, 0)


def test_a_beginning_survives_its_header():
    begun = ReplayStart("one", 7, "abc", {("weights.deltas", 3): 9, ("rollouts.dlq", 0): 0})
    assert beginning(begun.to_json().encode()) == begun
    for damaged in (b"", b"{}", b"[]", json.dumps({"ends": 3}).encode()):
        with pytest.raises(ValueError, match="cannot be read"):
            beginning(damaged)


@pytest.mark.parametrize("into", ["", "live.", "tidemill.", "no/prefix"])
def test_a_live_or_invalid_prefix_is_refused(into):
    with pytest.raises(ValueError, match=r"--into|topic_prefix"):
        check_prefix("live.", into)


def test_a_prefix_that_extends_the_live_one_is_accepted():
    check_prefix("tidemill.", "tidemill.replay-1.")
    check_prefix("live.", "other.")
    with pytest.raises(ValueError, match=r"live topic live\.documents"):
        check_prefix("live.", "live.")


def test_digests_tell_records_apart():
    def digest(*records):
        return plan_of({("rollouts", 0): list(records)}).sha256()

    one = RawRecord("rollouts", 0, 1, 5, b"k", b"v", (("a", b"b"),))
    others = [
        replace(one, offset=2),
        replace(one, timestamp_ms=6),
        replace(one, key=b"kv", value=b""),
        replace(one, key=None),
        replace(one, value=None),
        replace(one, headers=()),
        replace(one, headers=(("ab", b""),)),
    ]
    assert len({digest(record) for record in [one, *others]}) == len(others) + 1
    assert digest(one) == digest(replace(one))


class MemorySource:
    """Records of a log in memory, in place of a `LogSource`."""

    def __init__(self, lanes):
        self._lanes = lanes

    def partitions(self, topic):
        return sum(lane[0] == topic for lane in self._lanes)

    def bounds(self, lane):
        return Range(0, self._lanes[lane][-1].offset + 1)

    def whole(self, topics):
        return {lane: self.bounds(lane) for lane in self._lanes if lane[0] in topics}

    def first_since(self, lane, timestamp_ms):
        return next((record.offset for record in self._lanes[lane] if record.timestamp_ms >= timestamp_ms), None)

    def scan(self, ranges):
        records = (record for lane in ranges for record in self._lanes[lane])
        return (record for record in records if ranges[record.lane].start <= record.offset < ranges[record.lane].end)


@pytest.mark.parametrize(
    ("narrowed", "records", "missing"),
    [
        ({}, 3, {("groups", 0, 3)}),
        ({"from_ms": 20}, 2, {("groups", 0, 3)}),
        ({"offsets": (OffsetRange("groups", 0, 2, 3),)}, 1, set()),
        ({"offsets": (OffsetRange("groups", 0, None, 2),)}, 2, set()),
    ],
)
def test_only_selected_records_can_be_missing(narrowed, records, missing):
    """A step names four groups; the last one is no longer in the log, whose next record is at offset 4."""
    taken = step(1, [("groups", 0, offset) for offset in range(4)], [])
    lanes = {
        ("train.steps", 0): [RawRecord("train.steps", 0, 0, 50, b"run", Codec().encode(taken))],
        ("groups", 0): [
            RawRecord("groups", 0, n, 10 * (n + 1), b"g", Codec().encode(group(f"g{n}", []))) for n in (0, 1, 2, 4)
        ],
    }
    selection = Selection(topics=("groups",), steps=(NumberRange(1, 1),), run_id="run", **narrowed)
    origin = LogOrigin(KafkaSettings(bootstrap="127.0.0.1:9"), selection)
    origin.close()
    origin._source = MemorySource(lanes)
    plan = origin.plan(None, no_progress)
    assert (plan.records, plan.missing) == (records, missing)
