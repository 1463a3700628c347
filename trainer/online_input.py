"""The inputs of a trainer that learns from users: online batches, the interactions that they refer to, and groups.

When a batch was read, decisions of the gate and user requests are read to the end of the log before the batch is
decided: so all decisions and requests from before a batch are known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import (
    Exclusion,
    GateDecision,
    Interaction,
    OnlineBatch,
    OnlineMember,
    StepInput,
    UserRequest,
)
from tidemill.schemas.stored_object import ForeignClaimError, StoredObjectError, claimed
from tidemill.trainer.batch import InvalidRolloutError, check, sampled_versions
from tidemill.trainer.batch_builder import BatchBuilder, StepBatch
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.log_input import CLIENT, ReferenceLog
from tidemill.trainer.online_queue import OnlineQueue, WeightLine
from tidemill.trainer.trainable import MOST_EXCLUSIONS, TrainableBatch

INTERACTIONS_CLIENT = "tidemill-trainer-interactions"
_log = logging.getLogger(__name__)

Found = Interaction | Exclusion
"""An interaction with its segments, or the reason why it cannot be trained."""


class InteractionLog(ExitStack):
    """Interactions by partition and offset; a partition is read once, from the first wanted offset to the last.

    A record may have been deleted, by a tombstone and compaction or by retention; its offset then gives no record, and
    never another one.

    Args:
        accept_replays: replays whose interactions may be trained; None accepts all, as it was decided before.
    """

    def __init__(self, kafka: KafkaSettings, vocab_size: int, accept_replays: frozenset[str] | None = None) -> None:
        super().__init__()
        self._accept_replays = accept_replays
        self._codec = Codec(kafka.registry_url)
        self._vocab_size = vocab_size
        self._log = self.enter_context(LogReader(kafka, client_id=INTERACTIONS_CLIENT, codec=self._codec))

    def fetch(self, members: Iterable[OnlineMember]) -> dict[Position, Found]:
        """Return the checked records to which the members refer.

        Raises TimeoutError if the broker does not deliver, KafkaException for a permanent error.
        """
        places = {Position.of(member): member for member in members}
        read = self._log.fetch({place for place in places if place.topic == Topic.INTERACTIONS})
        return {place: self._checked(member, read.get(place)) for place, member in places.items()}

    def _checked(self, member: OnlineMember, located: ConsumedRecord | None) -> Found:
        if member.topic != Topic.INTERACTIONS:
            return Exclusion.INVALID_INTERACTION
        if located is None or located.value is None:
            return Exclusion.MISSING_INTERACTION
        if located.replay_id and self._accept_replays is not None and located.replay_id not in self._accept_replays:
            return Exclusion.REPLAYED
        record = located.record
        if not isinstance(record, Interaction) or record.interaction_id != member.interaction_id:
            return Exclusion.INVALID_INTERACTION
        try:
            whole = claimed(record, self._codec)
            check(whole, self._vocab_size)
        except (StoredObjectError, DecodeError):
            return Exclusion.MISSING_INTERACTION
        except (ForeignClaimError, InvalidRolloutError):
            return Exclusion.INVALID_INTERACTION
        versions = sampled_versions(whole)
        recorded = (whole.version_min, whole.version_max)
        return whole if recorded == (versions.min(), versions.max()) else Exclusion.INVALID_INTERACTION


class OnlineInput(ExitStack):
    """Reads the log for an `OnlineQueue` and a `WeightLine`; a context manager."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: TrainerSettings,
        queue: OnlineQueue,
        line: WeightLine,
        producer: RecordProducer,
        vocab_size: int,
    ) -> None:
        super().__init__()
        self.queue, self.line, self._producer, self._settings = queue, line, producer, settings.online
        standing = LogReader(kafka, [Topic.GATE, Topic.USER_REQUESTS], client_id=CLIENT)
        self._standing = self.enter_context(standing)
        self._batches = self.enter_context(ReferenceLog(kafka, OnlineBatch, queue.progress().next_offsets))
        interactions = InteractionLog(kafka, vocab_size, frozenset(settings.accept_replays))
        self._interactions = self.enter_context(interactions)
        self._found: tuple[StepInput, Mapping[Position, Found]] | None = None
        self._since: tuple[StepInput, float] | None = None
        for located in self._standing.read_to_end():
            self._observe(located)

    def poll(self) -> None:
        """Read the available records, without waiting for more."""
        came = self._batches.poll(0.0, self._producer)
        for located in self._standing.read_to_end() if came else self._standing.poll(0.0):
            self._observe(located)
        for read in came:
            self.queue.read(read)

    def next_batch(self, builder: BatchBuilder, version: int, now: float) -> StepBatch | None:
        """Return the inputs of the next step at trainer version `version`: an online batch, and the simulated groups
        that join it, for which it waits up to `max_wait_seconds`. None if they are not complete.

        Groups that arrive while there is no batch wait in `builder` and can become stale there. `now` is any clock in
        seconds.
        """
        builder.sweep(version)
        while (waiting := self.queue.next(version)) is not None:
            if self._found is None or self._found[0] != waiting.place:
                self._found = waiting.place, self._interactions.fetch(waiting.record.members)
            left = self.queue.settle(waiting, self._found[1], version)
            if isinstance(left, TrainableBatch):
                break
            self.queue.drop(waiting, left)
        else:
            return None
        if self._since is None or self._since[0] != left.place:
            self._since = left.place, now
        wanted = self._settings.simulated_groups_per_batch
        if builder.waiting < wanted and now < self._since[1] + self._settings.max_wait_seconds:
            return None
        excluded = self.queue.take(left)
        simulated = builder.take(wanted, max(0, MOST_EXCLUSIONS - len(excluded)))
        return StepBatch(simulated.groups, [*simulated.exclusions, *excluded], left)

    def _observe(self, located: ConsumedRecord) -> None:
        match located.record:
            case GateDecision():
                self.line.observe(located.record)
            case UserRequest():
                self.queue.observe_request(located.record)
            case _:
                # Not a dead letter: every reader reads these topics from the beginning, again after each start.
                _log.warning(
                    "%s offset %d is left out: %s", located.topic, located.offset, located.error or "no decision"
                )
