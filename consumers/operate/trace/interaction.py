"""The path of one interaction through the log, stage by stage, and one sentence with its end and reason. A pure fold.

The topics may be observed in any order; the records of each topic in their order. Only the log is read, so that a trace
of a replayed or copied log gives the same result.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tidemill.consumers.operate import picked
from tidemill.consumers.operate.trace.versions import Ended, TracedVersion, VersionHistory
from tidemill.consumers.sink.erasures import PRODUCT, interaction_of
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Feedback, Interaction, OnlineBatch, Outcome

SERVED = "run_id branch user_id arm propensity consent replica_id version_min version_max finish_reason served_at"
EVENT = "event_id user_id kind value corrects source observed_at"
END = "revision reward previous_reward exclusion map_version closed_at"


class InteractionTrace:
    def __init__(self, interaction_id: str) -> None:
        self._id = interaction_id
        self._served: Interaction | None = None
        self._places: list[Position] = []
        self._erased: Position | None = None
        self._feedback: dict[str, tuple[Position, Feedback]] = {}
        self._repeated: Counter[str] = Counter()
        self._refused: list[dict[str, Any]] = []
        self._outcomes: list[tuple[Position, Outcome]] = []
        """In the order of their revisions."""
        self._batches: list[tuple[Position, OnlineBatch]] = []
        self._dropped: list[tuple[Position, OnlineBatch]] = []

    @property
    def run_id(self) -> str | None:
        """The run that it belongs to; None until one of its records is observed."""
        records = [self._served, *(end for _, end in self._outcomes), *(batch for _, batch in self._batches)]
        return next((record.run_id for record in records if record is not None), None)

    @property
    def found(self) -> bool:
        return bool(self._served or self._erased or self._feedback or self._outcomes or self._batches or self._refused)

    def observe(self, located: ConsumedRecord) -> None:
        """Observe a record; records that are not about the interaction are ignored."""
        record = located.record
        if located.value is None:
            # An erased record is not shown, although the broker may not have removed its bytes yet.
            interaction_id, _, event_id = (located.key or b"").decode("utf-8", "replace").partition("/")
            if interaction_id != self._id:
                return
            if located.topic is Topic.INTERACTIONS:
                self._served, self._places, self._erased = None, [], located.position
            elif located.topic is Topic.OUTCOMES:
                self._outcomes = []
            elif located.topic is Topic.FEEDBACK:
                self._feedback.pop(event_id, None)
        elif isinstance(record, Interaction) and record.interaction_id == self._id:
            self._served = self._served or record
            self._places.append(located.position)
        elif isinstance(record, Feedback) and record.interaction_id == self._id:
            self._repeated[record.event_id] += record.event_id in self._feedback
            self._feedback.setdefault(record.event_id, (located.position, record))
        elif isinstance(record, Outcome) and record.interaction_id == self._id:
            if all(record.revision != known.revision for _, known in self._outcomes):
                insort(self._outcomes, (located.position, record), key=lambda one: one[1].revision)
        elif isinstance(record, OnlineBatch) and all(record.batch_id != known.batch_id for _, known in self._batches):
            if any(member.interaction_id == self._id for member in record.members):
                self._batches.append((located.position, record))
            elif record.dropped:
                self._dropped.append((located.position, replace(record, members=[])))

    def observe_letter(self, row: Row) -> None:
        """Observe a dead letter; its key identifies its interaction."""
        dead_letter = row.record
        if isinstance(dead_letter, DeadLetter) and interaction_of(row.key) == self._id.encode():
            # A prefix need not end with a dot.
            source = dead_letter.source_topic
            topic = next((topic.value for topic in PRODUCT if source.endswith(topic.value)), source)
            place = Position(topic, dead_letter.source_partition, dead_letter.source_offset)
            self._refused.append(picked(dead_letter, "reason found_by", place=place))

    def path(self, history: VersionHistory) -> dict[str, Any]:
        """Return everything observed so far, with the versions of its run.

        Returns:
            interaction_id; `served` and the position of the tombstone `erased`, None if there is none; `feedback` with
            the `fate` of each event in words; `letters`, refused records with their original positions; `outcomes` by
            revision, with the contribution of each event; `batches`, each with its end in `ended`; `versions` whose
            step trained on it; and `end`: the end of the path and its reason.
        """
        served = None
        if self._served is not None:
            served = picked(self._served, SERVED, place=self._places[0], repeats=self._places[1:])
        events = []
        for place, event in self._feedback.values():
            again = self._repeated[event.event_id]
            fate = self._use(event, place) + (f"; sent {1 + again} times, counted once" if again else "")
            events.append(picked(event, EVENT, place=place, fate=fate))
        batches = [
            picked(
                batch,
                "batch_id sequence version closed_by",
                **picked(member, "reward correction", place=place),
                ended=history.ended(Topic.ONLINE_BATCHES, batch.batch_id, self._id),
            )
            for place, batch in self._batches
            for member in batch.members
            if member.interaction_id == self._id
        ]
        branch = next((batch.branch for _, batch in self._batches), "")
        made = history.made((one["ended"] for one in batches), branch)
        return {
            "interaction_id": self._id,
            "served": served,
            "erased": self._erased,
            "feedback": events,
            "letters": self._refused,
            "outcomes": [
                picked(end, END, place=place, signals={use.event_id: use.contribution for use in end.signals})
                for place, end in self._outcomes
            ],
            "batches": batches,
            "versions": made,
            "end": self._explain(batches, made),
        }

    def _explain(self, batches: Sequence[dict[str, Any]], versions: Sequence[TracedVersion]) -> str:
        if versions:
            made = versions[-1]
            trained = ", ".join(str(each.version) for each in versions)
            serving = {replica: version for each in versions for replica, version in each.served_by.items()}
            if made.manifest_place is None:
                return f"trained into version {trained}, which is not published yet"
            if serving:
                by = ", ".join(f"{replica} (version {version})" for replica, version in sorted(serving.items()))
                return f"trained into version {trained}, and served now by {by}"
            last = made.decisions[-1] if made.decisions else None
            why = "" if last is None else f": last decision {last['verdict']} by {last['by']}, {last['reason']}"
            return f"trained into version {trained}, which no replica serves now{why}"
        if batches:
            ended: Ended = batches[-1]["ended"]
            if ended.reason:
                return f"excluded by the trainer ({ended.reason}), in {ended.step}"
            return f"waits for the trainer in batch {batches[-1]['batch_id']}"
        served = self._served
        if self._outcomes:
            at, end = self._outcomes[-1]
            if end.exclusion:
                return f"excluded: {end.exclusion}, in {at}; it is in no batch"
            # A batch counts the interactions left out of all batches by reason, without their names.
            for place, batch in self._dropped:
                of_branch = served is None or (batch.run_id, batch.branch) == (served.run_id, served.branch)
                if of_branch and batch.closed_at >= end.closed_at:
                    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(batch.dropped.items()))
                    return f"has a reward and is in no batch: {place} closed after it and counts as dropped: {reasons}"
            return "has a reward and waits for its online batch to be closed by tokens or by time"
        if self._erased is not None:
            return f"erased: a tombstone at {self._erased} ends it, and nothing trained on it"
        if served is None:
            return "the log holds no such interaction: never served, or past the log's retention"
        return "waits for its end: the join closes it when the longest horizon of its signals has passed in event time"

    def _use(self, record: Feedback, place: Position) -> str:
        if any(dead_letter["place"] == place for dead_letter in self._refused):
            return "refused: see the dead letters"
        for _, end in self._outcomes:
            for use in end.signals:
                if use.event_id == record.event_id:
                    revision = f" of revision {end.revision}" if end.revision else ""
                    return f"counted {use.contribution:+g} in the reward{revision}"
        replaced = [other.event_id for _, other in self._feedback.values() if other.corrects == record.event_id]
        if replaced:
            return f"replaced by {replaced[-1]}"
        if self._served is not None and record.user_id != self._served.user_id:
            return "not counted: given by another user than the one who was served"
        if not self._outcomes:
            return "waits for the interaction's end"
        newest = self._outcomes[-1][1]
        if newest.exclusion and newest.exclusion != "no_signal":
            return f"not counted: the interaction is excluded ({newest.exclusion})"
        if record.corrects is not None and record.value is None:
            return f"withdrew {record.corrects}"
        if record.kind.value in newest.observed:
            return "observed; the reward map gives its kind no weight, or another event of the kind is in effect"
        if record.observed_at > newest.closed_at:
            return "not counted: it came after the interaction's end"
        return "not counted: outside its horizon, or the reward map has no such kind"
