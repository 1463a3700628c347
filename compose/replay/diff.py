"""`tidemill replay diff`: one topic under two prefixes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.options import with_settings
from tidemill.compose.progress import working
from tidemill.compose.replay.app import replay_app
from tidemill.compose.replay.difference_text import comparison_document, comparison_lines
from tidemill.compose.replay.stage import ShowOption, TimeoutOption, located_item
from tidemill.compose.rows import JsonOption
from tidemill.consumers.operate.replay.differences import Item, compare, out_of_order
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.reader import LogReader

CLIENT = "tidemill-replay"


@replay_app.command("diff")
@with_settings
def diff(
    settings_of: Callable[[dict[str, Any]], TidemillSettings],
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


def _items(kafka: KafkaSettings, prefix: str, topic: Topic, timeout_s: float) -> list[Item]:
    side = KafkaSettings(**{**kafka.model_dump(), "topic_prefix": prefix})
    names = Names(prefix)
    with LogReader(side, [topic], client_id=CLIENT) as reader:
        return [located_item(names, located) for located in reader.read_to_end(timeout_s)]
