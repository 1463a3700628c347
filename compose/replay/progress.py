"""A progress bar with the time that is left, on standard error, for a person; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 20
"""Updates in between are left out: drawing costs more than copying a record."""


@contextmanager
def remaining(title: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how much of how much is done, until the context ends."""
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, of: int) -> None:
            if done % EVERY == 0 or done == of:
                bar.update(task, completed=done, total=of)

        yield update
