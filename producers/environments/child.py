"""The process of an environment under its keeper.

`python -m tidemill.producers.environments.child WORKER SOCKET MEMORY` takes the worker's process id and two descriptors
that the worker made: the connection to it, and the memory of the marks.
"""

from __future__ import annotations

import os
import sys
import traceback

from tidemill.producers.environments.confinement import OUT_OF_MEMORY, keep


def main() -> None:
    """Become the keeper of the process."""
    worker, connection, memory = map(int, sys.argv[1:])

    def run() -> None:
        # Imported here: the keeper stays small, and forks before a library has started threads.
        from tidemill.producers.environments.serving import serve

        try:
            serve(connection, memory)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # noqa: BLE001 - it is written down for the worker, and the process ends at once
            traceback.print_exc()
            os._exit(1)

    keep(run, worker, connection, memory)


if __name__ == "__main__":
    main()
