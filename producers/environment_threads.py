"""Runs what environments do in threads, so that one that hangs costs its own rollout and nothing else.

One thread serves everybody while calls are quick: 5 microseconds a call with 16 episodes at once, 34 with one. Further
threads are started when a call has waited for `LOOK_S`. A call that takes longer than its limit is given up; its thread
cannot be ended, and is left to itself until it returns.

What holds: the event loop waits for no environment, and no more than `most_stalled` threads are left to themselves:
past it every call raises, so that the worker ends and is started again. Code that keeps the interpreter's lock while
it hangs is beyond this: only another process can end that.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
LOOK_S = 0.05
"""How often running calls are looked at."""


class Stalled(RuntimeError):
    """A call did not return within its limit."""


class TooManyStalled(RuntimeError):
    """More calls hang than a worker can carry: it has to be started again."""


class Calls(Protocol):
    """Whatever runs an environment's code."""

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns. Raises what it raises; Stalled, TooManyStalled."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    answer: asyncio.Future[Any]
    asked_at: float
    started_at: float | None = None
    stalled: bool = False


class EnvironmentThreads:
    """The threads of one event loop. `close` when nothing is called any more."""

    def __init__(self, limit_s: float, most_stalled: int) -> None:
        self._limit_s = limit_s
        self._most_stalled = most_stalled
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._open: set[_Call] = set()
        self._threads = 0
        self.stalled = 0
        """Calls that were given up and have not returned."""
        self._looking = False

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns. Raises what it raises; Stalled past the limit, TooManyStalled past the number."""
        self._check()
        loop = asyncio.get_running_loop()
        call = _Call(function, loop.create_future(), loop.time())
        self._open.add(call)
        self._queue.put(call)
        if self._threads == 0:
            self._start(loop)
        if not self._looking:
            self._looking = True
            loop.call_later(LOOK_S, self._look, loop)
        answer: T = await call.answer
        return answer

    def close(self) -> None:
        """Let the threads end; those that hang are left, and do not keep the process."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _check(self) -> None:
        if self.stalled > self._most_stalled:
            raise TooManyStalled(
                f"{self.stalled} calls of environments have not returned within {self._limit_s:g} s and hold their "
                "threads (rollout.max_stalled_calls): start this worker again, and look at the failed rollouts' reasons"
            )

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now, late = loop.time(), 0
        for call in self._open:
            if call.started_at is None:
                late += now - call.asked_at >= LOOK_S
            elif now - call.started_at >= self._limit_s and not call.stalled:
                self._give_up(call)
        for _ in range(min(late, len(self._open) - self._threads)):
            self._start(loop)
        self._looking = len(self._open) > self.stalled
        if self._looking:
            loop.call_later(LOOK_S, self._look, loop)

    def _give_up(self, call: _Call) -> None:
        call.stalled = True
        self.stalled += 1
        if call.answer.done():
            return
        try:
            self._check()
        except TooManyStalled as error:
            call.answer.set_exception(error)
        else:
            call.answer.set_exception(Stalled(f"no answer within {self._limit_s:g} s"))

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._threads += 1
        threading.Thread(target=self._work, args=(loop,), name="tidemill-environment", daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._queue.get()) is not None:
            result: object = None
            error: Exception | None = None
            if not call.answer.done():
                call.started_at = loop.time()
                try:
                    result = call.function()
                except BaseException as raised:  # noqa: BLE001 - whatever it is, it is raised at the caller
                    error = _portable(raised)
            try:
                loop.call_soon_threadsafe(self._ended, call, result, error)
            except RuntimeError:
                return  # the event loop is closed: nobody waits any more

    def _ended(self, call: _Call, result: object, error: Exception | None) -> None:
        self._open.discard(call)
        self.stalled -= call.stalled
        if call.answer.done():
            return
        if error is None:
            call.answer.set_result(result)
        else:
            call.answer.set_exception(error)


def _portable(raised: BaseException) -> Exception:
    """What can be raised in a coroutine: others would end the event loop, or be taken for its own."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return RuntimeError(f"it raised {raised!r}")
