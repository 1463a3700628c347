"""How a user stands: his demands, and what the log holds of him now."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.consumers.operate.reading import Progress, no_progress
from tidemill.consumers.operate.rights.erase import LettersHeld, letters_of
from tidemill.consumers.operate.rights.holdings import Holdings
from tidemill.consumers.operate.rights.survey import Survey, demands_of
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import UserRequest


@dataclass(frozen=True, slots=True)
class Standing:
    """A user, as the log tells of him."""

    user_id: str
    demands: list[UserRequest]
    """In order; the last one holds."""
    held: dict[str, int]
    """Records by topic."""
    dead_letters: LettersHeld


def read_standing(kafka: KafkaSettings, user_id: str, progress: Progress = no_progress) -> Standing:
    """Read it from the log. Raises LookupError when a topic does not exist, TimeoutError for a silent broker."""
    holdings = Holdings(user_id)
    with Survey(kafka, progress) as survey:
        survey.read_on(holdings)
    return Standing(user_id, demands_of(kafka, user_id).made, holdings.counts, letters_of(kafka, holdings))
