"""`tidemill replay diff`: compare one topic under two prefixes; `tidemill replay stage`: run a stream processor over
the log and compare the results with the recorded ones; and the text and JSON output of a comparison.

Results are written only to topics under their own prefix, which must be empty and have no reader, with the headers of
a replay.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tidemill.compose.cli.replay_copy import replay_app
from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import SettingsOf, TimeoutOption, with_reachable_log, with_settings
from tidemill.compose.output import JsonOption, moment_us, print_document, working
from tidemill.consumers.operate.replay.differences import (
    Difference,
    DifferenceKind,
    Item,
    OutputComparison,
    compare,
    out_of_order,
)
from tidemill.consumers.operate.replay.target import Target, check_prefix
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position, replay_headers
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.streams.config import ProcessorName
from tidemill.streams.machine import OutputRecord
from tidemill.streams.offline import (
    Change,
    DecidedOutput,
    Replayed,
    ReweightRewards,
    deadline_shift,
    recorded_outputs,
    replay,
)
from tidemill.streams.runner.worker import processor_of

ShowOption = Annotated[int, typer.Option("--show", min=1, help="How many differing records to name.")]
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

    Records are matched by their subject (a group, an outcome and its revision, a step), so that a record that is
    missing on one side does not make all later ones differ. The first one that differs is named with its fields.
    Status 1 if anything differs, the order included. Both sides are only read.

    Example: `tidemill replay diff tidemill. what-if. --topic groups`
    """
    settings = with_reachable_log(settings_of({}))
    with working(f"comparing {topic}"):
        sides = []
        for prefix in (first, second):
            kafka = KafkaSettings(**{**settings.kafka.model_dump(), "topic_prefix": prefix})
            with LogReader(kafka, [topic], client_id=CLIENT) as reader:
                sides.append([located_item(Names(prefix), located) for located in reader.read_to_end(timeout_s)])
    there, here = sides
    found, moved = compare(there, here), out_of_order(there, here)
    order = None if moved is None else [str(item.place) for item in moved]
    lines = comparison_lines(found, first or "no prefix", second or "no prefix", show)
    if order is not None:
        lines.append(f"the order differs from {order[0]} and {order[1]} on")
    document = {"topic": topic.value, **comparison_document(found, show), "out_of_order": order}
    print_document(document, lines, as_json)
    raise typer.Exit(1 if found.differences or order is not None else 0)


def located_item(names: Names, located: ConsumedRecord) -> Item:
    """Return a record of the log as an item for comparison."""
    place = Position(names.of(located.topic), located.partition, located.offset)
    return Item(located.key, located.value, located.record, place, located.timestamp_ms)


SHOWN_FIELDS = 12


def comparison_lines(found: OutputComparison, there: str, here: str, show: int) -> list[str]:
    """Return the counts, then the first record that differs, with its fields, then the next ones by name.

    `there` and `here` name the sides; `show` is the number of records to name.
    """
    lines = [f"identical: {found.identical} of {found.total}"]
    counts = {
        "changed": found.count(DifferenceKind.CHANGED),
        f"only in {there}": found.count(DifferenceKind.ONLY_THERE),
        f"only in {here}": found.count(DifferenceKind.ONLY_HERE),
    }
    totals = [f"{what}: {number}" for what, number in counts.items() if number]
    if totals:
        lines.append(", ".join(totals))
    repeated = {there: found.repeated_there, here: found.repeated_here}
    lines += [f"repeated in {side}, byte for byte: {number}" for side, number in repeated.items() if number]
    for number, difference in enumerate(found.differences[:show]):
        label = "first difference" if number == 0 else "then"
        at = f"{there} {difference.there}, {here} {difference.here}"
        match difference.kind:
            case DifferenceKind.CHANGED:
                equal = "" if difference.fields else ", equal in every field: written with another schema"
                what = f"changed, {at}{equal}"
            case DifferenceKind.ONLY_THERE:
                what = f"is only in {there}, {difference.there}"
            case DifferenceKind.ONLY_HERE:
                what = f"is only in {here}, {difference.here}"
        lines.append(f"{label}: {difference.name} {what}")
        if number == 0:
            lines += field_lines(difference)
    return lines


def field_lines(difference: Difference) -> list[str]:
    shown = [f"  {field.path}: {field.there} -> {field.here}" for field in difference.fields[:SHOWN_FIELDS]]
    more = len(difference.fields) - len(shown)
    return [*shown, *([f"  and {more} more fields"] if more > 0 else [])]


def comparison_document(found: OutputComparison, show: int) -> dict[str, Any]:
    """Return a comparison as JSON values, with the first `show` differences."""
    return {
        "there": found.there,
        "here": found.here,
        "identical": found.identical,
        "total": found.total,
        **{kind.value: found.count(kind) for kind in DifferenceKind},
        "repeated_there": found.repeated_there,
        "repeated_here": found.repeated_here,
        "first": found.first,
        "differences": found.differences[:show],
    }


PROGRESS_EVERY = 500


@replay_app.command("stage")
@with_settings
def stage(
    settings_of: SettingsOf,
    processor: Annotated[ProcessorName, typer.Argument(help="Which stream processor.")],
    deadline: Annotated[
        float, typer.Option("--deadline", help="Seconds by which every rollout's deadline is later; below 0: earlier.")
    ] = 0.0,
    reward: Annotated[
        list[str] | None,
        typer.Option("--reward", metavar="NAME=WEIGHT", help="Weight of a reward component; may be repeated."),
    ] = None,
    reward_version: Annotated[
        str, typer.Option("--reward-version", help="With --reward: only rollouts scored by this version.")
    ] = "",
    begin: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Compare what ended at this event time or later.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="Compare what ended before this event time.")
    ] = None,
    into: Annotated[
        str | None, typer.Option("--into", metavar="PREFIX", help="Also write the results under this topic prefix.")
    ] = None,
    show: ShowOption = 5,
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Run group assembly, the feedback join or online batches over the log again, and compare the results with it.

    With the original configuration the results equal the recorded ones, byte for byte. If you change a rule, the first
    record that differs is named, with its fields: `--set stream.min_completed=4`, another map with
    `--set join.map.name=...`, other sizes with `--set batches.max_tokens=...`, another deadline, other weights of the
    reward components. Status 1 if anything differs.

    The topics are read to their ends at the start, without a consumer group, and nothing is written, unless --into
    names a separate prefix for the results; they have a replay id. If the log is still being written, --to leaves out
    what its workers have not written yet. Records that were erased, or deleted by retention, cannot influence the
    results.

    Examples: `tidemill replay stage assembly --config run.toml` ·
    `tidemill replay stage assembly --deadline -20 --into what-if.` ·
    `tidemill replay stage assembly --reward tool_use=0.3`
    """
    window = moment_us(begin), moment_us(end)
    weights = {}
    for text in reward or []:
        name, _, value = text.partition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"--reward {text!r}: expected NAME=WEIGHT, for instance tool_use=0.2")
    if (deadline or weights) and processor is not ProcessorName.ASSEMBLY:
        raise ValueError(
            f"--deadline and --reward change rollouts, which {processor} does not read: use them with assembly"
        )
    if reward_version and not weights:
        raise ValueError("--reward-version selects rollouts for --reward: give --reward NAME=WEIGHT as well")
    settings = with_reachable_log(settings_of({}))
    if into is not None:
        check_prefix(settings.kafka.topic_prefix, into)
    reweighted = ReweightRewards(weights, reward_version) if weights else None
    changes: list[Change] = [deadline_shift(to_us(deadline))] if deadline else []
    changes += [reweighted] if reweighted is not None else []
    topic, replayed, comparison = _run(settings, processor, changes, window, timeout_s)
    if reweighted is not None:
        reweighted.check()
    lines = [f"replayed {replayed.records} records: {len(replayed.emitted)} results, {replayed.rejected} rejected"]
    if replayed.cut:
        lines.append(f"incomplete: {'; '.join(replayed.cut)}")
    lines += comparison_lines(comparison, "the log", "the replay", show)
    replay_id = None
    if into is not None:
        with working(f"writing under {into}"):
            replay_id = write_results(settings.kafka, topic, replayed.emitted, into)
        lines.append(f"written under {into} as replay {replay_id}")
    document = {
        "processor": processor.value,
        "records": replayed.records,
        "results": len(replayed.emitted),
        "rejected": replayed.rejected,
        "cut": replayed.cut,
        **comparison_document(comparison, show),
        "into": into,
        "replay_id": replay_id,
    }
    print_document(document, lines, as_json)
    raise typer.Exit(1 if comparison.differences else 0)


def _run(
    settings: TidemillSettings,
    name: ProcessorName,
    changes: Sequence[Change],
    window: tuple[int | None, int | None],
    timeout_s: float,
) -> tuple[Topic, Replayed, OutputComparison]:
    """Return the output topic of a stage, the results of its replay, and their differences from the recorded ones."""
    processor = processor_of(name, settings.run, settings.stream, settings.join, settings.batches)
    names, codec = Names(settings.kafka.topic_prefix), Codec(settings.kafka.registry_url)
    with working(f"replaying {name}") as progress:
        recorded = recorded_outputs(settings.kafka, settings.run, processor, timeout_s)
        there = [located_item(names, located) for located in recorded]

        def report(done: int, total: int) -> None:
            if done % PROGRESS_EVERY == 0:
                progress.say(f"{done} of {total} records")

        replayed = replay(settings.kafka, processor, changes, timeout_s, report)
    here = []
    for one in replayed.emitted:
        place = Position(names.of(Topic(one.cause.topic)), one.cause.partition, one.cause.offset)
        value = codec.encode(one.output.record)
        here.append(Item(one.output.key.encode(), value, one.output.record, place, one.at_ms))
    (topic,) = processor.outputs
    return topic, replayed, compare(there, here, *window)


def write_results(
    kafka: KafkaSettings, topic: Topic, emitted: Sequence[DecidedOutput[OutputRecord]], prefix: str
) -> str:
    """Write results into `topic` under `prefix`, partitioned like the live one; return the id of the replay.

    A result has the timestamp of the record that caused it, so that two replays write the same.

    Raises ValueError if the prefix is that of live topics, if records exist under it, if a consumer group reads
    there, or if the topic has another number of partitions than the live one.
    """
    target = Target(kafka, prefix)
    target.check(None)
    with LogReader(kafka, [topic], client_id=CLIENT) as reader:
        target.prepare({topic.value: len(reader.partitions(topic))})
    replay_id, names = uuid.uuid4().hex[:12], Names(kafka.topic_prefix)
    with RecordProducer(kafka.model_copy(update={"topic_prefix": prefix}), CLIENT) as producer:
        for one in emitted:
            cause = one.cause
            producer.send(
                one.output.topic,
                one.output.record,
                key=one.output.key,
                partition=one.output.partition,
                timestamp_ms=one.at_ms,
                headers=replay_headers(replay_id, names.of(Topic(cause.topic)), cause.partition, cause.offset),
            )
    return replay_id
