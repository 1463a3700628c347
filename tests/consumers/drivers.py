"""Runs drivers of this folder, each in a fork of one process that has imported vLLM.

    echo "engine_driver DIR" | python -m tests.consumers.drivers

For each line it calls `drive(DIR)` of the module, writes the result to DIR/found.json, and prints the exit status of
the fork. Engine cores and workers are forks too, so that they inherit the patches of a driver. All this is in a
separate process because vLLM reads its environment at import.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.consumers import engine_driver
from tidemill.consumers.replica.environment import prepare_environment, quick_imports


def forked(work: Callable[..., Any], found: Path, *arguments: Any) -> int:
    """Write the result of a function to a file, in a fork of this process; return the exit status of the fork."""
    found.parent.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # The engine cores end with the process that the environment names.
            prepare_environment(1)
            found.write_text(json.dumps(work(*arguments)))
            status = 0
        except BaseException:  # noqa: BLE001 - the fork ends here; its parent learns only the status
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _drive(module: str, directory: Path) -> Any:
    return importlib.import_module(f"tests.consumers.{module}").drive(directory)


def main() -> None:
    """See the module's docstring."""
    # What vLLM prints does not belong to the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine_driver.prepare()
    # Once, before the forks: the server's modules, and what numba loads for its first compiled loop.
    with quick_imports():
        import tidemill.consumers.replica.server  # noqa: F401

    engine_driver.total({"weight": np.zeros(1, np.uint16)})
    for line in sys.stdin:
        module, name = line.rstrip("\n").split(" ", 1)
        directory = Path(name)
        print(forked(_drive, directory / "found.json", module, directory), file=answers, flush=True)


if __name__ == "__main__":
    main()
