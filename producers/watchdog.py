"""Says which topic is silent when a run stands still. Pure: the caller gives the time.

A producer that died must not be waited for in silence: the feeder names the topic that has to speak, and who writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from types import MappingProxyType

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.progress import Stillness

WRITERS = MappingProxyType(
    {
        Topic.GROUPS: "rollout workers (`tidemill rollout`) and group assembly (`tidemill stream`)",
        Topic.STEPS: "the trainer (`tidemill train`)",
        Topic.MANIFESTS: "the trainer (`tidemill train`)",
        Topic.ACKS: "the replicas (`tidemill serve`)",
    }
)


class Watchdog:
    """Measures how long each topic that is waited for has been silent."""

    def __init__(self, timeout_us: int) -> None:
        self._still: Stillness[Topic] = Stillness(timeout_us)
        self._read: Counter[Topic] = Counter()

    def observe(self, topic: Topic, now_us: int) -> None:
        """A record of `topic` arrived."""
        self._read[topic] += 1
        self._look(topic, True, now_us)

    def silent(self, waiting_for: Set[Topic], now_us: int) -> list[Topic]:
        """The topics that were waited for without a record for the timeout; each is named once per timeout."""
        return [topic for topic in WRITERS if self._look(topic, topic in waiting_for, now_us)]

    def _look(self, topic: Topic, waiting: bool, now_us: int) -> bool:
        return self._still.observe(topic, self._read[topic], waiting, now_us) is not None
