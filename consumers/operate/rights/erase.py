"""Erases a user from the log, and shows a user's requests and records. Every step can be repeated: an erasure that was
killed is completed by running it again.

This depends on the order. The request is in the log before anything is deleted, and a later run continues it instead of
making another. Interactions get their tombstones last, after the feedback, the outcomes and the claimed bytes that can
only be found through them: while an interaction exists, all of its records can be found.

A reader that reads a tombstone drops the record; the broker removes the bytes when it compacts the partition, within
`max.compaction.lag.ms` of the topic. A claim is a field of a record, and records come from processes that may be faulty
or hostile: in the object store, only objects below the configured root are deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import fsspec

from tidemill.consumers.operate import Progress, no_progress
from tidemill.consumers.operate.rights.records import (
    CLIENT_ID,
    COPIED,
    SWEPT,
    UserRecordReader,
    UserRecords,
    copy_request,
    new_request,
    requests_of,
    standing,
    user_of,
)
from tidemill.consumers.sink.rows import DeadLetter, DeadLetterReader
from tidemill.schemas.catalogue import DEAD_LETTER_RETENTION_MS, Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.consumed import decoded
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Claim, UserRequest, UserWish

SWEEPS = 5
"""Maximum number of further reads for records that arrived meanwhile: outcomes of the user's open interactions."""


@dataclass(slots=True)
class Cleared:
    deleted: int = 0
    absent: int = 0
    """Number of objects that did not exist any more."""
    foreign: list[str] = field(default_factory=list)
    """Claims that name no object below the store's root: not deleted, for a person to examine."""


def delete_claims(root: str, claims: Iterable[Claim], cleared: Cleared) -> None:
    """Delete the claimed objects below `root` (a directory or an fsspec URL), and count them in `cleared`.

    Raises ConnectionError.
    """
    for claim in claims:
        try:
            filesystem, path = fsspec.core.url_to_fs(claim.uri)
            home, folder = fsspec.core.url_to_fs(root)
            inside = path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")
            if type(filesystem) is not type(home) or not inside or filesystem.isdir(path):
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


@dataclass(frozen=True, slots=True)
class HeldDeadLetters:
    """Dead letters of a user. Their topics have retention by time and no compaction, so tombstones have no effect."""

    counts: dict[str, int]
    """By topic."""
    gone_at_ms: int | None
    """Time when retention will have deleted the last of them, in milliseconds; None if there are none."""


@dataclass(slots=True)
class Erasure:
    user_id: str
    request: UserRequest | None = None
    """The request that it carries out; None for a dry run."""
    carried_on: bool = False
    """Whether the request was made by an earlier run and covers all records."""
    dry_run: bool = False
    found: dict[str, int] = field(default_factory=dict)
    """Records by topic before the erasure."""
    tombstones: dict[str, int] = field(default_factory=dict)
    """Tombstones written, by topic."""
    left: dict[str, int] = field(default_factory=dict)
    """Records by topic that arrived during the last sweep: a later run erases them."""
    claims: Cleared = field(default_factory=Cleared)
    unreadable: dict[str, int] = field(default_factory=dict)
    """Records by topic that cannot be decoded: it is unknown whether they belong to the user."""
    dead_letters: HeldDeadLetters = field(default_factory=lambda: HeldDeadLetters({}, None))


def erase(
    kafka: KafkaSettings,
    store: StoreSettings,
    user_id: str,
    requested_by: str,
    *,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> Erasure:
    """Erase a user, or, in a dry run, count the records that would be erased.

    Raises:
        ValueError: the log holds no records of the user, so nothing is written; or the text cannot be a user's id.
        LookupError: a topic does not exist.
        ConnectionError, DeliveryError, TimeoutError: a part of the system did not respond; run it again.
    """
    new = new_request(user_id, UserWish.ERASE, requested_by, now_us())
    requests, holdings = requests_of(kafka, user_id), UserRecords(user_id)
    with UserRecordReader(kafka, progress) as survey:
        survey.read_on(holdings)
        if not holdings.slots and not requests:
            raise ValueError(
                f"the log holds no interaction, outcome or feedback of {user_id} and no request of theirs: nothing "
                "was written. Check the id, whether it is the product's or (--pseudonym) the log's, and "
                "product.pseudonym_key"
            )
        done = Erasure(user_id, dry_run=dry_run, found=holdings.counts)
        old = standing(requests, UserWish.ERASE)
        # An earlier request does not cover later records of the user.
        done.carried_on = old is not None and holdings.newest_at <= old.at
        if not dry_run:
            done.request = old if done.carried_on and old is not None else new
            with RecordProducer(kafka, CLIENT_ID) as producer:
                if not done.carried_on:
                    producer.send_acked(Topic.USER_REQUESTS, [(user_id, done.request)])
                copy_request(producer, done.request, {topic: survey.partitions(topic) for topic in COPIED})
                survey.read_on(holdings)
                for _ in range(SWEEPS):
                    if not holdings.held:
                        break
                    _sweep(producer, Names(kafka.topic_prefix), store.root, holdings, done)
                    survey.read_on(holdings)
            done.left = holdings.counts
    done.unreadable = holdings.unreadable
    done.dead_letters = letters_of(kafka, holdings)
    return done


def _sweep(producer: RecordProducer, names: Names, root: str, holdings: UserRecords, done: Erasure) -> None:
    """Write a tombstone for each record, interactions last, and wait for the log before and after the claims."""
    for last in (False, True):
        for topic, partition, key in holdings.held:
            if (topic is Topic.INTERACTIONS) is last:
                producer.send_bytes(names.of(topic), None, key=key, partition=partition)
                done.tombstones[topic.value] = done.tombstones.get(topic.value, 0) + 1
        producer.flush()
        if not last:
            delete_claims(root, (claim for _, claims in holdings.held.values() for claim in claims), done.claims)


def letters_of(kafka: KafkaSettings, holdings: UserRecords) -> HeldDeadLetters:
    """Return the dead letters about a user: those with one of their keys, or with a decodable value of theirs."""
    codec, counts, newest = Codec(kafka.registry_url), Counter[str](), -1
    with DeadLetterReader(kafka, {}, SWEPT) as letters:
        for row in letters.read_to_end():
            assert isinstance(row.record, DeadLetter)
            # Most cannot be decoded, for that is their reason; their key may still identify the user.
            record, _ = decoded(codec, row.record.value)
            if holdings.owns_key(row.key, user_of(record)):
                counts[row.record.source_topic] += 1
                newest = max(newest, row.timestamp_ms)
    return HeldDeadLetters(dict(counts), newest + DEAD_LETTER_RETENTION_MS if counts else None)


def read_consent_status(kafka: KafkaSettings, user_id: str, progress: Progress = no_progress) -> dict[str, Any]:
    """Return a user's requests in order as `demands`, the last of which is in effect, and the records `held` by topic.

    Raises LookupError if a topic does not exist, TimeoutError if the broker stops responding.
    """
    holdings = UserRecords(user_id)
    with UserRecordReader(kafka, progress) as survey:
        survey.read_on(holdings)
    return {
        "user_id": user_id,
        "demands": requests_of(kafka, user_id),
        "held": holdings.counts,
        "dead_letters": letters_of(kafka, holdings),
    }
