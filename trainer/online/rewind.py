"""Going back to an older version: its weights with the optimizer's moments of then, from which training goes on.

They come from the nearest checkpoint on the version's line, or from the model that the run started with; the steps
after it are made again from their recorded inputs and checked. Nothing is published by it: the version is in the log.
"""

from __future__ import annotations

import logging

from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import TrainStep
from tidemill.trainer.checkpoint import CheckpointStore, TrainerCheckpointError
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.history import RecordedInputs, read_steps
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.model import load_model
from tidemill.trainer.session import Session

_log = logging.getLogger(__name__)


class Rewinder:
    """Takes a session back."""

    def __init__(
        self,
        kafka: KafkaSettings,
        run: RunSettings,
        settings: TrainerSettings,
        producer: RecordProducer,
        checkpoints: CheckpointStore,
        session: Session,
    ) -> None:
        self._kafka, self._run, self._settings = kafka, run, settings
        self._producer = producer
        self._checkpoints = checkpoints
        self._session = session

    def go_back(self, version: int, step: int) -> None:
        """Train on from `version` with the step after `step`.

        Raises CheckpointError for a checkpoint that is not what the log recorded, NotRepeatableError or LookupError
        when the steps after the nearest checkpoint cannot be made again.
        """
        steps = {record.version: record for record in read_steps(self._kafka, self._run.run_id)}
        begin, path = way_back(version, steps, set(self._checkpoints.steps()))
        _log.info("going back to version %d: from the weights of version %d over %d steps", version, begin, len(path))
        self._load(begin, steps)
        if path:
            limit, vocab_size = self._settings.read_ahead_bytes, self._session.vocab_size
            with RecordedInputs(self._kafka, self._producer, limit, vocab_size) as inputs:
                for record in path:
                    self._session.make_again(record, inputs.of(record))
        self._session.continue_from_here(step)

    def _load(self, version: int, steps: dict[int, TrainStep]) -> None:
        if version == 0:
            fresh = MasterWeights(load_model(self._settings.model), self._settings.optimizer)
            self._session.go_back(0, fresh.state())
            return
        self._session.go_back(version, self._checkpoints.read(version)[1])
        if self._session.place.fingerprint != steps[version].fingerprint:
            raise TrainerCheckpointError(
                f"the checkpoint of step {version} holds weights {self._session.place.fingerprint}, the log recorded "
                f"{steps[version].fingerprint}: it is damaged or of another run; delete it, and an older one is used"
            )


def way_back(version: int, steps: dict[int, TrainStep], saved: set[int]) -> tuple[int, list[TrainStep]]:
    """The nearest version on the line of `version` that is in `saved`, else 0, and the steps from it on, in order.

    `steps` are by the version that each made.
    """
    path: list[TrainStep] = []
    while version and version not in saved:
        path.append(steps[version])
        version = steps[version].parent_version
    return version, path[::-1]
