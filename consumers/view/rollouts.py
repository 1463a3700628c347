"""The view Rollouts: a search over rollouts, and one rollout as a conversation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from tidemill.consumers.sink.query import QueryFailed, unreadable
from tidemill.consumers.view import conversation as talk
from tidemill.consumers.view.conversation import TokenTexts
from tidemill.consumers.view.panels import PAGES, panels
from tidemill.consumers.view.site import MOST_VALUE, Site, arguments, place_in, unless_same
from tidemill.consumers.view.tables import TableRows

TOKENS = 2000
"""Number of tokens shown at a time; the query `rollout_tokens` reads the same number of logprobs."""
CHARACTERS = 4000
"""Number of characters of a task shown at a time; the query `rollout_task` reads the same number."""


def routes(site: Site) -> list[BaseRoute]:
    """Return the routes of the search, of one rollout, and of the parts of both that a browser requests separately."""
    here = next(page for page in PAGES if page.path == "rollouts")
    tokens = lru_cache(maxsize=1)(lambda: talk.token_texts(site.settings.model))

    async def ask(name: str, values: dict[str, str]) -> TableRows:
        return await site.tables.ask(panels()[name].sql, arguments(panels()[name], values))

    async def search(request: Request) -> Response:
        values = dict(request.query_params)
        if "" in values.values():
            return RedirectResponse(f"/rollouts?{urlencode({k: v for k, v in values.items() if v})}", 303)
        return site.html("rollouts.html", page=here, values=values)

    async def found(request: Request) -> Response:
        values = {name: value for name, value in request.query_params.items() if value}
        panel = panels()["rollout_list"]
        try:
            check(values)
            known = await asyncio.to_thread(tokens)
            ways = known.ways(values["text"][:MOST_VALUE]) if known and "text" in values else []
            own = {**values, "tokens": json.dumps(ways, separators=(",", ":"))}
            result, choices = await found_rows(site, own)
        except (QueryFailed, ValueError) as error:
            return site.html("failed.html", panel=panel, message=str(error))
        next_place = result.rows[-1][-1] if result.rows else ""
        own_rows = [row[:-1] for row in result.rows]
        shown = replace(result, columns=result.columns[:-1], types=result.types[:-1], rows=own_rows)
        answer = site.html(
            "rollouts_found.html", panel=panel, result=shown, values=values, asked=own, older=next_place,
            choices=choices.rows, searches_tokens=known is not None,
        )  # fmt: skip
        return unless_same(request, answer)

    async def rollout(request: Request) -> Response:
        values = dict(request.query_params)
        name = request.path_params["rollout_id"]
        own = {"rollout_id": name, **({"run": values["run"]} if values.get("run") else {})}
        part = {key: values[key] for key in ("from", "colour") if values.get(key)}
        return site.html("rollout.html", page=here, name=name, own=own, part=part, panels_of=panels())

    async def facts(request: Request) -> Response:
        values = dict(request.query_params)
        panel = panels()["rollout"]
        try:
            result = await ask("rollout", values)
            if not result.rows:
                name = values.get("rollout_id", "")
                raise QueryFailed(f"the tables hold no rollout {name!r}: not played, or not read yet")
            of = result.named()[0]
            tasks = await ask("rollout_task", {**values, "task_id": of["task_id"], "run": of["run_id"]})
        except QueryFailed as error:
            return site.html("failed.html", panel=panel, message=str(error))
        task = next(iter(tasks.named()), None)
        answer = site.html(
            "rollout_facts.html", panel=panel, task_panel=panels()["rollout_task"], of=of, task=task, values=values,
            most=CHARACTERS,
        )  # fmt: skip
        return unless_same(request, answer)

    async def conversation(request: Request) -> Response:
        values = dict(request.query_params)
        panel = panels()["rollout_tokens"]
        try:
            begin = place_in(values)
            own = {**values, "from": str(begin)}
            result = await ask("rollout_tokens", own)
            if not result.rows:
                raise QueryFailed("the tables do not hold this rollout's tokens: not played, or not read yet")
            of = result.named()[0]
            known = await asyncio.to_thread(tokens)
            colour = values.get("colour", "")
            advantage, worst = None, list[list[Any]]()
            if colour == "mismatch":
                worst = (await ask("rollout_mismatch", values)).rows
            if colour == "advantage":
                advantage = next((row["advantage"] for row in (await ask("rollout", values)).named()), None)
            shown = await asyncio.to_thread(_messages, of, begin, colour, advantage, worst, known)
        except QueryFailed as error:
            return site.html("failed.html", panel=panel, message=str(error))
        answer = site.html(
            "rollout_conversation.html", panel=panel, of=of, total=len(of["token_ids"]), begin=begin, most=TOKENS,
            colour=colour, colours=talk.COLOURS, has_texts=known is not None, own=own, values=values,
            address=f"/rollouts/{quote(values.get('rollout_id', ''), safe='')}", **shown,
        )  # fmt: skip
        return unless_same(request, answer)

    async def group(request: Request) -> Response:
        values = {"group": request.path_params["group_id"], **request.query_params}
        return RedirectResponse(f"/rollouts?{urlencode(values)}", 303)

    return [
        Route("/rollouts", search),
        Route("/rollouts/{rollout_id:path}", rollout),
        Route("/groups/{group_id:path}", group),
        Route("/part/rollouts", found),
        Route("/part/rollout", facts),
        Route("/part/conversation", conversation),
    ]


async def found_rows(site: Site, values: dict[str, str]) -> tuple[TableRows, TableRows]:
    """Return the rollouts that a search found, and the choices of its form. Raises QueryFailed."""
    found, choices = panels()["rollout_list"], panels()["rollout_choices"]
    # The ids of a text are longer than the text, and a part of them would find nothing.
    given = {**arguments(found, values), "tokens": values["tokens"]}
    rows, chosen = await asyncio.gather(site.tables.kept(found.sql, given), site.tables.kept(choices.sql))
    return rows, chosen


def check(values: dict[str, str]) -> None:
    """Raise ValueError for a value of the search that is not the number as which the query would read it."""
    for name, kind in unreadable(panels()["rollout_list"].sql, values):
        words = "a number" if kind.startswith("Float") else "a whole number"
        raise ValueError(f"{name.replace('_', ' ')} must be {words}, and not {values[name]!r}")


def _messages(
    of: dict[str, Any],
    begin: int,
    colour: str,
    advantage: float | None,
    worst: list[list[Any]],
    known: TokenTexts | None,
) -> dict[str, Any]:
    """Return the messages of tokens [begin, begin + TOKENS) of a row of `rollout_tokens`, and their colour legend."""
    ids, mask, lengths = of["token_ids"], of["loss_mask"], [int(n) for n in of["lengths"]]
    # Any process may have written the arrays, so that one may be shorter.
    end = min(begin + TOKENS, len(ids), len(mask))
    texts = known.texts(ids[begin:end]) if known else [f"{number} " for number in ids[begin:end]]
    window = mask[begin:end]
    # A turn that contains only line breaks would look empty.
    texts = [
        text.replace("\n", "↵\n") if sampled and not text.strip() else text
        for text, sampled in zip(texts, window, strict=True)
    ]
    if colour == "mask":
        painted = talk.by_mask(window)
    elif colour == "version":
        spans = ([int(n) for n in of[f"span_{part}"]] for part in ("segments", "versions", "starts", "ends"))
        painted = talk.by_version(window, begin, lengths, zip(*spans, strict=True))
    elif colour == "logprob":
        painted = talk.by_logprob(window, of["logprobs"])
    elif colour == "mismatch":
        painted = talk.by_mismatch(len(window), begin, lengths, worst)
    elif colour == "advantage":
        painted = talk.by_advantage(window, advantage)
    else:
        painted = [("", "")] * len(window), []
    paints, legend = painted
    messages = []
    for tokens in talk.message_tokens(ids, mask, lengths, known):
        if tokens.end <= begin or tokens.start >= end:
            continue
        part = slice(max(tokens.start, begin) - begin, min(tokens.end, end) - begin)
        texts_of = talk.message_parts(texts[part], paints[part], tokens.role == talk.ASSISTANT)
        messages.append(
            {"tokens": tokens, "continues": tokens.start < begin, "goes_on": tokens.end > end, "texts": texts_of}
        )
    return {"messages": messages, "legend": legend, "segments": len(lengths)}
