"""Run one process under a keeper: `python -m tidemill.producers.environments.launch WORKER KIND …`.

    … WORKER environment SOCKET MEMORY    an environment, with the connection to the worker and the memory of the marks
    … WORKER program STDIN COMMAND…       an agent program, with its standard input

WORKER is the process id of the worker; SOCKET, MEMORY and STDIN are descriptors that it made. A program works in the
folder that this is run in, in a session of its own; its temporary folder, and home, is the keeper's.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from tidemill.producers.environments.confinement import OUT_OF_MEMORY, keep


def main() -> None:
    """Become the keeper of the process."""
    worker, kind, rest, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3:], os.getcwd()

    def environment() -> None:
        # Imported here: the keeper stays small, and forks before a library has started threads.
        from tidemill.producers.environments.serving import serve

        try:
            serve(int(rest[0]), int(rest[1]))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        except BaseException:  # noqa: BLE001 - it is written down for the worker, and the process ends at once
            traceback.print_exc()
            os._exit(1)

    def program() -> None:
        os.setsid()
        os.chdir(folder)
        os.dup2(int(rest[0]), 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvp(rest[1], rest[1:])
        except OSError as error:
            os.write(2, f"{rest[1]}: {error.strerror}\n".encode())
            os._exit(127)

    if kind == "environment":
        keep(environment, worker, *map(int, rest))
    else:
        keep(program, worker, int(rest[0]))


if __name__ == "__main__":
    main()
