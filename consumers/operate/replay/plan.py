"""The plan of a replay, fixed before anything is written: the offsets of each partition, and their digests.

The k-th selected record of a partition becomes the k-th record of the partition's copy. The plan thus determines the
position of every copy, references can point to copies that are not written yet, and the number of copies shows the
progress of an interrupted replay. `LogOrigin` turns a selection into a plan: it fixes the ends, finds the positions of
named steps, versions and groups, and reads every record. It writes nothing. If retention has deleted records, its error
names the first offset and time that remain.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.consumers.operate import Progress, picked, watched
from tidemill.consumers.operate.replay.records import (
    RANK,
    REFERRING,
    Lane,
    LogSource,
    Place,
    Range,
    RawRecord,
    references,
    topic_of,
)
from tidemill.consumers.operate.replay.selection import Filter, Selection, utc_text
from tidemill.schemas.catalogue import CATALOGUE, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import decoded
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.records import Record, StepPlan, TrainStep


@dataclass(slots=True)
class LanePlan:
    topic: str
    partition: int
    start: int
    end: int
    """Offsets [start, end) are read."""
    offsets: array[int] = field(default_factory=lambda: array("q"))
    """Offsets of the selected records, ascending."""
    n_bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    """Oldest and newest record time."""
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, record: RawRecord) -> None:
        """Add the next selected record, in offset order."""
        self.offsets.append(record.offset)
        self.n_bytes += record.n_bytes
        self.first_ms = record.timestamp_ms if self.first_ms is None else min(self.first_ms, record.timestamp_ms)
        self.last_ms = record.timestamp_ms if self.last_ms is None else max(self.last_ms, record.timestamp_ms)
        # Each part with its length, so that moving bytes from one part to the next changes the digest.
        parts: list[bytes | None] = [record.key, record.value]
        for name, value in record.headers:
            parts += [name.encode(), value]
        self._hash.update(f"{record.offset}/{record.timestamp_ms}/{len(parts)}".encode())
        for part in parts:
            self._hash.update(b"-" if part is None else f"+{len(part)}/".encode() + part)

    @property
    def sha256(self) -> str:
        """Return the digest of the selected records, in order, as they are in the source."""
        return self._hash.hexdigest()

    def rank(self, offset: int) -> int | None:
        """Return the index of a record among the selected ones; None if it is not selected."""
        found = bisect_left(self.offsets, offset)
        return found if found < len(self.offsets) and self.offsets[found] == offset else None


class Plan:
    """The selected offsets of every partition; `partitions` is their number for each topic."""

    def __init__(self, lanes: Iterable[LanePlan], partitions: Mapping[str, int]) -> None:
        ranked = sorted(lanes, key=lambda plan: (RANK[plan.topic], plan.partition))
        self.lanes: dict[Lane, LanePlan] = {(plan.topic, plan.partition): plan for plan in ranked}
        self.partitions = {topic: partitions[topic] for topic in sorted(partitions, key=RANK.__getitem__)}
        self.undecodable = 0
        """Records that had to be decoded for an expression or a group id and cannot be: they are left out."""
        self.referred: set[Place] = set()
        """Every position that a selected record refers to."""
        self.missing: set[Place] = set()
        """Positions that a step, its groups or its batches name and at which the log no longer holds a record, because
        it was erased or retention has deleted it."""

    @property
    def records(self) -> int:
        return sum(len(plan.offsets) for plan in self.lanes.values())

    @property
    def n_bytes(self) -> int:
        return sum(plan.n_bytes for plan in self.lanes.values())

    def rank(self, place: Place) -> int | None:
        """Return the offset of a record's copy relative to its partition's first copy; None if it is not selected."""
        plan = self.lanes.get(place[:2])
        return None if plan is None else plan.rank(place[2])

    def outside(self) -> Iterator[Place]:
        """Yield positions that selected records refer to but that are not selected: in the copy they do not resolve."""
        return (place for place in sorted(self.referred) if self.rank(place) is None)

    def sha256(self) -> str:
        total = hashlib.sha256()
        for plan in self.lanes.values():
            total.update(f"{plan.topic}/{plan.partition}/{len(plan.offsets)}/{plan.sha256}\n".encode())
        return total.hexdigest()


def lane_reports(plan: Plan, source_prefix: str) -> list[dict[str, Any]]:
    """Return of each partition its full `topic` and its number (`partition`); the offsets [`start`, `end`) that were
    read; and of the selected records their number (`records`), `n_bytes`, oldest and newest time in UTC (`first`,
    `last`), and the digest `sha256`."""
    return [
        picked(
            lane,
            "partition start end n_bytes sha256",
            topic=source_prefix + lane.topic,
            records=len(lane.offsets),
            first=None if lane.first_ms is None else utc_text(lane.first_ms),
            last=None if lane.last_ms is None else utc_text(lane.last_ms),
        )
        for lane in plan.lanes.values()
    ]


def places_of_steps(records: Iterable[tuple[Place, Record | None]], selection: Selection) -> set[Place]:
    """Return the positions of the selected steps and versions: for each step its own record, its inputs and its
    exclusions; for a step that was planned but not taken, those of its plan.

    Args:
        records: the records of `train.steps`, each with its position.

    Raises LookupError if the run has no such step, or no step made such a version.
    """
    planned, taken, made = (defaultdict[int, set[Place]](set) for _ in range(3))
    for place, record in records:
        if isinstance(record, TrainStep | StepPlan) and record.run_id == selection.run_id:
            places = {place, *references(record)}
            if isinstance(record, StepPlan):
                planned[record.step] |= places
            else:
                taken[record.step] |= places
                made[record.version] |= places
    chosen: set[Place] = set()
    for what, known, wanted in (("step", {**planned, **taken}, selection.steps), ("version", made, selection.versions)):
        for span in wanted:
            found = {number for number in known if number in span}
            if not {span.first, span.last} <= found:
                there = f"{min(known)} to {max(known)}" if known else "none"
                raise LookupError(f"train.steps has no {what} {span} of run {selection.run_id!r}; there are {there}")
            chosen |= set().union(*(known[number] for number in found))
    return chosen


OF_STEPS = (Topic.ROLLOUTS, Topic.GROUPS, Topic.INTERACTIONS, Topic.ONLINE_BATCHES)
"""Topics copied for a step if none are selected. Not the step's own record: a trainer would take it as its own step."""
OF_GROUPS = (Topic.ROLLOUTS, Topic.GROUPS)


class LogOrigin:
    """The selected records of the topics under the configured prefix."""

    def __init__(self, kafka: KafkaSettings, selection: Selection) -> None:
        self.prefix, self.selection = kafka.topic_prefix, selection
        self._source = LogSource(kafka, selection.isolation)
        self._codec = Codec(kafka.registry_url)

    def ordered(self, plan: Plan) -> Iterator[tuple[int, RawRecord]]:
        """Yield the records of a plan in the order of a replay, with the time that the order has reached."""
        filled = ((lane, chosen.offsets) for lane, chosen in plan.lanes.items() if chosen.offsets)
        ranges = {lane: Range(offsets[0], offsets[-1] + 1) for lane, offsets in filled}
        for reached_ms, record in self._source.ordered(ranges):
            if plan.rank((*record.lane, record.offset)) is not None:
                yield reached_ms, record

    def close(self) -> None:
        self._source.close()

    def plan(self, ends: Mapping[Lane, int] | None, progress: Progress) -> Plan:
        """Turn the selection into a plan.

        Args:
            ends: the end of each partition for a replay that continues; None for a new one.

        Raises:
            ValueError: its expression cannot be used.
            LookupError: a topic, step or version does not exist, or the log no longer holds the selected records.
            TimeoutError: the broker stops responding.
        """
        selection = self.selection
        places = self._named_places()
        chosen = {*selection.topics, *(r.topic for r in selection.offsets)}
        if not chosen:
            chosen = {topic for topic, _, _ in places if topic in OF_STEPS}
            chosen |= {topic.value for topic in OF_GROUPS if selection.groups}
        topics = sorted(chosen, key=RANK.__getitem__)
        where = Filter(selection.where, topics) if selection.where else None
        partitions = {topic: self._partitions(topic) for topic in topics}
        ranges = {
            (topic, partition): found
            for topic in topics
            for partition in range(partitions[topic])
            if (found := self._range(places, (topic, partition), partitions[topic], ends)) is not None
        }
        plan = Plan((LanePlan(*lane, r.start, r.end) for lane, r in ranges.items()), partitions)
        # What is outside of the ranges is not selected, and not read.
        in_lanes = ((place, ranges[place[:2]]) for place in places if place[:2] in ranges)
        plan.missing = {place for place, read in in_lanes if read.start <= place[2] < read.end}
        total = sum(r.end - r.start for r in ranges.values())
        reads_all = where is not None or bool(selection.groups)
        for raw in watched(self._source.scan(ranges), total, progress):
            place = (*raw.lane, raw.offset)
            plan.missing.discard(place)
            if not selection.within(*place) or not selection.in_times(raw.timestamp_ms):
                continue
            record = decoded(self._codec, raw.value)[0] if reads_all or raw.topic in REFERRING else None
            plan.undecodable += reads_all and record is None
            named = place in places or getattr(record, "group_id", None) in selection.groups
            if (selection.names_records and not named) or (where is not None and not where.keeps(raw, record)):
                continue
            plan.lanes[raw.lane].add(raw)
            if record is not None and raw.topic in REFERRING:
                plan.referred.update(references(record))
        return plan

    def _partitions(self, topic: str) -> int:
        found = self._source.partitions(topic)
        if not found:
            raise LookupError(f"topic {topic} does not exist under this prefix: check --topic-prefix")
        return found

    def _range(
        self, places: set[Place], lane: Lane, partitions: int, known_ends: Mapping[Lane, int] | None
    ) -> Range | None:
        """Return the offsets of a partition that have to be read; None if it cannot hold selected records."""
        selection, (topic, partition) = self.selection, lane
        ranges = selection.ranges_of(*lane)
        if not ranges and any(r.topic == topic for r in selection.offsets):
            return None
        bounds = self._source.bounds(lane)
        start, end = bounds
        if known_ends is not None:
            # A partition that the interrupted replay did not know contributes no records.
            end = min(end, known_ends.get(lane, 0))
        if ranges:
            start = min(bounds.start if r.start is None else r.start for r in ranges)
            end = min(end, max(end if r.end is None else r.end for r in ranges))
        by_group = CATALOGUE[topic_of(topic)].key == "group_id"
        holds_group = any(not by_group or partition_of(each, partitions) == partition for each in selection.groups)
        if selection.names_records and not holds_group:
            offsets = [offset for *of, offset in places if tuple(of) == lane]
            if not offsets:
                return None
            start, end = max(start, min(offsets)), min(end, max(offsets) + 1)
        if start < bounds.start:
            raise self._gone(lane, f"offset {start} is no longer kept")
        if selection.from_ms is not None:
            oldest = self._source.first(lane) if bounds.start > 0 else None
            if oldest is not None and oldest.timestamp_ms > selection.from_ms:
                raise self._gone(lane, f"what was written from {utc_text(selection.from_ms)} on is not all kept")
            since = self._source.first_since(lane, selection.from_ms)
            start = max(start, bounds.end if since is None else since)
        return Range(start, max(start, end))

    def _gone(self, lane: Lane, what: str) -> LookupError:
        first = self._source.first(lane)
        left = "the log holds no record of it"
        if first is not None:
            left = f"the log begins at offset {first.offset}, written {utc_text(first.timestamp_ms)}"
        return LookupError(f"{lane[0]}[{lane[1]}]: {what}; {left}")

    def _named_places(self) -> set[Place]:
        """Return the positions for the named steps and versions: the steps' references, and the references of those."""
        if not (self.selection.steps or self.selection.versions):
            return set()
        self._partitions(Topic.STEPS.value)
        steps = self._source.scan(self._source.whole([Topic.STEPS.value]))
        records = (((*raw.lane, raw.offset), decoded(self._codec, raw.value)[0]) for raw in steps)
        read = places_of_steps(records, self.selection)
        by_lane: dict[Lane, list[int]] = {}
        for topic, partition, offset in read:
            by_lane.setdefault((topic, partition), []).append(offset)
        ranges = {of: Range(min(offsets), max(offsets) + 1) for of, offsets in by_lane.items()}
        for of, wanted in ranges.items():
            if wanted.start < self._source.bounds(of).start:
                raise self._gone(of, f"offset {wanted.start} is no longer kept")
        found = (raw for raw in self._source.scan(ranges) if (*raw.lane, raw.offset) in read)
        return read | {place for raw in found for place in references(decoded(self._codec, raw.value)[0])}
