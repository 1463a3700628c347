"""`tidemill dead-letters`: unusable values and the reasons, as tables and documents, and their redrive."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import SettingsOf, with_reachable_log, with_settings
from tidemill.compose.output import SHOWN_BYTES, CsvOption, JsonOption, print_json, print_rows, remaining
from tidemill.consumers.operate.replay.records import RANK, topic_of
from tidemill.schemas.catalogue import DEAD_LETTER_SUFFIX
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Record

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.dead_letters import DeadLetters, StoredLetter, Verdict

TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", help="Only letters of this topic (without prefix); may be repeated.")
]
NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TOPIC/PARTITION/OFFSET]...", help="Letters, as `list` and `show` name them."),
]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Only letters whose reason contains this.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="How often the same content is sent back at most.")]
DEFAULT_LIMIT = 3
MOST_BYTES = 512 * 2**20
"""Maximum size of the letters that one command judges, since it sorts them."""

dead_letters_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Dead letters: values that could not be used, kept with their position and the reason.

A letter is named by its position, for instance `rollouts.dlq/3/17`.

    tidemill dead-letters list                                        # what there is, and why
    tidemill dead-letters show rollouts.dlq/3/17                      # bytes, headers, the fields that can be read
    tidemill dead-letters redrive --topic rollouts                    # what would go back (a dry run)
    tidemill dead-letters redrive --topic rollouts --transform mend:value --yes""",
)


@dead_letters_app.command("list")
@with_settings
def list_command(
    settings_of: SettingsOf, topic: TopicOption = None, as_json: JsonOption = False, as_csv: CsvOption = False
) -> None:
    """List dead letters by topic and beginning of the reason: how many, the oldest and the newest.

    Reasons that differ only in the values that they quote are one row. `show` prints the whole reason of a letter.

    Example: `tidemill dead-letters list --topic rollouts`
    """
    with _dead_letters(settings_of({})) as letters:
        from tidemill.consumers.operate.replay.dead_letters import counts

        found = counts(letters.read([topic_of(name).value for name in topic or ()]))
    from tidemill.consumers.operate.replay.selection import utc_text

    rows = [
        (source, of["reason"], of["letters"], utc_text(of["oldest_ms"]), utc_text(of["newest_ms"]),
         sorted(of["found_by"]), of["last"][1])
        for (source, _), of in found.items()
    ]  # fmt: skip
    if rows or as_json or as_csv:
        print_rows(SUMMARY, rows, as_json=as_json, as_csv=as_csv, formats={"letters": ","})
    else:
        typer.echo("no dead letters")


@dead_letters_app.command()
@with_settings
def show(
    settings_of: SettingsOf,
    name: Annotated[str, typer.Argument(metavar="TOPIC/PARTITION/OFFSET", help="A letter, as `list` names it.")],
    whole: Annotated[bool, typer.Option("--whole", help="All of its bytes, not only the first.")] = False,
) -> None:
    """Show one dead letter as JSON: reason, headers, bytes, and the fields that can be read now.

    Example: `tidemill dead-letters show rollouts.dlq/3/17`
    """
    settings = settings_of({})
    place = _place(name)
    with _dead_letters(settings) as letters:
        from tidemill.consumers.operate.replay.dead_letters import readable

        letter = letters.one(*place)
        record, problem = readable(letter.value, letter.source[0], Codec(settings.kafka.registry_url))
        from tidemill.consumers.operate.replay.selection import utc_text

        sequel, value = letters.sequel([letter]), letter.value or b""
        problem = sequel.why_erased(letter, record) or problem
        document = {
            "letter": letter.name,
            "source": letter.origin,
            "reason": letter.reason,
            "found_by": letter.found_by,
            "written": utc_text(letter.raw.timestamp_ms),
            "attempts": sequel.attempts(letter),
            "why_it_cannot_go_back": sequel.why_not(letter, 2**31) or problem,
            "key": _text(letter.key),
            "headers": {name: _text(header) for name, header in letter.raw.headers},
            "n_bytes": len(value),
            "hex": (value if whole else value[:SHOWN_BYTES]).hex(" "),
            "record": record_document(record),
        }
    print_json(document)


@dead_letters_app.command()
@with_settings
def transform(
    settings_of: SettingsOf,
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="Takes a letter, returns bytes or None.")],
    names: NamesArgument = None,
    topic: TopicOption = None,
    reason: ReasonOption = "",
) -> None:
    """Try a transformation: show its result for each letter, as JSON. Nothing is written.

    The function is found in a module of the current directory or of the environment. It gets a letter (`letter.value`,
    `letter.key`, `letter.reason`) and returns the value to send back, or None to leave the letter in its topic.

    Example: `tidemill dead-letters transform mend:value rollouts.dlq/3/17`
    """
    mend = transformation(function)
    with _dead_letters(settings_of({})) as letters:
        verdicts = letters.judge(_chosen(letters, names, topic, reason), DEFAULT_LIMIT, mend)
    print_json([verdict_document(verdict) for verdict in verdicts])


@dead_letters_app.command()
@with_settings
def redrive(
    settings_of: SettingsOf,
    names: NamesArgument = None,
    topic: TopicOption = None,
    reason: ReasonOption = "",
    function: Annotated[
        str | None,
        typer.Option("--transform", metavar="MODULE:FUNCTION", help="Repairs each value first; see `transform`."),
    ] = None,
    limit: LimitOption = DEFAULT_LIMIT,
    yes: Annotated[
        bool, typer.Option("--yes", help="Write. Without it, only show which letters would be sent back.")
    ] = False,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Send dead letters back to the topics from which they came, with the same key, partition and time.

    Only values that can be read now are sent back, each once: the new record names the one that failed. If it fails
    again, it becomes another dead letter, with one more attempt, up to --limit. Letters so old that the log no longer
    shows whether they were sent back are not sent; nor are those whose key, user or interaction was erased.

    Examples: `tidemill dead-letters redrive --topic rollouts --reason "unknown framing"` ·
    `tidemill dead-letters redrive rollouts.dlq/3/17 --transform mend:value --yes`
    """
    mend = None if function is None else transformation(function)
    with _dead_letters(settings_of({})) as letters:
        verdicts = letters.judge(_chosen(letters, names, topic, reason), limit, mend)
        sent = letters.send_back(verdicts) if yes else 0
    if as_json:
        documents = [verdict_document(verdict) for verdict in verdicts]
        print_json({"dry_run": not yes, "sent_back": sent, "letters": documents})
        return
    rows = []
    for verdict in verdicts:
        into, partition = verdict.letter.source
        kind = None if verdict.record is None else type(verdict.record).__name__
        place = f"{into}[{partition}]"
        rows.append((verdict.letter.name, place, verdict.attempts, not verdict.why_not, kind, verdict.why_not))
    print_rows(("letter", "into", "attempts", "goes_back", "record", "why_not"), rows, as_csv=as_csv)
    going = sum(not verdict.why_not for verdict in verdicts)
    typer.echo(f"{sent:,} sent back" if yes else f"nothing was written: --yes sends {going:,} back", err=True)


@contextmanager
def _dead_letters(settings: TidemillSettings) -> Iterator[DeadLetters]:
    kafka = with_reachable_log(settings).kafka
    from tidemill.consumers.operate.replay.dead_letters import DeadLetters

    with remaining("reading") as progress, closing(DeadLetters(kafka, progress)) as letters:
        yield letters


def _chosen(letters: DeadLetters, names: list[str] | None, topic: list[str] | None, reason: str) -> list[StoredLetter]:
    if not (names or topic or reason):
        raise typer.BadParameter("name the letters: by their positions, --topic or --reason")
    if names and (topic or reason):
        raise typer.BadParameter("give positions, or --topic and --reason, and not both")
    if names:
        return [letters.one(*_place(name)) for name in dict.fromkeys(names)]
    chosen, n_bytes = [], 0
    for letter in letters.read([topic_of(name).value for name in topic or ()]):
        if reason in letter.reason:
            chosen.append(letter)
            n_bytes += letter.raw.n_bytes
        if n_bytes > MOST_BYTES:
            raise ValueError(
                f"more than {MOST_BYTES // 2**20} MiB of dead letters are chosen, and this command sorts them in "
                "memory: name fewer, by --topic, --reason or their positions"
            )
    return chosen


def _place(name: str) -> tuple[str, int, int]:
    topic, _, rest = name.partition("/")
    partition, _, offset = rest.partition("/")
    if (
        topic not in RANK
        or not topic.endswith(DEAD_LETTER_SUFFIX)
        or not (partition.isdecimal() and offset.isdecimal())
    ):
        raise ValueError(f"{name!r} is not the position of a dead letter: expected one such as rollouts.dlq/3/17")
    return topic, int(partition), int(offset)


def transformation(text: str) -> Callable[[StoredLetter], bytes | None]:
    """Return the function of `module:function`; modules are also found in the current directory.

    It is called with a `StoredLetter` and returns the bytes to send back, or None to leave the letter in its topic.

    Raises ValueError; the returned function raises it too, if the other function fails.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"--transform {text!r}: expected MODULE:FUNCTION")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--transform {text!r}: {error}") from error

    def checked(letter: StoredLetter) -> bytes | None:
        try:
            made: Any = function(letter)
        except Exception as error:  # the user's own code: the error must name the letter
            raise ValueError(f"--transform {text!r} failed on {letter.name}: {error!r}") from error
        if made is not None and not isinstance(made, bytes):
            raise ValueError(f"--transform {text!r} returned {type(made).__name__} for {letter.name}, not bytes")
        return made

    return checked


SUMMARY = ("topic", "reason", "letters", "first", "last", "found_by", "example")


def record_document(record: Record | None) -> dict[str, Any] | None:
    return None if record is None else {"kind": type(record).__name__, **asdict(record)}


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    return {
        "letter": verdict.letter.name,
        "source": verdict.letter.origin,
        "goes_back": not verdict.why_not,
        "why_not": verdict.why_not,
        "attempts": verdict.attempts,
        "record": record_document(verdict.record),
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")
