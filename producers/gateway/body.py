"""Reading a request's body: bounded in bytes, and JSON without the parts that parsers disagree about. The server bounds
the time that it may take.

A key that comes twice, NaN, Infinity and any encoding but UTF-8 are refused, so that no two readers of the same bytes
understand different things.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fastapi import Request
from starlette.requests import ClientDisconnect

from tidemill.producers.gateway.problem import Problem


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request that says it is JSON. Raises Problem 400, 413, 415."""
    _check_type(request)
    too_long = Problem(413, f"the body is longer than {limit} bytes: send fewer events in one request", close=True)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_long
    except ClientDisconnect as error:
        raise Problem(400, "the client went away", close=True) from error
    return bytes(body)


def parse_json(body: bytes) -> Any:  # noqa: ANN401 - a JSON tree
    """The JSON value of bytes. Raises Problem 400."""
    try:
        text = body.decode()
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise Problem(400, "the body is nested too deeply") from error
    except ValueError as error:
        # Python refuses integers of thousands of digits, whose conversion would take quadratic time.
        raise Problem(400, "the body has an integer of thousands of digits") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Problem(400, f"the key {key[:40]!r} comes twice in one object")
        found[key] = value
    return found


def _constant(name: str) -> NoReturn:
    raise Problem(400, f"{name} is not JSON")


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "send the body as Content-Type: application/json", close=True)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Problem(415, "send the body without Content-Encoding", close=True)
