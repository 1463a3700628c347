"""The paths of a simulated rollout and of a user's data, and the reader of the log for every trace.

For the large topics, only the partition with an interaction's records is read. Closed batches keep the pseudonym of
each member, also after an erasure: the versions that learnt from a user can still be found, and are reported here. The
versions are taken from the steps, since a step may have left out members of its batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.consumers.operate import Progress, no_progress, picked, watched
from tidemill.consumers.operate.trace.interaction import InteractionTrace
from tidemill.consumers.operate.trace.versions import Ended, VersionHistory
from tidemill.consumers.sink.rows import DeadLetterReader
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.log.reader import LogReader

ROLLOUT = "rollout_id run_id task_id mode status failure replica_id version_min version_max reward"


class RolloutTrace:
    def __init__(self, rollout_id: str) -> None:
        self._id = rollout_id
        self._rollout: tuple[Position, r.Rollout] | None = None
        self._groups: list[tuple[Position, r.Group]] = []

    @property
    def run_id(self) -> str | None:
        """The run that it belongs to; None until the rollout is observed."""
        return self._rollout[1].run_id if self._rollout else None

    def observe(self, located: ConsumedRecord) -> None:
        """Observe a record; records that are not about the rollout are ignored."""
        record = located.record
        if isinstance(record, r.Rollout) and record.rollout_id == self._id and self._rollout is None:
            self._rollout = (located.position, record)
        elif isinstance(record, r.Group) and any(member.rollout_id == self._id for member in record.members):
            self._groups.append((located.position, record))

    def path(self, history: VersionHistory) -> dict[str, Any]:
        """Return everything observed so far: the rollout's fields, its `groups`, each with its end in `ended`, the
        `versions` trained on it, and `end`, with its reason. Raises LookupError if the rollout was not observed."""
        if self._rollout is None:
            raise LookupError(f"the log holds no rollout {self._id}")
        place, rollout = self._rollout
        groups, endings, reasons = [], list[Ended](), list[str]()
        for where, group in self._groups:
            member = next(member for member in group.members if member.rollout_id == self._id)
            use = history.ended(Topic.GROUPS, group.group_id)
            told = picked(member, "reward advantage", place=where, ended=use)
            groups.append(picked(group, "group_id closed_by", **told))
            endings.append(use)
            if use.reason:
                reasons.append(use.reason)
        versions = sorted({use.version for use in endings if use.version is not None})
        if versions:
            failed = (
                " (it failed: its group was trained without it)" if rollout.status is r.RolloutStatus.FAILED else ""
            )
            end = f"its group was trained into version {', '.join(map(str, versions))}{failed}"
        elif not groups:
            end = "waits for its group to close"
        elif rollout.mode is r.Mode.EVAL:
            end = "evaluated: no step trains on held-out rollouts"
        else:
            end = f"excluded by the trainer: {reasons[-1]}" if reasons else "waits for the trainer"
        made = history.made(endings)
        return picked(rollout, ROLLOUT, place=place, groups=groups, versions=made, end=end)


class UserTrace:
    """Follows one user, by pseudonym."""

    def __init__(self, user_id: str) -> None:
        self._user_id = user_id
        self._requests: dict[r.UserRequest, None] = {}
        self._endings: dict[str, str] = {}
        self._batches: dict[str, tuple[Position, r.OnlineBatch]] = {}

    @property
    def runs(self) -> set[str]:
        """The runs whose batches hold interactions of the user."""
        return {batch.run_id for _, batch in self._batches.values()}

    @property
    def found(self) -> bool:
        return bool(self._requests or self._endings or self._batches)

    def observe(self, located: ConsumedRecord) -> None:
        """Observe a record; records that are not about the user are ignored."""
        match located.record:
            case r.UserRequest(user_id=self._user_id) as request:
                self._requests[request] = None
            case r.Outcome() if located.record.user_id == self._user_id:
                self._endings[located.record.interaction_id] = located.record.exclusion or "reward"
            case r.OnlineBatch() if any(member.user_id == self._user_id for member in located.record.members):
                self._batches.setdefault(located.record.batch_id, (located.position, located.record))
            case None if located.value is None:
                self._endings.pop((located.key or b"").decode("utf-8", "replace"), None)

    def path(self, histories: Mapping[str, VersionHistory]) -> dict[str, Any]:
        """Return everything observed so far, with the versions of each run of `runs`.

        Returns:
            user_id; the user's requests as `demands`; `outcomes`, their interactions that ended, by ending, without
            erased ones; `batches` with the sum of the user's rewards, the number of their members that were trained on
            and the different endings; and for each branch of each of the `runs` the versions that were `trained` on
            them, these and all their descendants as ranges (`contained_in`), and the replicas that serve one of those
            now.
        """
        batches: list[dict[str, Any]] = []
        for place, batch in self._batches.values():
            members = [member for member in batch.members if member.user_id == self._user_id]
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
        for run in sorted(self.runs):
            of_run = [batch for batch in batches if batch["run_id"] == run]
            made = histories[run].made(ending for batch in of_run for ending in batch["ended"])
            for branch in sorted({version.branch for version in made} or {batch["branch"] for batch in of_run}):
                trained = [version for version in made if version.branch == branch]
                contained_in, served_by = histories[run].contained_in(trained)
                touched.append(
                    {
                        "run_id": run,
                        "branch": branch,
                        "trained": trained,
                        "contained_in": contained_in,
                        "served_by": served_by,
                    }
                )
        return {
            "user_id": self._user_id,
            "demands": list(self._requests),
            "outcomes": dict(Counter(self._endings.values())),
            "batches": batches,
            "runs": touched,
        }


CLIENT_ID = "tidemill-trace"
PRODUCT = (Topic.INTERACTIONS, Topic.FEEDBACK)
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
        traced = self._interaction(name)
        if traced is None:
            about: dict[str, None] = {}

            def observe(located: ConsumedRecord) -> None:
                if isinstance(located.record, r.Feedback) and located.record.event_id == text.strip():
                    about[located.record.interaction_id] = None

            self._read((Topic.FEEDBACK,), observe)
            if len(about) > 1:
                named = ", ".join(sorted(about))
                raise ValueError(f"event {text.strip()} is about {len(about)} interactions; trace one: {named}")
            traced = self._interaction(next(iter(about))) if about else None
        if traced is not None:
            return traced
        rollout = RolloutTrace(text.strip())
        self._read((Topic.ROLLOUTS, Topic.GROUPS), rollout.observe)
        if rollout.run_id is None:
            raise LookupError(
                f"no interaction, event or rollout {name!r} in the log: check the id and --topic-prefix; what is "
                "older than the topics' retention is gone"
            )
        return rollout.path(self._history(rollout.run_id))

    def user(self, user_id: str) -> dict[str, Any]:
        """Return the path of a user's data. Raises LookupError if the log holds no records of the user."""
        traced = UserTrace(user_id)
        self._read((Topic.USER_REQUESTS, Topic.OUTCOMES, Topic.ONLINE_BATCHES), traced.observe)
        if not traced.found:
            raise LookupError(
                f"the log has no record of the user {user_id}: check the id, whether it is the product's or "
                "(--pseudonym) the log's, and product.pseudonym_key"
            )
        return traced.path({run_id: self._history(run_id) for run_id in traced.runs})

    def _interaction(self, name: str) -> dict[str, Any] | None:
        traced = InteractionTrace(name)
        for topic in PRODUCT:
            self._read((topic,), traced.observe, of=name)
        self._read((Topic.OUTCOMES, Topic.ONLINE_BATCHES), traced.observe)
        with DeadLetterReader(self._kafka, {}, (*PRODUCT, Topic.OUTCOMES)) as letters:
            for row in letters.read_to_end():
                traced.observe_letter(row)
        if not traced.found:
            return None
        return traced.path(VersionHistory("") if traced.run_id is None else self._history(traced.run_id))

    def _history(self, run_id: str) -> VersionHistory:
        history = VersionHistory(run_id)
        self._read(MODEL, history.observe)
        return history

    def _read(self, topics: Sequence[Topic], observe: Callable[[ConsumedRecord], None], of: str = "") -> None:
        """Observe whole topics, or of each topic only the partition with the records of the interaction `of`."""
        share = (0, 1)
        if of:
            with LogReader(self._kafka, topics, start="end", client_id=CLIENT_ID) as reader:
                count = len(reader.partitions(topics[0]))
            share = (partition_of(of, count), count)
        with LogReader(self._kafka, topics, client_id=CLIENT_ID, share=share) as reader:
            total = sum(reader.end_offsets().values()) - sum(reader.next_offsets().values())
            for located in watched(reader.read_to_end(), total, self._progress):
                observe(located)
