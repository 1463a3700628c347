"""The paths of a simulated rollout and of a user's data, and the reader of the log for every trace.

For the large topics, only the partition with an interaction's records is read. Closed batches keep the pseudonym of
each member, also after an erasure: the versions that learnt from a user can still be found, and are reported here. The
versions are taken from the steps, since a step may have left out members of its batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tidemill.consumers.operate import Progress, no_progress, picked, watched
from tidemill.consumers.operate.trace.interaction import InteractionTrace
from tidemill.consumers.operate.trace.versions import Ended, VersionHistory
from tidemill.consumers.sink.erasures import PRODUCT
from tidemill.consumers.sink.rows import DeadLetterReader
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.log.reader import LogReader

ROLLOUT = "rollout_id run_id task_id mode status failure replica_id version_min version_max reward"


HistoryOf = Callable[[str], VersionHistory]
"""Returns the versions of a run."""


def rollout_path(rollout_id: str, records: Iterable[ConsumedRecord], history_of: HistoryOf) -> dict[str, Any] | None:
    """Return the path of a rollout: its fields, its `groups`, each with its end in `ended`, the `versions` trained on
    it, and `end`, with its reason; None if the records, which may be of other rollouts too, do not contain it."""
    found: tuple[Position, r.Rollout] | None = None
    of: list[tuple[Position, r.Group, r.GroupMember]] = []
    for located in records:
        record = located.record
        if isinstance(record, r.Rollout) and record.rollout_id == rollout_id and found is None:
            found = (located.position, record)
        elif isinstance(record, r.Group):
            member = next((member for member in record.members if member.rollout_id == rollout_id), None)
            if member is not None:
                of.append((located.position, record, member))
    if found is None:
        return None
    place, rollout = found
    history = history_of(rollout.run_id)
    groups, endings = [], list[Ended]()
    for where, group, member in of:
        endings.append(history.ended(Topic.GROUPS, group.group_id))
        fields = picked(member, "reward advantage", place=where, ended=endings[-1])
        groups.append(picked(group, "group_id closed_by", **fields))
    versions = sorted({use.version for use in endings if use.version is not None})
    reasons = [use.reason for use in endings if use.reason]
    if versions:
        failed = " (it failed: its group was trained without it)" if rollout.status is r.RolloutStatus.FAILED else ""
        end = f"its group was trained into version {', '.join(map(str, versions))}{failed}"
    elif not groups:
        end = "waits for its group to close"
    elif rollout.mode is r.Mode.EVAL:
        end = "evaluated: no step trains on held-out rollouts"
    else:
        end = f"excluded by the trainer: {reasons[-1]}" if reasons else "waits for the trainer"
    return picked(rollout, ROLLOUT, place=place, groups=groups, versions=history.made(endings), end=end)


def user_path(user_id: str, records: Iterable[ConsumedRecord], history_of: HistoryOf) -> dict[str, Any] | None:
    """Return the path of a user's data, by pseudonym; None if the records contain nothing of the user.

    Returns:
        user_id; the user's requests as `demands`; `outcomes`, their interactions that ended, by ending, without erased
        ones; `batches` with the sum of the user's rewards, the number of their members that were trained on and the
        different endings; and for each branch of each of the `runs` the versions that were `trained` on them, these and
        all their descendants as ranges (`contained_in`), and the replicas that serve one of those now.
    """
    requests: dict[r.UserRequest, None] = {}
    outcomes: dict[str, str] = {}
    closed: dict[str, tuple[Position, r.OnlineBatch]] = {}
    for located in records:
        match located.record:
            case r.UserRequest() as request if request.user_id == user_id:
                requests[request] = None
            case r.Outcome() as outcome if outcome.user_id == user_id:
                outcomes[outcome.interaction_id] = outcome.exclusion or "reward"
            case r.OnlineBatch() as batch if any(member.user_id == user_id for member in batch.members):
                closed.setdefault(batch.batch_id, (located.position, batch))
            case None if located.value is None:
                outcomes.pop((located.key or b"").decode("utf-8", "replace"), None)
    if not (requests or outcomes or closed):
        return None
    histories = {run_id: history_of(run_id) for run_id in sorted({batch.run_id for _, batch in closed.values()})}
    batches: list[dict[str, Any]] = []
    for place, batch in closed.values():
        members = [member for member in batch.members if member.user_id == user_id]
        history = histories[batch.run_id]
        endings = [history.ended(Topic.ONLINE_BATCHES, batch.batch_id, member.interaction_id) for member in members]
        batches.append(
            picked(
                batch,
                "batch_id run_id branch sequence",
                place=place,
                interactions=len({member.interaction_id for member in members}),
                reward=sum(member.reward for member in members),
                trained=sum(ending.version is not None for ending in endings),
                ended=list(dict.fromkeys(endings)),
            )
        )
    touched = []
    for run, history in histories.items():
        of_run = [batch for batch in batches if batch["run_id"] == run]
        made = history.made(ending for batch in of_run for ending in batch["ended"])
        for branch in sorted({version.branch for version in made} or {batch["branch"] for batch in of_run}):
            trained = [version for version in made if version.branch == branch]
            contained_in, served_by = history.contained_in(trained)
            of_branch = {"trained": trained, "contained_in": contained_in, "served_by": served_by}
            touched.append({"run_id": run, "branch": branch, **of_branch})
    return {
        "user_id": user_id,
        "demands": list(requests),
        "outcomes": dict(Counter(outcomes.values())),
        "batches": batches,
        "runs": touched,
    }


CLIENT_ID = "tidemill-trace"
MODEL = (Topic.STEPS, Topic.MANIFESTS, Topic.GATE, Topic.ACKS)
LONGEST_NAME = 200


def checked_name(text: str) -> str:
    """Return the id in a text: for a signed token, the interaction's id in it. Raises ValueError."""
    name = text.strip().split(".")[0]
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise ValueError(
            f"an interaction, event or rollout id has 1 to {LONGEST_NAME} printable characters: give the id, or the "
            "interaction token that the router returned"
        )
    return name


class TraceReader:
    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._kafka, self._progress = kafka, progress

    def trace(self, text: str) -> dict[str, Any]:
        """Return the path of an interaction, also by an event about it, or of a rollout (it has a `rollout_id`).

        Args:
            text: an interaction's id or signed token, an event's id, or a rollout's id.

        Raises:
            ValueError: the text cannot be an id, or the event is about several interactions.
            LookupError: the log has no record of that name.
        """
        name = checked_name(text)
        event = text.strip()
        traced = self._interaction(name)
        if traced is None:
            signals = (one.record for one in self._read((Topic.FEEDBACK,)) if isinstance(one.record, r.Feedback))
            about = {signal.interaction_id for signal in signals if signal.event_id == event}
            if len(about) > 1:
                named = ", ".join(sorted(about))
                raise ValueError(f"event {event} is about {len(about)} interactions; trace one: {named}")
            traced = self._interaction(about.pop()) if about else None
        if traced is None:
            traced = rollout_path(event, self._read((Topic.ROLLOUTS, Topic.GROUPS)), self._history)
        if traced is None:
            raise LookupError(
                f"no interaction, event or rollout {name!r} in the log: check the id and --topic-prefix; what is "
                "older than the topics' retention is gone"
            )
        return traced

    def user(self, user_id: str) -> dict[str, Any]:
        """Return the path of a user's data. Raises LookupError if the log holds no records of the user."""
        records = self._read((Topic.USER_REQUESTS, Topic.OUTCOMES, Topic.ONLINE_BATCHES))
        path = user_path(user_id, records, self._history)
        if path is None:
            raise LookupError(
                f"the log has no record of the user {user_id}: check the id, whether it is the product's or "
                "(--pseudonym) the log's, and product.pseudonym_key"
            )
        return path

    def _interaction(self, name: str) -> dict[str, Any] | None:
        traced = InteractionTrace(name)
        for topic in (Topic.INTERACTIONS, Topic.FEEDBACK):
            for located in self._read((topic,), of=name):
                traced.observe(located)
        for located in self._read((Topic.OUTCOMES, Topic.ONLINE_BATCHES)):
            traced.observe(located)
        with DeadLetterReader(self._kafka, {}, PRODUCT) as letters:
            for row in letters.read_to_end():
                traced.observe_letter(row)
        if not traced.found:
            return None
        return traced.path(VersionHistory("") if traced.run_id is None else self._history(traced.run_id))

    def _history(self, run_id: str) -> VersionHistory:
        history = VersionHistory(run_id)
        for located in self._read(MODEL):
            history.observe(located)
        return history

    def _read(self, topics: Sequence[Topic], of: str = "") -> Iterator[ConsumedRecord]:
        """Yield whole topics, or of each topic only the partition with the records of the interaction `of`."""
        share = (0, 1)
        if of:
            with LogReader(self._kafka, topics, start="end", client_id=CLIENT_ID) as reader:
                count = len(reader.partitions(topics[0]))
            share = (partition_of(of, count), count)
        with LogReader(self._kafka, topics, client_id=CLIENT_ID, share=share) as reader:
            total = sum(reader.end_offsets().values()) - sum(reader.next_offsets().values())
            yield from watched(reader.read_to_end(), total, self._progress)
