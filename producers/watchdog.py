"""Says which topic is silent when a run stands still. Pure: the caller gives the time.

A producer that died must not be waited for in silence: the feeder names the topic that has to speak, and who writes it.
"""

from __future__ import annotations

from collections.abc import Set
from types import MappingProxyType

from tidemill.schemas.catalogue import Topic

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
        self._timeout_us = timeout_us
        self._since: dict[Topic, int] = {}

    def observe(self, topic: Topic, now_us: int) -> None:
        """A record of `topic` arrived."""
        if topic in self._since:
            self._since[topic] = now_us

    def silent(self, waiting_for: Set[Topic], now_us: int) -> list[Topic]:
        """The topics that were waited for without a record for the timeout; each is named once per timeout."""
        self._since = {topic: self._since.get(topic, now_us) for topic in sorted(waiting_for)}
        silent = [topic for topic, since in self._since.items() if now_us - since >= self._timeout_us]
        for topic in silent:
            self._since[topic] = now_us
        return silent
