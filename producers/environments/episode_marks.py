"""Shared memory that names the running episode, so that the worker can find which one hangs or ended the process.

The event loop marks its callbacks (steps of tasks, timers), and its executor's threads mark their work
(`asyncio.to_thread`), by the context in which these were started. Threads that an environment starts in another way
have no marks.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")
EPISODE: ContextVar[int] = ContextVar("episode", default=0)
"""Number of the episode of this code; 0 for none."""
MOST_THREADS = 32
SIZE = 16 * (1 + MOST_THREADS)
BUSY_S, MUCH_MORE = 0.2, 4


class EpisodeMarks:
    """Pairs of 8-byte words: episode and steps of the event loop, then episode and id of each thread."""

    def __init__(self, descriptor: int) -> None:
        memory = mmap.mmap(descriptor, SIZE)
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


class MarkingEventLoop(asyncio.SelectorEventLoop):
    """An event loop that marks the episode of each callback while the callback runs."""

    def __init__(self, marks: EpisodeMarks) -> None:
        self._words = marks.words
        super().__init__()
        self.set_default_executor(MarkingThreadPool(marks))

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a marked callback."""
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a marked callback."""
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
        words = self._words
        words[0] = EPISODE.get()
        words[1] += 1
        try:
            callback(*args)
        except Exception:
            words[0] = 0
            raise
        except BaseException:  # noqa: BLE001 - a task raised SystemExit: the process ends, in this episode's name
            traceback.print_exc()
            os._exit(1)
        words[0] = 0


class MarkingThreadPool(ThreadPoolExecutor):
    """A thread pool whose threads mark the episode of their work."""

    def __init__(self, marks: EpisodeMarks) -> None:
        super().__init__(min(MOST_THREADS, (os.cpu_count() or 1) + 4), "environment", self._begin)
        self._words, self._places, self._local = marks.words, itertools.count(2, 2), threading.local()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        """Submit marked work."""
        return super().submit(self._work, EPISODE.get(), partial(function, *args, **kwargs))

    def _begin(self) -> None:
        self._local.place = next(self._places)
        self._words[self._local.place + 1] = threading.get_native_id()

    def _work(self, episode: int, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        self._words[self._local.place] = episode
        try:
            return work()
        finally:
            self._words[self._local.place] = 0


def _processor_ticks(process: int, thread: int) -> int:
    """Return the processor time of a thread, in clock ticks; 0 if the thread has ended."""
    try:
        fields = Path(f"/proc/{process}/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
