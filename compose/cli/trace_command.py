"""`tidemill trace`: one stage a paragraph, one record a line, its offset last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidemill.compose.cli.users_command import pseudonym_of
from tidemill.compose.options import SettingsOf, with_reachable_log
from tidemill.compose.progress import working
from tidemill.compose.rows import JsonOption, utc

if TYPE_CHECKING:
    from tidemill.consumers.operate.trace.interaction import InteractionPath, Served
    from tidemill.consumers.operate.trace.reading import RolloutPath, UserPath
    from tidemill.consumers.operate.trace.versions import Ended, TracedVersion


def trace(
    settings_of: SettingsOf,
    name: Annotated[
        str | None,
        typer.Argument(help="Id of an interaction (or its interaction token), of a feedback event, or of a rollout."),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="The product's id of a user: follow their data.")] = None,
    is_pseudonym: Annotated[bool, typer.Option("--pseudonym", help="--user is already the log's pseudonym.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Follow one event through the log: served, judged, batched, trained, decided and served again, with offsets.

    Says where the path ends and why: excluded, dropped, waiting, erased, or served now by which replicas. With --user
    lists the versions that learnt from a user's data, also after their erasure.

    Examples: `tidemill trace 3f2a…` · `tidemill trace --user 4711 --json`
    """
    if (name is None) == (user is None):
        raise typer.BadParameter("give the id of an interaction, event or rollout, or --user, and not both")
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.trace.reading import RolloutPath, TraceReader

    with working("reading the log") as bar:
        reader = TraceReader(settings.kafka, lambda done, of: bar.say(f"{done:,} of {of:,} records"))
        if user is not None:
            of_user = reader.user(pseudonym_of(settings, user, is_pseudonym))
            document, lines = asdict(of_user), user_lines(of_user)
        else:
            path = reader.trace(name or "")
            document = asdict(path)
            lines = rollout_lines(path) if isinstance(path, RolloutPath) else path_lines(path)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        Console(soft_wrap=True, highlight=False).print("\n".join(lines), markup=False)


def path_lines(path: InteractionPath) -> list[str]:
    """The path of an interaction."""
    batches = (
        f"{one.batch_id} of version {one.version}, {'correction' if one.correction else 'reward'} {one.reward:+g}, "
        f"{_ended(one.ended)} · {one.place}"
        for one in path.batches
    )
    return [
        f"interaction {path.interaction_id}",
        *_stage("served", _served(path.served, path)),
        *_stage("feedback", _feedback(path)),
        *_stage("outcome", _outcomes(path)),
        *_stage("batch", batches),
        *_stage("version", _versions(path.versions)),
        f"end       {path.end}",
    ]


def rollout_lines(path: RolloutPath) -> list[str]:
    """The path of a rollout."""
    reward = "failed: " + path.failure if path.failure else f"reward {_number(path.reward)}"
    groups = (
        f"{one.group_id} closed by {one.closed_by}, advantage {_number(one.advantage)}, {_ended(one.ended)} · "
        f"{one.place}"
        for one in path.groups
    )
    return [
        f"rollout {path.rollout_id}",
        f"sampled   {path.replica_id}, version {_span(path.version_min, path.version_max)}, {reward} · {path.place}",
        *_stage("group", groups),
        *_stage("version", _versions(path.versions)),
        f"end       {path.end}",
    ]


def user_lines(path: UserPath) -> list[str]:
    """The path of a user's data."""
    demands = (f"{one.wish.value} by {one.requested_by} at {utc(one.at)}" for one in path.demands)
    endings = (f"{n:,} interactions ended: {ending}" for ending, n in sorted(path.outcomes.items()))
    batches = (
        f"{one.batch_id}: {one.interactions} interactions, reward {one.reward:+g}, {one.trained} trained, "
        f"{'; '.join(_ended(ending) for ending in one.ended)} · {one.place}"
        for one in path.batches
    )
    lines = [
        f"user {path.user_id}",
        *_stage("demands", demands),
        *_stage("outcomes", endings),
        *_stage("batches", batches),
    ]
    for run in path.runs:
        trained = ", ".join(str(made.version) for made in run.trained) or "none"
        lines.append(f"run {run.run_id}: trained into version {trained}; contained in {run.contained_in or 'none'}")
        lines += _stage("version", _versions(run.trained))
    return lines if path.runs else [*lines, "end       their data touched no version"]


def _stage(title: str, lines: Iterator[str]) -> Iterator[str]:
    for n, line in enumerate(lines):
        yield f"{title if n == 0 else '':<9} {line}"


def _served(served: Served | None, path: InteractionPath) -> Iterator[str]:
    if served is not None:
        consent = "consent" if served.consent else "NO consent"
        yield (
            f"{utc(served.served_at)} by {served.replica_id}, "
            f"version {_span(served.version_min, served.version_max)}, arm {served.arm} (p {served.propensity:g}), "
            f"{consent}, user {served.user_id}, {served.finish_reason} · {served.place}"
        )
        yield from (f"the same record again · {place}" for place in served.repeats)
    if path.erased is not None:
        yield f"erased · {path.erased}"


def _feedback(path: InteractionPath) -> Iterator[str]:
    for event in path.feedback:
        said = event.kind if event.value is None else f"{event.kind} {event.value:g}"
        corrects = f" correcting {event.corrects}" if event.corrects else ""
        told = f"{utc(event.observed_at)} {said}{corrects} from {event.source}, {event.event_id}"
        yield f"{told}: {event.fate} · {event.place}"
    yield from (f"refused by {one.found_by}: {one.reason} · {one.place}" for one in path.letters)


def _outcomes(path: InteractionPath) -> Iterator[str]:
    for end in path.outcomes:
        what = f"excluded: {end.exclusion}" if end.exclusion else f"reward {_number(end.reward)}"
        before = "" if end.revision == 0 else f", revision {end.revision}, before {_number(end.previous_reward)}"
        yield f"{utc(end.closed_at)} {what}{before}, map {end.map_version} · {end.place}"


def _versions(versions: list[TracedVersion]) -> Iterator[str]:
    for made in versions:
        yield f"{made.version} from {made.parent}, step {made.step} · {made.step_place or 'step no longer kept'}"
        published = f"published · {made.manifest_place}" if made.manifest_place else "not published yet"
        yield f"  {published}"
        for decision in made.decisions:
            yield f"  {decision.verdict} by {decision.by}: {decision.reason} · {decision.place}"
        if made.served_first_at is not None:
            yield f"  served first at {utc(made.served_first_at)}; proved by {', '.join(made.proved_by) or 'nobody'}"
        serving = ", ".join(f"{replica} (version {version})" for replica, version in made.served_by.items())
        yield f"  served now by {serving or 'nobody'}; contained in later versions {made.contained_in or 'none'}"


def _ended(ending: Ended) -> str:
    if ending.reason:
        return f"left out ({ending.reason}) by {ending.step}"
    return "waits for the trainer" if ending.version is None else f"trained by {ending.step}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+g}"
