"""The batches of a trainer that learns from users: an online batch, and the simulated groups that join it.

A step is taken when an online batch can be trained, and waits a while for its groups. Groups that come while there is
none wait, and grow stale by the ordinary rule.
"""

from __future__ import annotations

from tidemill.schemas.records import StepInput
from tidemill.trainer.batch_builder import BatchBuilder, StepBatch
from tidemill.trainer.log_input import LogInput
from tidemill.trainer.online.config import OnlineSettings
from tidemill.trainer.online.line import WeightLine
from tidemill.trainer.online.queue import OnlineQueue
from tidemill.trainer.online.source import OnlineInput


class OnlineFeed:
    """Joins what the two sources of a step give."""

    def __init__(
        self,
        groups: LogInput,
        builder: BatchBuilder,
        online: OnlineInput,
        queue: OnlineQueue,
        line: WeightLine,
        settings: OnlineSettings,
    ) -> None:
        self._groups, self._builder = groups, builder
        self._online, self._queue = online, queue
        self._line = line
        self._settings = settings
        self._since: tuple[StepInput, float] | None = None

    def poll(self, timeout_s: float, version: int) -> None:
        """Read on at trainer version `version`, for at most about `timeout_s` where nothing comes."""
        self._online.poll()
        self._builder.abandon(self._line.abandoned)
        self._groups.poll(timeout_s, version)

    def close(self, version: int, now: float) -> StepBatch | None:
        """The inputs of the next step at trainer version `version`, or None while they are not all there.

        `now` is any clock in seconds; how long is waited for groups is counted by it.
        """
        self._builder.sweep(version)
        left = self._online.ready(version)
        if left is None:
            return None
        if self._since is None or self._since[0] != left.place:
            self._since = left.place, now
        wanted = self._settings.simulated_groups_per_batch
        if self._builder.waiting < wanted and now < self._since[1] + self._settings.max_wait_seconds:
            return None
        simulated = self._builder.take(wanted)
        return StepBatch(simulated.groups, [*simulated.exclusions, *self._queue.take(left)], left)
