"""Reads from the log what a trace needs: of the large topics only the partition where an interaction's records lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.trace.interaction import InteractionTrace
from tidemill.consumers.operate.trace.path import InteractionPath
from tidemill.consumers.operate.trace.rollout import RolloutPath, RolloutTrace
from tidemill.consumers.operate.trace.user import UserPath, UserTrace
from tidemill.consumers.operate.trace.versions import VersionHistory
from tidemill.consumers.sink.dead_letters import DeadLetterReader
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import partition_of
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Feedback

CLIENT_ID = "tidemill-trace"
PRODUCT = (Topic.INTERACTIONS, Topic.FEEDBACK)
MODEL = (Topic.STEPS, Topic.MANIFESTS, Topic.GATE, Topic.ACKS)
LONGEST_NAME = 200


def checked_name(text: str) -> str:
    """The id that is meant: of a signed token, the interaction that it signs. Raises ValueError."""
    name = text.strip().split(".")[0]
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise ValueError(
            f"an interaction, event or rollout id has 1 to {LONGEST_NAME} printable characters: give the id, or the "
            "interaction token that the router returned"
        )
    return name


class TraceReader:
    """Traces over one log."""

    def __init__(self, kafka: KafkaSettings, progress: Progress = no_progress) -> None:
        self._kafka, self._progress = kafka, progress

    def trace(self, text: str) -> InteractionPath | RolloutPath:
        """The path of an interaction, of the one that an event is about, or of a rollout.

        Args:
            text: an interaction's id or signed token, an event's id, or a rollout's id.

        Raises:
            ValueError: it can be no id, or the event is about several interactions.
            LookupError: the log has nothing of that name.
        """
        name = checked_name(text)
        traced = self._interaction(name)
        if traced is None and (about := self._interactions_of(text.strip())):
            traced = self._interaction(about[0])
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

    def user(self, user_id: str) -> UserPath:
        """The path of a user's data. Raises LookupError when the log holds nothing of the user."""
        traced = UserTrace(user_id)
        self._read((Topic.USER_REQUESTS, Topic.OUTCOMES, Topic.ONLINE_BATCHES), traced.observe)
        if not traced.found:
            raise LookupError(
                f"the log says nothing of the user {user_id}: check the id, whether it is the product's or "
                "(--pseudonym) the log's, and product.pseudonym_key"
            )
        return traced.path({run_id: self._history(run_id) for run_id in traced.runs})

    def _interaction(self, name: str) -> InteractionPath | None:
        traced = InteractionTrace(name)
        for topic in PRODUCT:
            self._read((topic,), traced.observe, of=name)
        self._read((Topic.OUTCOMES, Topic.ONLINE_BATCHES), traced.observe)
        with DeadLetterReader(self._kafka, {}, (*PRODUCT, Topic.OUTCOMES)) as letters:
            for row in letters.read_to_end():
                traced.observe_letter(row)
        if not traced.found:
            return None
        if traced.run_id is not None:
            traced.history = self._history(traced.run_id)
        return traced.path()

    def _interactions_of(self, event_id: str) -> list[str]:
        found: dict[str, None] = {}

        def observe(located: ConsumedRecord) -> None:
            if isinstance(located.record, Feedback) and located.record.event_id == event_id:
                found[located.record.interaction_id] = None

        self._read((Topic.FEEDBACK,), observe)
        if len(found) > 1:
            named = ", ".join(sorted(found))
            raise ValueError(f"event {event_id} is about {len(found)} interactions; trace one: {named}")
        return list(found)

    def _history(self, run_id: str) -> VersionHistory:
        history = VersionHistory(run_id)
        self._read(MODEL, history.observe)
        return history

    def _read(self, topics: Sequence[Topic], observe: Callable[[ConsumedRecord], None], of: str = "") -> None:
        """Hand over topics whole, or the one partition of each where records of the interaction `of` lie."""
        share = (0, 1)
        if of:
            with LogReader(self._kafka, topics, start="end", client_id=CLIENT_ID) as reader:
                count = len(reader.partitions(topics[0]))
            share = (partition_of(of, count), count)
        with LogReader(self._kafka, topics, client_id=CLIENT_ID, share=share) as reader:
            total = sum(reader.end_offsets().values()) - sum(reader.next_offsets().values())
            for n, located in enumerate(reader.read_to_end()):
                observe(located)
                if n % 500 == 0:
                    self._progress(n, total)
