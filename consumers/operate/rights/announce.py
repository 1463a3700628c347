"""A demand into the log: once into `user.requests`, then a copy into every partition whose readers must know of it.

The copies carry the request's own id and time, so that writing them again says nothing new: whoever was stopped between
the two begins again with the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.schemas.catalogue import Topic, user_request_key
from tidemill.schemas.clock import to_ms
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import UserRequest

COPIED = (Topic.INTERACTIONS, Topic.OUTCOMES)


def record_request(producer: RecordProducer, request: UserRequest) -> None:
    """Write a demand that is made for the first time, and wait for the log. Raises DeliveryError."""
    producer.send_acked(Topic.USER_REQUESTS, [(request.user_id, request)])


def copy_request(producer: RecordProducer, request: UserRequest, partitions: Mapping[Topic, Sequence[int]]) -> int:
    """Write its copy into every partition, and wait for the log; the number of copies. Raises DeliveryError."""
    places = [(topic, partition) for topic in COPIED for partition in partitions[topic]]
    for topic, partition in places:
        key = user_request_key(request.user_id, partition)
        producer.send(topic, request, key=key, partition=partition, timestamp_ms=to_ms(request.at))
    producer.flush()
    return len(places)
