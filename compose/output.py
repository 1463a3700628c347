"""The output of a command: rows of data, points in time, and progress for a person.

Rows are a table on a terminal, tab-separated values in a pipe, JSON or CSV. Progress is shown on standard error, but
not if that is no terminal.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.cells import cell_len, set_cell_size
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
from rich.table import Table
from rich.text import Text

from tidemill.schemas.clock import to_s

GAP = 2
"""Characters between two columns, and between the name and the value of a row that is shown vertically."""
FOLDED = 20
"""Smallest width to which a text of several words may be folded on a terminal."""
ESCAPES = str.maketrans(
    {"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r", "\b": r"\b", "\f": r"\f", "\0": r"\0"}
)  # fmt: skip
SHOWN_BYTES = 256
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def _alone(context: typer.Context, value: bool) -> bool:
    """Return the value of `--json` or `--csv`. Raises BadParameter if the other one was given before it."""
    if value and (context.params.get("as_json") or context.params.get("as_csv")):
        raise typer.BadParameter("give one of --json and --csv")
    return value


JsonOption = Annotated[bool, typer.Option("--json", callback=_alone, help="Print JSON on standard output.")]
CsvOption = Annotated[bool, typer.Option("--csv", callback=_alone, help="Print the rows as CSV on standard output.")]


def print_rows(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    as_json: bool = False,
    as_csv: bool = False,
    formats: Mapping[str, str] | None = None,
    document: object = None,
) -> None:
    """Print all rows on standard output.

    On a terminal they are a table; if its columns do not fit, each row is shown vertically, one `name  value` per line.
    Otherwise they are tab-separated values with a header, escaped so that ClickHouse's TSV format can read them. Values
    that are lists or dicts are JSON in a cell.

    Args:
        heads: names of the columns.
        formats: format specifications of columns of numbers, for a terminal only.
        document: printed as JSON in place of the rows.
    """
    values = [list(row) for row in rows]
    if as_json:
        print_json([dict(zip(heads, row, strict=True)) for row in values] if document is None else document)
    elif as_csv:
        csv.writer(sys.stdout).writerows([heads, *([_text(value) for value in row] for row in values)])
    elif not sys.stdout.isatty():
        cells = (
            (r"\N" if value is None else _text(value).translate(ESCAPES) for value in row) for row in (heads, *values)
        )
        typer.echo("\n".join(map("\t".join, cells)))
    elif not values:
        typer.echo("no rows")
    else:
        _show(heads, values, formats or {})


def print_document(document: object, lines: Iterable[str], as_json: bool) -> None:
    """Print the result of a command: lines for a person, or the document as JSON."""
    if as_json:
        print_json(document)
    else:
        typer.echo("\n".join(map(harmless, lines)))


def print_json(document: object) -> None:
    typer.echo(as_json_text(document))


def as_json_text(document: object) -> str:
    """Return a document as JSON; see `json_values`."""
    return json.dumps(json_values(document), indent=2)


def json_values(value: object) -> object:
    """Return a document, which may contain dataclasses, with values that JSON supports: bytes as hexadecimal,
    truncated, NaN and infinities as null, and values of other types as text."""
    if isinstance(value, dict):
        return {key: json_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_values(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return json_values(asdict(value))
    if isinstance(value, bytes):
        return value[:SHOWN_BYTES].hex() + ("…" if len(value) > SHOWN_BYTES else "")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def harmless(text: str) -> str:
    """Return the text without control characters, so that text of a model or a product cannot control the terminal."""
    return text.translate(CONTROLS)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple, dict)):
        return json.dumps(json_values(value), ensure_ascii=False)
    return str(value)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object, specification: str) -> str:
    """Format a value for a person."""
    if _number(value):
        return format(value, specification)
    shown = ", ".join(map(_text, value)) if isinstance(value, (list, tuple)) else _text(value)
    return harmless(shown).expandtabs()


def _show(heads: Sequence[str], rows: Sequence[Sequence[object]], formats: Mapping[str, str]) -> None:
    console = Console()
    cells = [[_cell(value, formats.get(head, "")) for head, value in zip(heads, row, strict=True)] for row in rows]
    widths = _widths([[head, *column] for head, *column in zip(heads, *cells, strict=True)], console.width)
    if widths is None:
        width = max(map(cell_len, heads)) + GAP
        for n, row in enumerate(cells):
            if n:
                console.print()
            for head, cell in zip(heads, row, strict=True):
                shown = cell.replace("\n", "\n" + " " * width)
                console.print(Text.assemble((set_cell_size(head, width), "bold"), shown), soft_wrap=True)
        return
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for head, width, column in zip(heads, widths, zip(*rows, strict=True), strict=True):
        numbers = all(value is None or _number(value) for value in column)
        table.add_column(Text(head), width=width, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Return widths that break no name or number and fold no text too narrow; None if they do not fit.

    A single row is not folded: shown vertically, it is easier to read.
    """
    folds = len(columns[0]) > 2
    full, widths = [], []
    for column in columns:
        wide = [max(map(cell_len, cell.split("\n"))) for cell in column]
        texts = [folds and len(cell.split()) > 1 for cell in column]
        full.append(max(wide))
        widths.append(max(min(width, FOLDED) if text else width for width, text in zip(wide, texts, strict=True)))
    spare = available - sum(widths) - GAP * (len(widths) - 1)
    if spare < 0:
        return None
    # The columns that need the least extra width come first; the others share the width that is left.
    wishes = sorted((full[n] - widths[n], n) for n in range(len(widths)))
    for done, (wish, n) in enumerate(wishes):
        more = min(wish, spare // (len(wishes) - done))
        widths[n] += more
        spare -= more
    return widths


def utc(microseconds: int) -> str:
    """Format a time since the Unix epoch as a date and a time of day in UTC, to the second; as the number of
    microseconds if no date has it: a record may hold any number."""
    try:
        return datetime.fromtimestamp(to_s(microseconds), UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return f"{microseconds} µs"


def moment_us(text: str | None) -> int | None:
    """Parse an ISO 8601 time to microseconds since the Unix epoch, UTC if it has no zone; None stays None.

    Raises ValueError for any other text.
    """
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not a time: write it like 2026-01-31T14:05:00 or 2026-01-31T14:05+02:00"
        ) from error
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = aware - datetime.fromtimestamp(0, UTC)
    return (whole.days * 86_400 + whole.seconds) * 1_000_000 + whole.microseconds


EVERY = 20
"""The interval between two updates: drawing costs more than copying a record."""


class Working:
    def __init__(self, bar: Progress, title: str, total: int | None) -> None:
        self._bar, self._title = bar, title
        self._task = bar.add_task(title, total=total)

    def __call__(self, done: int, doing: str) -> None:
        """Show that `done` of the total are done and `doing` is next."""
        self._bar.update(self._task, completed=done, description=f"{self._title} {doing}")

    def say(self, doing: str) -> None:
        """Show that `doing` is next."""
        self._bar.update(self._task, description=f"{self._title} {doing}")

    def records(self, done: int, of: int) -> None:
        """Show that `done` records of `of` are read."""
        self.say(f"{done:,} of {of:,} records")


@contextmanager
def working(title: str, total: int | None = None) -> Iterator[Working]:
    """Show progress towards `total`, None if that is not known, until the context ends."""
    counter = [] if total is None else [MofNCompleteColumn()]
    with _bar(*counter, TimeElapsedColumn()) as bar:
        yield Working(bar, title, total)


@contextmanager
def remaining(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many of how many are done, until the context ends."""
    with _bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, of: int) -> None:
            if done % EVERY == 0 or done == of:
                bar.update(task, completed=done, total=of)

        yield update


@contextmanager
def spinner(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Show that a task is in progress; yield a function that shows a detail."""
    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=1)
        yield lambda detail: progress.update(task, description=f"{text}: {detail}")
        progress.update(task, completed=1, description=text)


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    before = (TextColumn("{task.description}"), BarColumn())
    return Progress(*before, *columns, console=console, transient=True, disable=not console.is_terminal)
