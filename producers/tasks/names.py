"""Names of tasks: what a task is for and which one it is, in its id. A task's group has the same name.

    <run>/train/<index>        <run>/eval-before/v<version>/<index>        (also eval-during, eval-after)

What holds: naming is one to one, so that a restarted feeder knows from the log alone what it has issued.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tidemill.schemas.records import Mode


class Stage(StrEnum):
    """What a task is issued for."""

    TRAIN = "train"
    EVAL_BEFORE = "eval-before"
    EVAL_DURING = "eval-during"
    EVAL_AFTER = "eval-after"

    @property
    def mode(self) -> Mode:
        """The mode of its tasks."""
        return Mode.TRAIN if self is Stage.TRAIN else Mode.EVAL


_EVALUATIONS = "|".join(stage for stage in Stage if stage.mode is Mode.EVAL)
_NUMBER = "[0-9]{1,18}"
_NAME = re.compile(rf"(?P<run>[^/]+)/(?:train|(?P<stage>{_EVALUATIONS})/v(?P<version>{_NUMBER}))/(?P<index>{_NUMBER})")


@dataclass(frozen=True, slots=True, order=True)
class TaskName:
    """The name of one task of a run."""

    run_id: str
    stage: Stage
    version: int
    """The version that an evaluation is about; 0 for training."""
    index: int

    def __str__(self) -> str:
        """The task's id and its group's id."""
        middle = self.stage if self.stage is Stage.TRAIN else f"{self.stage}/v{self.version}"
        return f"{self.run_id}/{middle}/{self.index}"


def parse_task_name(text: str) -> TaskName | None:
    """The name that `text` is, or None when it is none."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    stage = Stage(found["stage"] or Stage.TRAIN)
    return TaskName(found["run"], stage, int(found["version"] or 0), int(found["index"]))
