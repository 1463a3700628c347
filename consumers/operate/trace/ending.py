"""In one sentence: where the path of an interaction ends, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.consumers.operate.reading import RecordPlace
from tidemill.consumers.operate.trace.history import Made
from tidemill.consumers.operate.trace.path import End, InBatch, Served


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a batch says was left out of all batches, by reason. Who it was, it does not say."""

    place: RecordPlace
    run_id: str
    branch: str
    closed_at: int
    counts: dict[str, int]


def explain(
    served: Served | None,
    erased: RecordPlace | None,
    ends: Sequence[End],
    batches: Sequence[InBatch],
    versions: Sequence[Made],
    dropped: Sequence[Dropped],
) -> str:
    """Where the path ends. The stages are those of a `Path`."""
    if versions:
        return _in_weights(versions)
    if batches:
        return _in_batch(batches[-1])
    if ends:
        return _at_end(ends, served, dropped)
    if erased is not None:
        return f"erased: a tombstone at {erased} ends it, and nothing trained on it"
    if served is None:
        return "the log holds no such interaction: never served, or past the log's retention"
    return "waits for its end: the join closes it when the longest horizon of its signals has passed in event time"


def _in_weights(versions: Sequence[Made]) -> str:
    newest = versions[-1]
    trained = ", ".join(str(made.version) for made in versions)
    if newest.manifest_place is None:
        return f"trained into version {trained}, which is not published yet"
    serving = {replica: version for made in versions for replica, version in made.served_by.items()}
    if serving:
        served = ", ".join(f"{replica} (version {version})" for replica, version in sorted(serving.items()))
        return f"trained into version {trained}, and served now by {served}"
    last = newest.decisions[-1] if newest.decisions else None
    why = "" if last is None else f": last decision {last.verdict} by {last.by}, {last.reason}"
    return f"trained into version {trained}, which no replica serves now{why}"


def _in_batch(newest: InBatch) -> str:
    if newest.ended.reason:
        return f"left out by the trainer ({newest.ended.reason}), as {newest.ended.step} says"
    return f"waits for the trainer in batch {newest.batch_id}"


def _at_end(ends: Sequence[End], served: Served | None, dropped: Sequence[Dropped]) -> str:
    newest = ends[-1]
    if newest.exclusion:
        return f"excluded: {newest.exclusion}, as {newest.place} says; it is in no batch"
    later = [one for one in dropped if served is None or (one.run_id, one.branch) == (served.run_id, served.branch)]
    suspects = [one for one in later if one.closed_at >= newest.closed_at]
    if suspects:
        first = suspects[0]
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(first.counts.items()))
        return f"has a reward and is in no batch: {first.place} closed after it and counts as dropped: {reasons}"
    return "has a reward and waits for its online batch to be closed by tokens or by time"
