"""The control of the chaos tests: a rollout worker that commits a task's offset when it begins it. It loses rollouts.

Everything else is the worker's own; only its book of offsets calls a task done at once. It takes the command line's
arguments: `python hasty_worker.py rollout --config FILE`.
"""

from __future__ import annotations

from tidemill.compose.cli import main
from tidemill.producers.rollout import worker
from tidemill.producers.rollout.intake import OffsetTracker, Partition


class HastyTracker(OffsetTracker):
    """Offsets that may be committed before the work is done."""

    def begin(self, partition: Partition, offset: int) -> bool:
        """As the tracker's, and finished at once."""
        begun = super().begin(partition, offset)
        self.finish(partition, offset)
        return begun


if __name__ == "__main__":
    vars(worker)["OffsetTracker"] = HastyTracker
    main()
