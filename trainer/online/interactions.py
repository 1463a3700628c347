"""The `interactions` topic by partition and offset: what the members of an online batch refer to.

A record may be gone, by a tombstone and compaction or by retention; what is read then is a gap, and never another
record. Each partition is read once, from the first wanted offset to the last.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.claim import ClaimError, ForeignClaimError, claimed_interaction
from tidemill.schemas.codec import Codec, DecodeError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Interaction, OnlineMember
from tidemill.trainer.batch import InvalidRolloutError, check, sampled_versions
from tidemill.trainer.batch_builder import Exclusion

CLIENT = "tidemill-trainer-interactions"

Found = Interaction | Exclusion
"""An interaction with its segments, or why it cannot be trained."""


class InteractionLog:
    """Fetches interactions by place.

    Args:
        accept_replays: replays whose interactions may be trained; None: of any writer, since that was decided.
    """

    def __init__(self, kafka: KafkaSettings, vocab_size: int, accept_replays: frozenset[str] | None = None) -> None:
        self._accept_replays = accept_replays
        self._codec = Codec(kafka.registry_url)
        self._vocab_size = vocab_size
        self._log = LogReader(kafka, client_id=CLIENT, codec=self._codec)

    def fetch(self, members: Iterable[OnlineMember]) -> dict[Position, Found]:
        """What lies where each member points to, checked.

        Raises TimeoutError when the broker does not deliver, KafkaException for an error that lasts.
        """
        places = {Position.of(member): member for member in members}
        read = self._log.fetch({place for place in places if place.topic == Topic.INTERACTIONS})
        return {place: self._checked(member, read.get(place)) for place, member in places.items()}

    def close(self) -> None:
        """Give the connections back."""
        self._log.close()

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
            whole = claimed_interaction(record, self._codec)
            check(whole, self._vocab_size)
        except (ClaimError, DecodeError):
            return Exclusion.MISSING_INTERACTION
        except (ForeignClaimError, InvalidRolloutError):
            return Exclusion.INVALID_INTERACTION
        versions = sampled_versions(whole)
        said = (whole.version_min, whole.version_max)
        return whole if said == (versions.min(), versions.max()) else Exclusion.INVALID_INTERACTION
