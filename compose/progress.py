"""Progress for a person: spinners, and bars on standard error, silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

EVERY = 20
"""Updates in between are left out: drawing costs more than copying a record."""


class Working:
    """The work, and how much is done."""

    def __init__(self, bar: Progress, title: str, total: int | None) -> None:
        self._bar, self._title = bar, title
        self._task = bar.add_task(title, total=total)

    def __call__(self, done: int, doing: str) -> None:
        """`done` of the total are done, `doing` is next."""
        self._bar.update(self._task, completed=done, description=f"{self._title} {doing}")

    def say(self, doing: str) -> None:
        """`doing` is next."""
        self._bar.update(self._task, description=f"{self._title} {doing}")


@contextmanager
def working(title: str, total: int | None = None) -> Iterator[Working]:
    """Show progress towards `total`, None where that is not known, until the context ends."""
    counter = [] if total is None else [MofNCompleteColumn()]
    with _bar(*counter, TimeElapsedColumn()) as bar:
        yield Working(bar, title, total)


@contextmanager
def remaining(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how much of how much is done, until the context ends."""
    with _bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, of: int) -> None:
            if done % EVERY == 0 or done == of:
                bar.update(task, completed=done, total=of)

        yield update


@contextmanager
def spinner(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show that something is under way; gives a function that shows a detail."""
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=1)
        yield lambda detail: progress.update(task, description=f"{text}: {detail}")
        progress.update(task, completed=1, description=text)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    before = (TextColumn("{task.description}"), BarColumn())
    return Progress(*before, *columns, console=console, transient=True, disable=not console.is_terminal)
