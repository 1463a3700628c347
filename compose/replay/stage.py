"""`tidemill replay stage`: a stream processor over the log as it lies, compared with what the log recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.moments import moment_us
from tidemill.compose.options import with_settings
from tidemill.compose.progress import working
from tidemill.compose.replay.app import replay_app
from tidemill.compose.replay.difference_text import comparison_document, comparison_lines
from tidemill.compose.rows import JsonOption
from tidemill.consumers.operate.replay.differences import Item, OutputComparison, Window, compare
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.streams.config import ProcessorName

if TYPE_CHECKING:
    from tidemill.streams.offline import Change, Emitted, Replayed, Reweighted

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]
ShowOption = Annotated[int, typer.Option("--show", min=1, help="How many differing records to name.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that the log may deliver nothing.")]
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
    _check(processor, what_if)
    settings = with_reachable_log(settings_of({}))
    if into is not None:
        from tidemill.consumers.operate.replay.target import check_prefix

        check_prefix(settings.kafka.topic_prefix, into)
    done = _run(settings, processor, what_if, window, timeout_s)
    replay_id = _write(settings.kafka, done, into) if into is not None else ""
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
    here = [_emitted_item(names, codec, emitted) for emitted in replayed.emitted]
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


def _check(name: ProcessorName, what_if: WhatIf) -> None:
    if what_if.of_rollouts and name is not ProcessorName.ASSEMBLY:
        raise ValueError(f"--deadline and --reward change rollouts, which {name} does not read: they are of assembly")
    if what_if.reward_version and not what_if.weights:
        raise ValueError("--reward-version says whose rewards --reward sums again: give --reward NAME=WEIGHT as well")


def located_item(names: Names, located: ConsumedRecord) -> Item:
    """A record of the log, to be compared."""
    place = Position(names.of(located.topic), located.partition, located.offset)
    return Item(located.key, located.value, located.record, place, located.timestamp_ms)


def _emitted_item(names: Names, codec: Codec, emitted: Emitted) -> Item:
    emit, cause = emitted.emit, emitted.cause
    place = Position(names.of(Topic(cause.topic)), cause.partition, cause.offset)
    return Item(emit.key.encode(), codec.encode(emit.record), emit.record, place, emitted.at_ms)


def _write(kafka: KafkaSettings, done: _Done, prefix: str) -> str:
    from tidemill.compose.replay.results import write_results

    with working(f"writing under {prefix}"):
        return write_results(kafka, done.topic, done.replayed.emitted, prefix)


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
