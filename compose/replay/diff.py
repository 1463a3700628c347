"""`tidemill replay diff`: one topic under two prefixes; and what a comparison tells a person, and a script."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from tidemill.compose.options import SettingsOf, with_reachable_log, with_settings
from tidemill.compose.progress import working
from tidemill.compose.replay import replay_app
from tidemill.compose.rows import JsonOption
from tidemill.consumers.operate.replay.differences import (
    Difference,
    DifferenceKind,
    Item,
    OutputComparison,
    compare,
    out_of_order,
)
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.log.reader import LogReader

ShowOption = Annotated[int, typer.Option("--show", min=1, help="How many differing records to name.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that the log may deliver nothing.")]
CLIENT = "tidemill-replay"


@replay_app.command("diff")
@with_settings
def diff(
    settings_of: SettingsOf,
    first: Annotated[str, typer.Argument(metavar="PREFIX_A", help="Prefix of one side's topics.")],
    second: Annotated[str, typer.Argument(metavar="PREFIX_B", help="Prefix of the other side's topics.")],
    topic: Annotated[Topic, typer.Option("--topic", help="Which topic.")] = Topic.GROUPS,
    show: ShowOption = 5,
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Compare a topic under two prefixes: the same records, byte for byte, in the same order of each partition?

    Records are told apart by what they are about (a group, an outcome and its revision, a step), so that a record that
    is missing on one side does not make all later ones differ. The first one that differs is named with its fields.
    Status 1 when anything differs, the order included. Both sides are only read.

    Example: `tidemill replay diff tidemill. what-if. --topic groups`
    """
    settings = with_reachable_log(settings_of({}))
    with working(f"comparing {topic}"):
        there, here = (_items(settings.kafka, prefix, topic, timeout_s) for prefix in (first, second))
    found, moved = compare(there, here), out_of_order(there, here)
    order = None if moved is None else [str(item.place) for item in moved]
    if as_json:
        document = {"topic": topic.value, **comparison_document(found, show), "out_of_order": order}
        typer.echo(json.dumps(document, indent=2))
    else:
        lines = comparison_lines(found, first or "no prefix", second or "no prefix", show)
        if order is not None:
            lines.append(f"the order differs from {order[0]} and {order[1]} on")
        typer.echo("\n".join(lines))
    raise typer.Exit(1 if found.differences or order is not None else 0)


def located_item(names: Names, located: ConsumedRecord) -> Item:
    """A record of the log, to be compared."""
    place = Position(names.of(located.topic), located.partition, located.offset)
    return Item(located.key, located.value, located.record, place, located.timestamp_ms)


def _items(kafka: KafkaSettings, prefix: str, topic: Topic, timeout_s: float) -> list[Item]:
    side = KafkaSettings(**{**kafka.model_dump(), "topic_prefix": prefix})
    names = Names(prefix)
    with LogReader(side, [topic], client_id=CLIENT) as reader:
        return [located_item(names, located) for located in reader.read_to_end(timeout_s)]


SHOWN_FIELDS = 12


def comparison_lines(found: OutputComparison, there: str, here: str, show: int) -> list[str]:
    """Counts, then the first record that differs with its fields, then the next ones by name.

    `there` and `here` name the sides; `show` is how many records are named.
    """
    lines = [f"identical: {found.identical} of {found.total}"]
    counts = {
        "changed": found.count(DifferenceKind.CHANGED),
        f"only in {there}": found.count(DifferenceKind.ONLY_THERE),
        f"only in {here}": found.count(DifferenceKind.ONLY_HERE),
    }
    told = [f"{what}: {number}" for what, number in counts.items() if number]
    if told:
        lines.append(", ".join(told))
    repeated = {there: found.repeated_there, here: found.repeated_here}
    lines += [f"repeated in {side}, byte for byte: {number}" for side, number in repeated.items() if number]
    for number, difference in enumerate(found.differences[:show]):
        label = "first difference" if number == 0 else "then"
        lines.append(f"{label}: {_what(difference, there, here)}")
        if number == 0:
            lines += field_lines(difference)
    return lines


def field_lines(difference: Difference) -> list[str]:
    """One line a field that differs."""
    shown = [f"  {field.path}: {field.there} -> {field.here}" for field in difference.fields[:SHOWN_FIELDS]]
    more = len(difference.fields) - len(shown)
    return [*shown, *([f"  and {more} more fields"] if more > 0 else [])]


def _what(difference: Difference, there: str, here: str) -> str:
    match difference.kind:
        case DifferenceKind.CHANGED:
            equal = "" if difference.fields else ", equal in every field: written with another schema"
            return f"{difference.name} changed, {there} {difference.there}, {here} {difference.here}{equal}"
        case DifferenceKind.ONLY_THERE:
            return f"{difference.name} is only in {there}, {difference.there}"
        case DifferenceKind.ONLY_HERE:
            return f"{difference.name} is only in {here}, {difference.here}"


def comparison_document(found: OutputComparison, show: int) -> dict[str, Any]:
    """A comparison as JSON values, with the first `show` differences."""
    return {
        "there": found.there,
        "here": found.here,
        "identical": found.identical,
        "total": found.total,
        **{kind.value: found.count(kind) for kind in DifferenceKind},
        "repeated_there": found.repeated_there,
        "repeated_here": found.repeated_here,
        "first": None if found.first is None else asdict(found.first),
        "differences": [asdict(difference) for difference in found.differences[:show]],
    }
