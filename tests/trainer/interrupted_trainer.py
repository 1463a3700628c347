"""The trainer role in successive processes; a signal stops each at a point of a step that is defined only here.

    python interrupted_trainer.py JOBS    JOBS: a list of {"arguments": of `tidemill train`, "actions": [...],
                                                "logs": DIRECTORY}

The actions of a job run in order: ["kill", POINT, STEP] runs a trainer until SIGKILL ends it at a point; ["stop",
POINT, STEP] runs one until SIGSTOP halts it there, and leaves it halted; ["run"] runs one to its end; ["continue"] lets
the halted one run to its end. Jobs run at the same time. For each job, a line of JSON with the outcomes is printed:
"killed", "stopped", or the exit status. Each trainer is a separate process, forked after the libraries are loaded and
before any client, thread or tensor exists.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tidemill.trainer.run  # noqa: F401 - loaded before the processes are made
from tidemill.compose import cli
from tidemill.kernels.fingerprint import TensorKey, fingerprint
from tidemill.kernels.weights.commit import VersionLog
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.session import Session
from tidemill.trainer.step import Learner

Strike = Callable[[], None]


def point(owner: type, name: str, step_of: Callable[..., int], *, after: bool) -> Callable[[int, Strike], None]:
    """Return the point before or after a method is called for a step."""

    def arm(step: int, strike: Strike) -> None:
        method = getattr(owner, name)

        def struck(*arguments: Any, **named: Any) -> Any:
            reached = step_of(*arguments, **named) == step
            if reached and not after:
                strike()
            made = method(*arguments, **named)
            if reached and after:
                strike()
            return made

        setattr(owner, name, struck)

    return arm


before, after = partial(point, after=False), partial(point, after=True)


def within_checkpoint(step: int, strike: Strike) -> None:
    """Strike when a checkpoint's bytes are stored and the file does not have its final name yet."""
    write = CheckpointStore.write

    def struck(self: CheckpointStore, state: Any, *rest: Any) -> str:
        if state.step == step:
            self._filesystem.mv = lambda *_names: strike()
        return write(self, state, *rest)

    CheckpointStore.write = struck


POINTS: dict[str, Callable[[int, Strike], None]] = {
    "before_plan": before(Session, "begin", lambda session, *_rest: session.place.step + 1),
    "after_plan": after(Session, "begin", lambda session, *_rest: session.place.step + 1),
    "after_compute": after(Learner, "train", lambda _learner, _groups, step, *_rest: step),
    "after_record": before(Session, "_finish", lambda _session, record, *_rest: record.step),
    "before_manifest": before(VersionLog, "write", lambda _log, mark, *_rest: mark.version),
    "within_checkpoint": within_checkpoint,
}


def start(job: dict[str, Any], number: int, action: list[Any]) -> int:
    """Start one trainer and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    log = os.open(Path(job["logs"]) / f"{number}-{'-'.join(map(str, action))}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if action[0] != "run":
        sent = signal.SIGKILL if action[0] == "kill" else signal.SIGSTOP
        POINTS[action[1]](action[2], lambda: os.kill(os.getpid(), sent))
    sys.argv = ["tidemill", "train", *job["arguments"]]
    try:
        cli.main()
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 0)
    os._exit(70)


def outcome(pid: int) -> str | int:
    """Wait until a trainer ends or is halted, and return which."""
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return "stopped"
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status)


def outcomes(job: dict[str, Any]) -> list[str | int]:
    """Run the actions of one job."""
    halted, running, said = 0, 0, []
    try:
        for number, action in enumerate(job["actions"]):
            if action[0] == "continue" and not halted:
                said.append("none was halted")
                continue
            if action[0] == "continue":
                running, halted = halted, 0
                os.kill(running, signal.SIGCONT)
            else:
                running = start(job, number, action)
            ended = outcome(running)
            if ended == "stopped":
                halted = running
            running = 0
            said.append(ended)
    finally:
        for pid in filter(None, (running, halted)):
            os.kill(pid, signal.SIGKILL)
    return said


def main() -> None:
    """Run all jobs."""
    jobs = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    # The compiler is loaded at the first call of a compiled function.
    fingerprint(np.zeros(1, np.uint16), TensorKey.of("loaded"))
    with multiprocessing.get_context("fork").Pool(len(jobs)) as pool:
        for said in pool.imap(outcomes, jobs):
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
