"""`tidemill users erase|opt-out|opt-in|show`: a user's requests about their data, carried out on the log.

The other parts read the demands in their own order: the join excludes their open interactions, the batcher leaves
them out, the sink deletes their rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.compose.config import TidemillSettings
from tidemill.compose.local_log import with_reachable_log
from tidemill.compose.progress import working
from tidemill.compose.rows import JsonOption
from tidemill.compose.users.text import choice_lines, erasure_lines, standing_lines
from tidemill.schemas.records import UserWish

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]
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
    the bytes within the topics' compaction lag. Batches closed later cannot contain them. What stays: the pseudonym in
    batches that are closed, by which `tidemill trace --user` tells the versions that their data touched, and dead
    letters, until their retention ends. If it is stopped or killed, run it again to finish it.

    Example: `tidemill users erase 4711 --by "data protection, ticket 88"`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.rights.erase import Eraser

    user_id = pseudonym_of(settings, user, is_pseudonym)
    with working("reading the log") as bar:
        eraser = Eraser(settings.kafka, settings.store, lambda done, of: bar.say(f"{done:,} of {of:,} records"))
        done = eraser.erase(user_id, requested_by, dry_run=dry_run)
    _print(asdict(done), erasure_lines(done), as_json)
    raise typer.Exit(1 if done.left or done.claims.foreign else 0)


def opt_out(
    settings_of: SettingsOf,
    user: UserArgument,
    requested_by: ByOption,
    is_pseudonym: PseudonymOption = False,
    as_json: JsonOption = False,
) -> None:
    """Learn nothing from a user from now on: their interactions are counted as excluded.

    Example: `tidemill users opt-out 4711 --by 4711`
    """
    _choose(settings_of, user, UserWish.OPT_OUT, requested_by, is_pseudonym, as_json)


def opt_in(
    settings_of: SettingsOf,
    user: UserArgument,
    requested_by: ByOption,
    is_pseudonym: PseudonymOption = False,
    as_json: JsonOption = False,
) -> None:
    """Learn from a user again: ends an opt-out, or what an erasure demanded for the time after it.

    Example: `tidemill users opt-in 4711 --by 4711`
    """
    _choose(settings_of, user, UserWish.OPT_IN, requested_by, is_pseudonym, as_json)


def show(
    settings_of: SettingsOf, user: UserArgument, is_pseudonym: PseudonymOption = False, as_json: JsonOption = False
) -> None:
    """Show a user's requests, and how many records of theirs the log holds now.

    Example: `tidemill users show 4711`
    """
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.rights.erase import read_consent_status

    user_id = pseudonym_of(settings, user, is_pseudonym)
    with working("reading the log") as bar:
        found = read_consent_status(settings.kafka, user_id, lambda done, of: bar.say(f"{done:,} of {of:,} records"))
    _print(asdict(found), standing_lines(found), as_json)


def _choose(
    settings_of: SettingsOf, user: str, wish: UserWish, requested_by: str, is_pseudonym: bool, as_json: bool
) -> None:
    settings = with_reachable_log(settings_of({}))
    from tidemill.consumers.operate.rights.requests import choose

    made = choose(settings.kafka, pseudonym_of(settings, user, is_pseudonym), wish, requested_by)
    _print(asdict(made), choice_lines(made), as_json)


def _print(document: dict[str, Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        Console(soft_wrap=True, highlight=False).print("\n".join(lines), markup=False)


def pseudonym_of(settings: TidemillSettings, user: str, is_pseudonym: bool) -> str:
    """What the log calls a user. Raises ValueError for an id that cannot be one, or without the product's keys."""
    from tidemill.consumers.operate.rights.requests import checked_pseudonym

    if is_pseudonym:
        return checked_pseudonym(user)
    from tidemill.producers.product.signing import Pseudonyms

    return checked_pseudonym(Pseudonyms(settings.product).of(user))
