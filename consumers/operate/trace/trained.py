"""How an online batch or a group ended in the trainer: the step that used it, or the reason why none did."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.operate.reading import RecordPlace
from tidemill.consumers.operate.trace.history import History
from tidemill.schemas.catalogue import Topic


@dataclass(frozen=True, slots=True)
class Ended:
    """What the trainer did with something that it read."""

    step: RecordPlace | None
    """The step that trained on it, or that says why it was left out; None while it waits."""
    version: int | None
    """The version that the step made with it; None where it was left out or waits."""
    reason: str
    """Why it was left out; empty otherwise."""


WAITING = Ended(None, None, "")


def ended(history: History, topic: Topic, name: str) -> Ended:
    """The ending of a batch or group."""
    for place, step in history.steps:
        if any((read.topic, read.group_id) == (topic.value, name) for read in step.inputs):
            return Ended(place, step.version, "")
    for place, reason in history.ending(topic, name):
        return Ended(place, None, reason)
    return WAITING


def ended_in_batch(history: History, batch_id: str, interaction_id: str) -> Ended:
    """The ending of one interaction of a batch: a trained batch may have left it out."""
    of_batch = ended(history, Topic.ONLINE_BATCHES, batch_id)
    if of_batch.version is None:
        return of_batch
    for place, reason in history.ending(Topic.INTERACTIONS, interaction_id):
        if place == of_batch.step:
            return Ended(place, None, reason)
    return of_batch
