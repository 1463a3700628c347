"""The simulated users of a storm: the users of the demonstration, who also write notes and send signals again.

Invariants: a line is written for each answer that reached a user and for each acknowledged signal, after the fact, so
that the log must contain everything in the notes. A signal is sent again with the same id until it is acknowledged, as
the SDK and the gateway require; one in two is sent over HTTP to the gateway. It takes the arguments of the command
line: `python observed_users.py users simulate --config FILE`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

NOTES, ADDRESS, KEY = "CHAOS_NOTES", "CHAOS_GATEWAY", "CHAOS_GATEWAY_KEY"
"""Environment variables: the file of notes, and the gateway's address and key."""
SERVED, ACKNOWLEDGED = "served", "acknowledged"
AGAIN_S = 0.5
ACCEPTED, REFUSED = 202, frozenset({400, 401, 403, 413, 415, 422})


@dataclass(frozen=True, slots=True)
class Noted:
    """The answers and acknowledgements that users received, in all processes of their role."""

    served: frozenset[str]
    """Interactions whose answers reached a user."""
    acknowledged: frozenset[str]
    """Keys of the signals that were acknowledged."""


def noted(path: Path) -> Noted:
    """Read the notes in a file, except a line that a kill left incomplete."""
    told: dict[str, set[str]] = {SERVED: set(), ACKNOWLEDGED: set()}
    text = path.read_text("utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with suppress(ValueError, KeyError):
            what, name = json.loads(line)
            told[what].add(name)
    return Noted(frozenset(told[SERVED]), frozenset(told[ACKNOWLEDGED]))


def note(what: str, name: str) -> None:
    """Append a line; the operating system has it when this returns."""
    # One write of a short line to a file opened for appending: after a kill, all of the line is there, or nothing.
    with Path(os.environ[NOTES]).open("ab", buffering=0) as file:
        file.write(json.dumps([what, name]).encode() + b"\n")


def interaction_of(token: str) -> str:
    """Return the interaction of a signed token, without a check of the signature: the product checks it."""
    return token.rpartition(".")[0]


def _use() -> None:
    """Replace the product class of the users by the observed one."""
    from tidemill.compose.demo import users as role
    from tidemill.compose.demo.people import ServedTurn
    from tidemill.producers.feedback.event import FeedbackNotDelivered, FeedbackQueueFull, LogUnreachable
    from tidemill.schemas.catalogue import feedback_key
    from tidemill.schemas.chat.messages import Message, Tool
    from tidemill.schemas.records import SignalKind

    plain = role.ServedProduct

    class ObservedProduct(plain):  # type: ignore[misc, valid-type]  # a class held in a variable, to be replaced
        """The product of the users, which also writes notes."""

        async def complete(self, messages: Sequence[Message], tools: Sequence[Tool], **asked: Any) -> ServedTurn:
            served: ServedTurn = await plain.complete(self, messages, tools, **asked)
            if served.interaction:
                note(SERVED, interaction_of(served.interaction))
            return served

        async def report(self, interaction: str, kind: SignalKind, value: float, **named: Any) -> None:
            async def over_sdk() -> bool:
                try:
                    await plain.report(self, interaction, kind, value, **named)
                except (FeedbackNotDelivered, FeedbackQueueFull, LogUnreachable):
                    return False
                return True

            event_id: str = named["event_id"]
            over_http = partial(_over_http, {"interaction": interaction, "kind": kind.value, "value": value, **named})
            send = over_http if sum(event_id.encode()) % 2 else over_sdk
            while not await send():
                await asyncio.sleep(AGAIN_S)
            note(ACKNOWLEDGED, feedback_key(interaction_of(interaction), event_id))

    vars(role)["ServedProduct"] = ObservedProduct


async def _over_http(body: dict[str, Any]) -> bool:
    """Send a signal; return whether the gateway acknowledged it. Raises RuntimeError if the gateway refuses it."""
    headers = {"authorization": f"Bearer {os.environ[KEY]}"}
    address = f"{os.environ[ADDRESS]}/v1/feedback"
    try:
        async with aiohttp.request("POST", address, json=body, headers=headers) as answer:
            said = await answer.text()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
    if answer.status in REFUSED:
        raise RuntimeError(f"the gateway refuses a signal with {answer.status}: {said[:300]}")
    return answer.status == ACCEPTED


if __name__ == "__main__":
    from tidemill.compose.cli import main

    _use()
    main()
