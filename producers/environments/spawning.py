"""Start of an environment's process with its keeper, the reason of its end, and the messages to and from it.

A message is a JSON list on one line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.producers.environments.base import ContextFull, EnvironmentFailed, GenerationFailed, TaskError
from tidemill.producers.environments.confinement import OUT_OF_MEMORY
from tidemill.producers.environments.find import UnknownEnvironment
from tidemill.schemas.chat.messages import BadMessage

if TYPE_CHECKING:
    from tidemill.producers.config import RolloutSettings  # each process of an environment would import it

LOG = logging.getLogger(__name__)
START_S = 120.0
"""Longest time to import and open an environment, and to draw its first task."""
MESSAGE_BYTES = 8 << 20
"""Largest size of a call of the policy, a reply, a score, or a task."""
KILL_S = 10.0
"""Longest time for a keeper to kill a process and all that it started."""
SHOWN = 500
"""Number of last characters of the process's stderr that a reason shows."""
MOST_TEXT = 2000
"""Most characters of an error's text, and of its traceback."""
KEPT_VARIABLES = re.compile(
    "PATH|LANG|LANGUAGE|LC_.*|TZ|TMPDIR|PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_FILE|SSL_CERT_DIR"
    "|OMP_NUM_THREADS|HF_HUB_CACHE|HF_HUB_OFFLINE|HF_DATASETS_CACHE|HF_DATASETS_OFFLINE|NLTK_DATA"
)
"""Variables of the worker's environment that the process gets; none contains or points to a credential."""
PORTABLE: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (GenerationFailed, ContextFull, BadMessage, EnvironmentFailed, TaskError, UnknownEnvironment)
}
"""Errors that are raised with the same type on the other side."""


def encode(frame: object, what: str = "a message", error: type[Exception] = EnvironmentFailed) -> bytes:
    """Encode a message as one line of UTF-8.

    Raises `error`, with `what` as the name of the message, for a line above the size limit; TypeError, ValueError or
    RecursionError for a message that cannot be written as JSON.
    """
    line = json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > MESSAGE_BYTES:
        raise error(f"{what} has {len(line):,} bytes, and a message to or from its process at most {MESSAGE_BYTES:,}")
    return line


def failure(error: BaseException) -> list[str]:
    """Convert an error for sending: its type if it is portable, its text, and its traceback if it is not portable."""
    kind = next((name for name, known in PORTABLE.items() if isinstance(error, known)), "")
    try:
        text = str(error) if kind else repr(error)
        trace = "" if kind else "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - the text of a foreign error is foreign code as well
        text, trace = type(error).__name__, ""
    return [kind, *(part.encode(errors="replace").decode() for part in (text[:MOST_TEXT], trace[-MOST_TEXT:]))]


BUSY_S, MUCH_MORE = 0.2, 4


class EpisodeMarks:
    """Shared memory that names the running episode, so that the worker can find which one hangs or ended the process.

    It has pairs of 8-byte words: episode and steps of the event loop, then episode and id of each thread of its
    executor (`asyncio.to_thread`). Threads that an environment starts in another way have no marks.
    """

    MOST_THREADS = 32
    SIZE = 16 * (1 + MOST_THREADS)
    """In bytes."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, self.SIZE)
        memory.madvise(mmap.MADV_DONTFORK)  # a forked copy of the process crashes at its next mark
        self.words = memoryview(memory).cast("Q")

    @property
    def episode(self) -> int:
        """The episode whose callback runs in the event loop, or was running when the process ended; 0 for none."""
        return self.words[0]

    @property
    def steps(self) -> int:
        """The number of callbacks started so far."""
        return self.words[1]

    async def hanging(self, process: int) -> int:
        """Return the episode that blocks a process: that of the event loop, or that of a busy thread."""
        words = self.words
        threads = {words[at + 1]: words[at] for at in range(2, len(words), 2) if words[at]}
        if not threads:
            return self.episode
        before = {thread: _processor_ticks(process, thread) for thread in (process, *threads)}
        await asyncio.sleep(BUSY_S)
        used = {thread: _processor_ticks(process, thread) - ticks for thread, ticks in before.items()}
        busiest = max(threads, key=lambda thread: used[thread])
        # A thread that holds the interpreter's lock leaves no time to the loop's thread; one that shares it does.
        return threads[busiest] if used[busiest] > MUCH_MORE * used[process] else self.episode


def _processor_ticks(process: int, thread: int) -> int:
    """Return the processor time of a thread, in clock ticks; 0 if the thread has ended."""
    try:
        fields = Path(f"/proc/{process}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


class SpawnedProcess:
    """A process of an environment. `kill` and `ending` may be called repeatedly."""

    def __init__(
        self, name: str, options: Mapping[str, Any], settings: RolloutSettings, network: bool, seed: int | None = None
    ) -> None:
        """Without `seed` it plays episodes, with `seed` it draws tasks. Raises TaskError for too large options."""
        path = [os.path.abspath(entry) if os.path.isdir(entry or ".") else entry for entry in sys.path]
        bounds = {name: getattr(settings, name) for name in ("environment_memory_mb", "environment_file_mb")}
        given = {"name": name, "options": options, "network": network, "seed": seed, "path": path}
        opening = encode({**bounds, **given}, f"environment {name}: the options", TaskError)
        self._memory_mb, self._ending = settings.environment_memory_mb, ""
        self.socket, theirs = socket.socketpair()
        shared = os.memfd_create("tidemill-environment")
        os.truncate(shared, EpisodeMarks.SIZE)
        os.pwrite(shared, opening, EpisodeMarks.SIZE)
        self.marks = EpisodeMarks(shared)
        try:
            with theirs:
                self._keeper = subprocess.Popen(
                    keeper_command("environment", theirs.fileno(), shared),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), shared),
                    env=child_variables(os.environ),
                    start_new_session=True,
                )
        except OSError:
            self.socket.close()
            raise
        finally:
            os.close(shared)

    def kill(self) -> None:
        """Make the keeper kill the process and all that it started."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.stdin = None

    def ending(self) -> str:
        """Return the reason of the process's end. First kills all that still runs, and blocks until that is done."""
        if self._ending:
            return self._ending
        self.kill()
        try:
            output = self._keeper.communicate(timeout=KILL_S)[0]
        except subprocess.TimeoutExpired:
            LOG.error("the process of an environment cannot be killed: look at process %d", self._keeper.pid)
            return "its process cannot be killed"
        try:
            report = json.loads(output)
            code, written = report["code"], report["stderr"].strip()[-SHOWN:]
        except (ValueError, KeyError, TypeError):
            how = f"the keeper of its process ended with code {self._keeper.returncode}"
            written = output.decode(errors="replace")[-SHOWN:]
        else:
            if code == OUT_OF_MEMORY:
                how = f"its process used up its memory ({self._memory_mb} MiB)"
            else:
                named = {each.value: each.name for each in signal.Signals}  # few of the real-time signals have a name
                killed = f"was killed by {named.get(-code, f'signal {-code}')}"
                how = f"its process {killed if code < 0 else f'ended with code {code}'}"
        self._ending = f"{how}; it wrote: {written}" if written else how
        return self._ending


def keeper_command(kind: str, *arguments: object) -> list[str]:
    """Return the command that starts a process of this worker under a keeper (see `confinement`)."""
    module = "tidemill.producers.environments.confinement"
    return [sys.executable, "-P", "-m", module, f"{os.getpid()}", kind, *map(str, arguments)]


def child_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a process, selected from the worker's.

    The order of sets is fixed, since tasks must be the same each time they are drawn. The process finds downloads of
    Hugging Face through their cache directories, without access to the token in the same directory.
    """
    kept = {name: value for name, value in given.items() if KEPT_VARIABLES.fullmatch(name)}
    downloads = Path(given.get("HF_HOME", Path.home() / ".cache/huggingface"))
    cached = {"HF_HUB_CACHE": f"{downloads / 'hub'}", "HF_DATASETS_CACHE": f"{downloads / 'datasets'}"}
    if "PYTHONPATH" in kept:  # it may contain paths relative to the worker's directory
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep)))
    return {"PYTHONHASHSEED": "0", **cached, **kept}
