"""The control of the chaos tests: a rollout worker that loses rollouts, as it commits a task's offset at its beginning.

Everything else is the code of the real worker. It takes the arguments of the command line:
`python hasty_worker.py rollout --config FILE`.
"""

from __future__ import annotations

from tidemill.compose.cli import main
from tidemill.producers.rollout import worker
from tidemill.producers.rollout.intake import OffsetTracker, Partition


class HastyTracker(OffsetTracker):
    """Offsets that may be committed before the work is done."""

    def begin(self, partition: Partition, offset: int) -> bool:
        """Begin an offset and finish it at once."""
        begun = super().begin(partition, offset)
        self.finish(partition, offset)
        return begun


if __name__ == "__main__":
    vars(worker)["OffsetTracker"] = HastyTracker
    main()
