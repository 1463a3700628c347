"""`tidemill users`: users of the product, also simulated ones, and their requests about their data.

Each of the other processes reads the requests in its own order: the join excludes the users' open interactions, the
batcher leaves them out, the sink deletes their rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.compose.config import TidemillSettings
from tidemill.compose.demo.people import UserActivity, questions
from tidemill.compose.options import SettingsOf, begin_role, with_reachable_log, with_settings
from tidemill.compose.output import JsonOption, json_values, print_document, utc, working
from tidemill.consumers.operate.rights.records import checked_pseudonym, choose
from tidemill.producers.product.signing import Pseudonyms
from tidemill.schemas.records import UserRequest, UserWish

if TYPE_CHECKING:
    from tidemill.consumers.operate.rights.erase import Erasure, HeldDeadLetters

UserArgument = Annotated[str, typer.Argument(help="The product's id of the user.")]
PseudonymOption = Annotated[bool, typer.Option("--pseudonym", help="USER is already the log's pseudonym.")]
ByOption = Annotated[str, typer.Option("--by", help="Name of the person who requests it; kept with the request.")]


def erase(
    settings_of: SettingsOf,
    user: UserArgument,
    requested_by: ByOption,
    is_pseudonym: PseudonymOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the records that would be deleted, and write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Erase a user: delete their interactions, outcomes and feedback from the log, the object store and ClickHouse.

    Reads the log from its beginning and writes a tombstone under the key of each of their records; the broker removes
    the bytes within the topics' compaction lag, and the sink deletes the rows, at once or when it is next started.
    Batches closed later cannot contain them. These stay: the pseudonym in closed batches, with which `tidemill trace
    --user` finds the versions that their data touched, and dead letters, until their retention ends. For an answer that
    was still waiting for feedback, the join then writes an outcome with the exclusion `erased`: run the command again
    to erase it too. If the command is stopped or killed, run it again to finish it.

    Example: `tidemill users erase 4711 --by "data protection, ticket 88"`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.rights.erase import erase as erase_user

    user_id = pseudonym_of(settings, user, is_pseudonym)
    with working("reading the log") as bar:
        done = erase_user(settings.kafka, settings.store, user_id, requested_by, dry_run=dry_run, progress=bar.records)
    print_document(done, erasure_lines(done), as_json)
    raise typer.Exit(1 if done.left or done.claims.foreign else 0)


def choosing(wish: UserWish, explained: str) -> Callable[..., None]:
    """Return a command that records a user's wish; `explained` is its help."""

    def command(
        settings_of: SettingsOf,
        user: UserArgument,
        requested_by: ByOption,
        is_pseudonym: PseudonymOption = False,
        as_json: JsonOption = False,
    ) -> None:
        settings = with_reachable_log(settings_of({}))
        made = choose(settings.kafka, pseudonym_of(settings, user, is_pseudonym), wish, requested_by)
        request, state = made["request"], "is in effect already" if made["carried_on"] else "written"
        print_document(
            made, [f"user {request.user_id}: {_request(request)} {state}, with {made['copies']} copies"], as_json
        )

    command.__name__, command.__doc__ = wish.value, explained
    return command


opt_out = choosing(
    UserWish.OPT_OUT,
    """Learn nothing from what a user is served from now on: these interactions are counted as excluded.

    Answers that were served before it may still be learnt from; `tidemill users erase` prevents this.

    Example: `tidemill users opt-out 4711 --by 4711`
    """,
)
opt_in = choosing(
    UserWish.OPT_IN,
    """Learn from a user again: ends an opt-out, or what an erasure asked for of the time after it.

    Example: `tidemill users opt-in 4711 --by 4711`
    """,
)


def show(
    settings_of: SettingsOf, user: UserArgument, is_pseudonym: PseudonymOption = False, as_json: JsonOption = False
) -> None:
    """Show a user's requests, and how many of their records the log contains now.

    Example: `tidemill users show 4711`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.rights.erase import read_consent_status

    user_id = pseudonym_of(settings, user, is_pseudonym)
    with working("reading the log") as bar:
        found = read_consent_status(settings.kafka, user_id, bar.records)
    requests = [f"  {_request(request)}" for request in found["demands"]]
    lines = [
        f"user {user_id}: the log holds {_counts(found['held'])}",
        *(["requests, of which the last is in effect:", *requests] if requests else ["no requests"]),
        *_letters(found["dead_letters"]),
    ]
    print_document(found, lines, as_json)


def pseudonym_of(settings: TidemillSettings, user: str, is_pseudonym: bool) -> str:
    """Return the pseudonym of a user in the log. Raises ValueError for an id that cannot be one, or without the
    product's keys.
    """
    if is_pseudonym:
        return checked_pseudonym(user)
    return checked_pseudonym(Pseudonyms(settings.product).of(user))


def erasure_lines(done: Erasure) -> list[str]:
    """Return the result of an erasure, and its limits."""
    lines = [f"user {done.user_id}: the log held {_counts(done.found)}"]
    if done.request is None:
        return [*lines, "nothing was written: this was a dry run", *_letters(done.dead_letters)]
    state = "continued" if done.carried_on else "requested"
    lines += [
        f"{state}: {_request(done.request)}",
        f"erased: {_counts(done.tombstones)}; claimed bytes of {done.claims.deleted} objects",
    ]
    lines += [f"NOT DELETED, no object below store.root: {uri}" for uri in done.claims.foreign]
    if done.left:
        lines.append(f"NOT DELETED, written during the erasure: {_counts(done.left)}; run it again")
    if done.unreadable:
        lines.append(f"records that cannot be decoded, of unknown users: {_counts(done.unreadable)}")
    return [*lines, *_letters(done.dead_letters)]


def _request(request: UserRequest) -> str:
    return f"{request.wish.value} {request.request_id} by {request.requested_by} at {utc(request.at)} UTC"


def _letters(letters: HeldDeadLetters) -> list[str]:
    if letters.gone_at_ms is None:
        return []
    until = f"{utc(letters.gone_at_ms * 1_000)} UTC"
    return [
        f"dead letters: {_counts(letters.counts)}; tombstones do not delete them, retention removes them by {until}"
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} in {topic}" for topic, n in sorted(counts.items()) if n) or "nothing"


def simulate(
    settings_of: SettingsOf,
    router: Annotated[str | None, typer.Option(help="Address of the router, http://host:port.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of who the users are, what they ask, how they react.")] = None,
    shuffle_thumbs: Annotated[
        bool | None,
        typer.Option(
            "--shuffle-thumbs", help="Control: votes are exchanged between answers, so that they carry no information."
        ),
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(metavar="QUESTIONS", min=1, help="Only measure the satisfaction of held-out users, then exit."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each report as one JSON document.")] = False,
) -> None:
    """Let simulated users use the product in the same way as its backend: only through the router and the feedback SDK.

    They ask ledger questions and prefer correct answers with a polite ending, which the simulated reward does not
    measure. Nothing is learnt from the held-out users: their satisfaction is printed by weight version.

    Example: `tidemill users simulate --router http://127.0.0.1:8200 --measure 200 --json`
    """
    from tidemill.compose.demo.users import run

    settings = begin_role(settings_of, users__router=router, users__seed=seed, users__shuffle_thumbs=shuffle_thumbs)
    drawn = questions(settings.users, held_out_only=measure is not None, one_in=settings.run.held_out_one_in)

    answers = 0

    def say(seen: UserActivity) -> None:
        nonlocal answers
        answers = seen.interactions
        if as_json:
            print(json.dumps(json_values(seen)), flush=True)
            return
        rates = "  ".join(f"v{s.version} {s.rate:.2f} (n={s.answers})" for s in seen.satisfaction) or "nothing yet"
        totals = f"{seen.interactions} answers, {sum(seen.signals.values())} signals, {seen.failed} given up"
        print(f"satisfied by version: {rates}; {totals}", flush=True)

    run(settings.kafka, settings.product, settings.users, islice(drawn, measure), say)
    if measure is not None and not answers:
        raise ConnectionError(f"no question was answered: does a replica serve behind {settings.users.router}?")


users_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Users of the product: their records in the log, and their requests about them.

USER is the product's own id; the log knows them by a pseudonym, made with `product.pseudonym_key`. With `--pseudonym`
USER is that pseudonym.""",
)
for _command in (erase, opt_out, opt_in, show, simulate):
    users_app.command()(with_settings(_command))
