"""Erases a user from the log, and shows a user's requests and records. Every step can be repeated, so that an erasure
that was killed is finished by running it again.

This depends on the order. The request is in the log before anything is deleted, and a later run continues it instead of
making another. Interactions get their tombstones last, after the feedback, the outcomes and the claimed bytes that only
they lead to: while an interaction is there, none of its records can be missed.

A reader that comes to a tombstone drops the record; the broker removes the bytes when it compacts the partition, within
`max.compaction.lag.ms` of the topic. A claim is a field of a record, and records come from processes that may be broken
or hostile: of the object store, only objects below the configured root are deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import fsspec

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.rights.records import (
    CLIENT_ID,
    COPIED,
    SWEPT,
    BadUser,
    Survey,
    UserRecord,
    UserRecords,
    copy_request,
    new_request,
    requests_of,
    user_of,
)
from tidemill.consumers.sink.dead_letters import DeadLetterReader
from tidemill.consumers.sink.rows import DeadLetter
from tidemill.schemas.catalogue import DEAD_LETTER_RETENTION_MS, Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Claim, UserRequest, UserWish

SWEEPS = 5
"""Times that the log is read on for what came in meanwhile: the last outcomes of the user's open interactions."""


@dataclass(slots=True)
class Cleared:
    deleted: int = 0
    absent: int = 0
    """Were gone already."""
    foreign: list[str] = field(default_factory=list)
    """Lie outside the store's root: left alone, to be looked at by a person."""


def delete_claims(root: str, claims: Iterable[Claim]) -> Cleared:
    """Delete what claims point to below `root` (a directory or an fsspec URL). Raises ConnectionError."""
    cleared = Cleared()
    for claim in claims:
        try:
            filesystem, path = fsspec.core.url_to_fs(claim.uri)
            home, folder = fsspec.core.url_to_fs(root)
            inside = path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")
            if type(filesystem) is not type(home) or not inside:
                cleared.foreign.append(claim.uri)
                continue
            filesystem.rm_file(path)
            cleared.deleted += 1
        except FileNotFoundError:
            cleared.absent += 1
        except (OSError, ValueError, ImportError) as error:
            raise ConnectionError(
                f"the claimed bytes at {claim.uri} could not be deleted: {error}; run the erasure again"
            ) from error
    return cleared


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
    """The request that it carries out; None for a dry run."""
    carried_on: bool = False
    """The request was made by an earlier run, and covers everything that there is."""
    dry_run: bool = False
    found: dict[str, int] = field(default_factory=dict)
    """Records by topic, before."""
    tombstones: dict[str, int] = field(default_factory=dict)
    """Written, by topic."""
    left: dict[str, int] = field(default_factory=dict)
    """Records by topic that came in to the last: a later run takes them."""
    claims: Cleared = field(default_factory=Cleared)
    unreadable: dict[str, int] = field(default_factory=dict)
    """Records by topic that cannot be decoded: whether they belong to the user is not known."""
    dead_letters: LettersHeld = field(default_factory=lambda: LettersHeld({}, None))


class Eraser:
    """Carries out one erasure.

    Args:
        clock: gives the time of a new request, in microseconds.
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
            BadUser: the log holds nothing of the user, and nothing is written; or no user can be called that.
            LookupError: a topic does not exist.
            ConnectionError, DeliveryError, TimeoutError: a part of the system did not answer; run it again.
        """
        new = new_request(user_id, UserWish.ERASE, requested_by, self._clock())
        requests, holdings = requests_of(self._kafka, user_id), UserRecords(user_id)
        with Survey(self._kafka, self._progress) as survey:
            survey.read_on(holdings)
            if not holdings.slots and not requests.made:
                raise BadUser(
                    f"the log holds no interaction, outcome or feedback of {user_id} and no request of theirs: nothing "
                    "was written. Check the id, whether it is the product's or (--pseudonym) the log's, and "
                    "product.pseudonym_key"
                )
            done = Erasure(user_id, dry_run=dry_run, found=holdings.counts)
            standing = requests.standing(UserWish.ERASE)
            # An earlier request does not cover what the user did after it.
            done.carried_on = standing is not None and holdings.newest_at <= standing.at
            if not dry_run:
                done.request = standing if done.carried_on and standing is not None else new
                with RecordProducer(self._kafka, CLIENT_ID) as producer:
                    if not done.carried_on:
                        producer.send_acked(Topic.USER_REQUESTS, [(user_id, done.request)])
                    copy_request(producer, done.request, {topic: survey.partitions(topic) for topic in COPIED})
                    survey.read_on(holdings)
                    for _ in range(SWEEPS):
                        if not holdings.held:
                            break
                        self._sweep(producer, holdings.held, done)
                        survey.read_on(holdings)
                done.left = holdings.counts
        done.unreadable = {topic.value: n for topic, n in holdings.unreadable.items()}
        done.dead_letters = letters_of(self._kafka, holdings)
        return done

    def _sweep(self, producer: RecordProducer, held: list[UserRecord], done: Erasure) -> None:
        """Write a tombstone for each record, interactions last, and wait for the log before and after the claims."""
        for last in (False, True):
            for one in held:
                if (one.topic is Topic.INTERACTIONS) is last:
                    producer.send_bytes(self._names.of(one.topic), None, key=one.key, partition=one.partition)
                    done.tombstones[one.topic.value] = done.tombstones.get(one.topic.value, 0) + 1
            producer.flush()
            if not last:
                cleared = delete_claims(self._store.root, (claim for one in held for claim in one.claims))
                done.claims.deleted += cleared.deleted
                done.claims.absent += cleared.absent
                done.claims.foreign += cleared.foreign


def letters_of(kafka: KafkaSettings, holdings: UserRecords) -> LettersHeld:
    """Dead letters about a user: under a key of theirs, or with a readable value of theirs."""
    codec, counts, newest = Codec(kafka.registry_url), Counter[str](), -1
    with DeadLetterReader(kafka, {}, SWEPT) as letters:
        for row in letters.read_to_end():
            assert isinstance(row.record, DeadLetter)
            try:
                user = user_of(codec.decode(row.record.value))
            except DecodeError:
                # Most dead letters are dead for just this reason; their key may still say whose they are.
                user = None
            if holdings.owns_key(row.key, user):
                counts[row.record.source_topic] += 1
                newest = max(newest, row.timestamp_ms)
    return LettersHeld(dict(counts), newest + DEAD_LETTER_RETENTION_MS if counts else None)


@dataclass(frozen=True, slots=True)
class ConsentStatus:
    """A user's requests, and their records in the log."""

    user_id: str
    demands: list[UserRequest]
    """In order; the last one holds."""
    held: dict[str, int]
    """Records by topic."""
    dead_letters: LettersHeld


def read_consent_status(kafka: KafkaSettings, user_id: str, progress: Progress = no_progress) -> ConsentStatus:
    """Read it from the log. Raises LookupError when a topic does not exist, TimeoutError for a silent broker."""
    holdings = UserRecords(user_id)
    with Survey(kafka, progress) as survey:
        survey.read_on(holdings)
    return ConsentStatus(user_id, requests_of(kafka, user_id).made, holdings.counts, letters_of(kafka, holdings))
