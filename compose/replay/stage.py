"""`tidemill replay stage`: a stream processor over the log as it lies, compared with what the log recorded.

Results that are written go to topics under a prefix of their own, which must be empty and read by nobody, and carry the
headers of a replay.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.options import SettingsOf, with_reachable_log, with_settings
from tidemill.compose.progress import working
from tidemill.compose.replay import replay_app
from tidemill.compose.replay.diff import ShowOption, TimeoutOption, comparison_document, comparison_lines, located_item
from tidemill.compose.rows import JsonOption, moment_us
from tidemill.consumers.operate.replay.differences import Item, OutputComparison, Window, compare
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import Position, replay_headers
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.streams.config import ProcessorName

if TYPE_CHECKING:
    from tidemill.streams.offline import Change, Emitted, Replayed, Reweighted

PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A counterfactual as the command line gives it."""

    deadline_s: float = 0.0
    weights: dict[str, float] | None = None
    reward_version: str = ""

    @property
    def of_rollouts(self) -> bool:
        """Whether it changes rollouts."""
        return bool(self.deadline_s or self.weights)


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

    With the original configuration the results are the recorded ones, byte for byte. Change a rule, and the first
    record that comes out different is named, with its fields: `--set stream.min_completed=4`, another map by
    `--set join.map.name=...`, other sizes by `--set batches.max_tokens=...`, another deadline, other weights of the
    reward's parts. Status 1 when anything differs.

    The topics are read to their ends as they are at the start, without a consumer group, and nothing is written, unless
    --into names a prefix of its own for the results; they carry a replay id. On a log that is being written, --to
    leaves out what its workers have not written yet. Records that were erased or are past their retention are not
    there to decide anything.

    Examples: `tidemill replay stage assembly --config run.toml` ·
    `tidemill replay stage assembly --deadline -20 --into what-if.` ·
    `tidemill replay stage assembly --reward tool_use=0.3`
    """
    window = Window(moment_us(begin), moment_us(end))
    what_if = WhatIf(deadline, _weights(reward or []), reward_version)
    if what_if.of_rollouts and processor is not ProcessorName.ASSEMBLY:
        raise ValueError(
            f"--deadline and --reward change rollouts, which {processor} does not read: they are of assembly"
        )
    if what_if.reward_version and not what_if.weights:
        raise ValueError("--reward-version says whose rewards --reward sums again: give --reward NAME=WEIGHT as well")
    settings = with_reachable_log(settings_of({}))
    if into is not None:
        from tidemill.consumers.operate.replay.target import check_prefix

        check_prefix(settings.kafka.topic_prefix, into)
    done = _run(settings, processor, what_if, window, timeout_s)
    replay_id = ""
    if into is not None:
        with working(f"writing under {into}"):
            replay_id = write_results(settings.kafka, done.topic, done.replayed.emitted, into)
    if as_json:
        typer.echo(json.dumps(_document(processor, done, show, into, replay_id), indent=2))
    else:
        typer.echo("\n".join(_lines(done, show, into, replay_id)))
    raise typer.Exit(1 if done.comparison.differences else 0)


@dataclass(frozen=True, slots=True)
class _Done:
    """A stage that was replayed."""

    topic: Topic
    replayed: Replayed
    comparison: OutputComparison


def _run(settings: TidemillSettings, name: ProcessorName, what_if: WhatIf, window: Window, timeout_s: float) -> _Done:
    from tidemill.streams.offline import Reweighted, recorded_outputs, replay
    from tidemill.streams.runner.worker import Rules, processor_of

    rules = Rules(settings.run, settings.stream, settings.join, settings.batches)
    processor = processor_of(name, rules)
    reweighted = Reweighted(what_if.weights, what_if.reward_version) if what_if.weights else None
    with working(f"replaying {name}") as progress:
        recorded = recorded_outputs(settings.kafka, settings.run, processor, timeout_s)

        def told(done: int, total: int) -> None:
            if done % PROGRESS_EVERY == 0:
                progress.say(f"{done} of {total} records")

        replayed = replay(settings.kafka, processor, _change(what_if, reweighted), timeout_s, told)
    if reweighted is not None:
        reweighted.check()
    names, codec = Names(settings.kafka.topic_prefix), Codec(settings.kafka.registry_url)
    there = [located_item(names, located) for located in recorded]
    here = []
    for one in replayed.emitted:
        place = Position(names.of(Topic(one.cause.topic)), one.cause.partition, one.cause.offset)
        value = codec.encode(one.emit.record)
        here.append(Item(one.emit.key.encode(), value, one.emit.record, place, one.at_ms))
    (topic,) = processor.outputs
    return _Done(topic, replayed, compare(there, here, window))


def _change(what_if: WhatIf, reweighted: Reweighted | None) -> Change:
    from tidemill.streams.offline import DeadlineShift, chained

    changes: list[Change] = []
    if what_if.deadline_s:
        changes.append(DeadlineShift(to_us(what_if.deadline_s)))
    if reweighted is not None:
        changes.append(reweighted)
    return chained(changes)


def _weights(assignments: Sequence[str]) -> dict[str, float]:
    weights = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            equals = ""
        if not name or not equals:
            raise ValueError(f"--reward {text!r}: expected NAME=WEIGHT, for instance tool_use=0.2")
    return weights


def _lines(done: _Done, show: int, into: str | None, replay_id: str) -> list[str]:
    replayed = done.replayed
    lines = [f"replayed {replayed.records} records: {len(replayed.emitted)} results, {replayed.rejected} rejected"]
    if replayed.cut:
        lines.append(f"not whole: {'; '.join(replayed.cut)}")
    lines += comparison_lines(done.comparison, "the log", "the replay", show)
    if into is not None:
        lines.append(f"written under {into} as replay {replay_id}")
    return lines


def _document(name: ProcessorName, done: _Done, show: int, into: str | None, replay_id: str) -> dict[str, Any]:
    replayed = done.replayed
    return {
        "processor": name.value,
        "records": replayed.records,
        "results": len(replayed.emitted),
        "rejected": replayed.rejected,
        "cut": replayed.cut,
        **comparison_document(done.comparison, show),
        "into": into,
        "replay_id": replay_id or None,
    }


def write_results(kafka: KafkaSettings, topic: Topic, emitted: Sequence[Emitted], prefix: str) -> str:
    """Write results into `topic` under `prefix`, as partitioned as the live one; the id of the replay.

    Their timestamps are those of the records by which they were decided, so that two replays write the same; and the
    topic keeps them at any age.

    Raises Refused when the prefix is that of live topics, when records lie under it, or a consumer group reads there.
    """
    from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # its stubs re-export nothing

    from tidemill.consumers.operate.replay.target import Target
    from tidemill.schemas.log.admin import REQUEST_TIMEOUT_S, admin_client, wait_until_led
    from tidemill.streams.offline import CLIENT

    Target(kafka, prefix).check(None)
    target = kafka.model_copy(update={"topic_prefix": prefix})
    with LogReader(kafka, [topic], client_id=CLIENT) as reader:
        partitions = len(reader.partitions(topic))
    client, full = admin_client(target), Names(prefix).of(topic)
    if full not in client.list_topics(timeout=REQUEST_TIMEOUT_S).topics:
        kept = {"cleanup.policy": "delete", "retention.ms": "-1"}
        new = NewTopic(full, partitions, replication_factor=target.replication_factor, config=kept)
        client.create_topics([new], request_timeout=REQUEST_TIMEOUT_S)[full].result()
        wait_until_led(client, {full})
    replay_id, names = uuid.uuid4().hex[:12], Names(kafka.topic_prefix)
    with RecordProducer(target, CLIENT) as producer:
        for one in emitted:
            cause = one.cause
            producer.send(
                one.emit.topic,
                one.emit.record,
                key=one.emit.key,
                partition=one.emit.partition,
                timestamp_ms=one.at_ms,
                headers=replay_headers(replay_id, names.of(Topic(cause.topic)), cause.partition, cause.offset),
            )
    return replay_id
