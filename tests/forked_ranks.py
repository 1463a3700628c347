"""Ranks of a distributed job, forked from a process that has loaded the libraries, connected like those of torchrun."""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path


def run_ranks(size: int, work: Callable[[int], None], log_of: Callable[[int], Path]) -> list[int]:
    """Run `work(rank)` in one process per rank, with its output in the file `log_of(rank)`; return the exit statuses.

    This process must not have a thread or a client of Kafka yet.
    """
    with socket.socket() as held:
        # The first rank may bind the port again; for all other processes the port stays in use.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        # The ranks need not look for garbage in all that is loaded.
        gc.freeze()
        ranks = []
        for rank in range(size):
            if not (pid := os.fork()):
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
                _become(lambda rank=rank: work(rank), log_of(rank))
            ranks.append(pid)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def _become(work: Callable[[], None], log: Path) -> None:
    """Do the work of a rank and end this process."""
    status, output = 1, os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the log of the rank says which
        traceback.print_exc()
    finally:
        os._exit(status)
