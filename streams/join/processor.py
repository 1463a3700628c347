"""The feedback join as a stream processor: `interactions` and `feedback` in, `outcomes` out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import RunSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.join.feedback_join import INPUTS, FeedbackJoin, JoinRules
from tidemill.streams.state import MachineState

LOG = logging.getLogger("tidemill.streams")


@dataclass(frozen=True, slots=True)
class JoinProcessor:
    """The outcomes of one run."""

    rules: JoinRules
    name: str = "feedback-join"
    table: str = "join"
    inputs: tuple[Topic, ...] = INPUTS
    outputs: tuple[Topic, ...] = (Topic.OUTCOMES,)

    @classmethod
    def of(cls, run: RunSettings, settings: JoinSettings) -> JoinProcessor:
        """From the settings that decide outcomes; what deserves a second thought in them is logged."""
        for note in settings.map.notes():
            LOG.warning(note)
        return cls(JoinRules(run.run_id, settings), settings.application)

    def machine(self, partition: int, state: MachineState) -> FeedbackJoin:
        """The join of a partition. Raises StateError."""
        return FeedbackJoin(partition, self.rules, state)
