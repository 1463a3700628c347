"""A progress bar on standard error, for a person; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), *counter, TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield Working(bar, title, total)
