"""Opting out of training and in again: demands for what comes after them; nothing is deleted."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.operate.rights.announce import COPIED, copy_request, record_request
from tidemill.consumers.operate.rights.requests import new_request
from tidemill.consumers.operate.rights.survey import CLIENT_ID, demands_of
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import UserRequest, UserWish


@dataclass(frozen=True, slots=True)
class Choice:
    """A demand and how many partitions have it."""

    request: UserRequest
    carried_on: bool
    """It holds since an earlier run; its copies were written again."""
    copies: int


def choose(kafka: KafkaSettings, user_id: str, wish: UserWish, requested_by: str, at: int | None = None) -> Choice:
    """Write a user's wish and its copies, where it is not his wish already. A user may choose before his first answer.

    Raises BadUser, LookupError for a topic that does not exist, DeliveryError.
    """
    new = new_request(user_id, wish, requested_by, now_us() if at is None else at)
    standing = demands_of(kafka, user_id).standing(wish)
    request = standing or new
    with LogReader(kafka, COPIED, start="end", client_id=CLIENT_ID) as reader:
        partitions = {topic: reader.partitions(topic) for topic in COPIED}
    with RecordProducer(kafka, CLIENT_ID) as producer:
        if standing is None:
            record_request(producer, request)
        return Choice(request, standing is not None, copy_request(producer, request, partitions))
