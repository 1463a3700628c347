"""Erases a user from the log. Every step can be repeated, so that a killed erasure is finished by running it again.

The order is what makes that true. The demand is in the log before anything is deleted, and a later run carries it on
instead of making another. Interactions get their tombstones last, after the feedback, the outcomes and the claimed
bytes that only they lead to: as long as an interaction is there, nothing that hangs on it can be forgotten.

A tombstone takes the record from every reader that reads on from it; the broker removes the bytes when it compacts the
partition, within `max.compaction.lag.ms` of the topic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tidemill.consumers.operate.reading import Progress, no_progress
from tidemill.consumers.operate.rights.announce import COPIED, copy_request, record_request
from tidemill.consumers.operate.rights.holdings import SWEPT, Held, Holdings, user_of
from tidemill.consumers.operate.rights.requests import BadUser, Demands, new_request
from tidemill.consumers.operate.rights.stored import Cleared, delete_claims
from tidemill.consumers.operate.rights.survey import CLIENT_ID, Survey, demands_of
from tidemill.consumers.sink.dead_letters import DeadLetterReader
from tidemill.consumers.sink.rows import DeadLetter
from tidemill.schemas.catalogue import DEAD_LETTER_RETENTION_MS, Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import UserRequest, UserWish

SWEEPS = 5
"""Times that the log is read on for what came in meanwhile: the last words of the join about his open interactions."""


class UnknownUser(BadUser):
    """The log holds nothing of a user and he never demanded anything: most likely he was mistyped."""


@dataclass(frozen=True, slots=True)
class LettersHeld:
    """Dead letters of a user. Their topics are kept by time, not by key, so that no tombstone reaches them."""

    counts: dict[str, int]
    """By topic."""
    gone_at_ms: int | None
    """When the log's retention has removed the last of them, in milliseconds; None without one."""


@dataclass(slots=True)
class Erasure:
    """What an erasure did."""

    user_id: str
    request: UserRequest | None = None
    """The demand that it carries out; None for a dry run."""
    carried_on: bool = False
    """The demand was made by an earlier run, and covers everything that there is."""
    dry_run: bool = False
    found: dict[str, int] = field(default_factory=dict)
    """Records by topic, before."""
    tombstones: dict[str, int] = field(default_factory=dict)
    """Written, by topic."""
    left: dict[str, int] = field(default_factory=dict)
    """Records by topic that came in to the last: a later run takes them."""
    claims: Cleared = field(default_factory=Cleared)
    unreadable: dict[str, int] = field(default_factory=dict)
    """Records by topic that nobody can read: whether they are his is not known."""
    dead_letters: LettersHeld = field(default_factory=lambda: LettersHeld({}, None))


class Eraser:
    """Carries out one erasure.

    Args:
        clock: gives the time of a new demand, in microseconds.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        store: StoreSettings,
        progress: Progress = no_progress,
        clock: Callable[[], int] = now_us,
    ) -> None:
        self._kafka, self._store, self._progress, self._clock = kafka, store, progress, clock
        self._names = Names(kafka.topic_prefix)

    def erase(self, user_id: str, requested_by: str, *, dry_run: bool = False) -> Erasure:
        """Erase a user, or say what would be erased.

        Raises:
            UnknownUser: the log holds nothing of him, and nothing is written.
            BadUser: no user can be called that.
            LookupError: a topic does not exist.
            StoreRefused, DeliveryError, TimeoutError: a part of the system did not answer; run it again.
        """
        new = new_request(user_id, UserWish.ERASE, requested_by, self._clock())
        demands, holdings = demands_of(self._kafka, user_id), Holdings(user_id)
        with Survey(self._kafka, self._progress) as survey:
            survey.read_on(holdings)
            _require_known(user_id, demands, holdings)
            done = Erasure(user_id, dry_run=dry_run, found=holdings.counts)
            standing = demands.standing(UserWish.ERASE)
            # What he did after an earlier demand is not covered by it.
            done.carried_on = standing is not None and holdings.newest_at <= standing.at
            if not dry_run:
                done.request = standing if done.carried_on and standing is not None else new
                self._carry_out(done.request, survey, holdings, done)
        done.unreadable = {topic.value: n for topic, n in holdings.unreadable.items()}
        done.dead_letters = letters_of(self._kafka, holdings)
        return done

    def _carry_out(self, request: UserRequest, survey: Survey, holdings: Holdings, done: Erasure) -> None:
        with RecordProducer(self._kafka, CLIENT_ID) as producer:
            if not done.carried_on:
                record_request(producer, request)
            copy_request(producer, request, {topic: survey.partitions(topic) for topic in COPIED})
            survey.read_on(holdings)
            for _ in range(SWEEPS):
                if not holdings.held:
                    break
                self._sweep(producer, holdings.held, done)
                survey.read_on(holdings)
        done.left = holdings.counts

    def _sweep(self, producer: RecordProducer, held: list[Held], done: Erasure) -> None:
        self._bury(producer, (one for one in held if one.topic is not Topic.INTERACTIONS), done)
        cleared = delete_claims(self._store.root, (claim for one in held for claim in one.claims))
        done.claims.deleted += cleared.deleted
        done.claims.absent += cleared.absent
        done.claims.foreign += cleared.foreign
        self._bury(producer, (one for one in held if one.topic is Topic.INTERACTIONS), done)

    def _bury(self, producer: RecordProducer, held: Iterable[Held], done: Erasure) -> None:
        """Write a tombstone for each record, and wait for the log."""
        for one in held:
            producer.send_bytes(self._names.of(one.topic), None, key=one.key, partition=one.partition)
            done.tombstones[one.topic.value] = done.tombstones.get(one.topic.value, 0) + 1
        producer.flush()


def _require_known(user_id: str, demands: Demands, holdings: Holdings) -> None:
    if not holdings.slots and not demands.made:
        raise UnknownUser(
            f"the log holds no interaction, outcome or feedback of {user_id} and no demand of his: nothing was "
            "written. Check the id, whether it is the product's or (--pseudonym) the log's, and product.pseudonym_key"
        )


def letters_of(kafka: KafkaSettings, holdings: Holdings) -> LettersHeld:
    """Dead letters about a user: under a key of his, or with a readable value of his."""
    codec, counts, newest = Codec(kafka.registry_url), Counter[str](), -1
    with DeadLetterReader(kafka, {}, SWEPT) as letters:
        for row in letters.read_to_end():
            assert isinstance(row.record, DeadLetter)
            if holdings.owns_key(row.key, _named_user(codec, row.record.value)):
                counts[row.record.source_topic] += 1
                newest = max(newest, row.timestamp_ms)
    return LettersHeld(dict(counts), newest + DEAD_LETTER_RETENTION_MS if counts else None)


def _named_user(codec: Codec, value: bytes) -> str | None:
    try:
        return user_of(codec.decode(value))
    except DecodeError:
        # Most dead letters are dead for just this reason; their key may still say whose they are.
        return None
