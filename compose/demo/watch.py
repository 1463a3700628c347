"""What both acts share: the reader of the log with the states folded from it, the display, and giving up in time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from tidemill.compose.demo.online_state import OnlineState
from tidemill.compose.demo.plan import DemoPlan
from tidemill.compose.demo.state import LoopState
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader

WATCHED = (
    Topic.TASKS,
    Topic.GROUPS,
    Topic.STEPS,
    Topic.MANIFESTS,
    Topic.ACKS,
    Topic.INTERACTIONS,
    Topic.FEEDBACK,
    Topic.OUTCOMES,
    Topic.ONLINE_BATCHES,
    Topic.GATE,
)
REFRESH_S = 0.25


@dataclass(slots=True)
class DemoWatch:
    """A reader of the log and the states folded from it."""

    reader: LogReader
    state: LoopState
    online: OnlineState
    heard_at: float

    def listen(self, timeout_s: float) -> None:
        """Take what comes within the time."""
        for located in self.reader.poll(timeout_s):
            self._take(located)

    def catch_up(self) -> None:
        """Take what the log holds now."""
        for located in self.reader.read_to_end():
            self._take(located)

    def _take(self, located: ConsumedRecord) -> None:
        self.heard_at = time.monotonic()
        if located.record is not None:
            self.state.observe(located.record)
            self.online.observe(located.record)

    def give_up_when_silent(self, plan: DemoPlan) -> None:
        """Raises RuntimeError when nothing has come for too long."""
        silent_s = time.monotonic() - self.heard_at
        if silent_s > plan.settings.demo.stall_timeout_s:
            raise RuntimeError(
                f"nothing has happened in the log for {silent_s:.0f} s; the roles' own logs are in {plan.log_directory}"
            )


def last_line(log: Path) -> str:
    """The end of a role's log, to show."""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return lines[-1][-80:] if lines else "starting"


@contextlib.contextmanager
def display(
    console: Console, screen: Callable[[], RenderableType], line: Callable[[], str], news: Callable[[], object]
) -> Iterator[Callable[[], None]]:
    """Gives a function that shows how things stand: a live screen on a terminal, else a line when `news` changes."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda: live.update(screen())
        return
    began, known = time.monotonic(), news()

    def show() -> None:
        nonlocal known
        now = news()
        if now != known:
            known = now
            console.print(f"{time.monotonic() - began:6.0f} s  {line()}", highlight=False, soft_wrap=True)

    yield show
