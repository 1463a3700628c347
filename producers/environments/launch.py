"""Run one agent program under a keeper: `python -m tidemill.producers.environments.launch WORKER STDIN COMMAND…`.

WORKER is the process id of the worker. STDIN is a descriptor that the program reads as its standard input. The program
works in the folder that this is run in, in a session of its own; its temporary folder, and home, is the keeper's.
"""

from __future__ import annotations

import os
import signal
import sys

from tidemill.producers.environments.confinement import keep


def main() -> None:
    """Become the keeper of the program."""
    worker, stdin, command, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:], os.getcwd()

    def run() -> None:
        os.setsid()
        os.chdir(folder)
        os.dup2(stdin, 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(127)

    keep(run, worker, stdin)


if __name__ == "__main__":
    main()
