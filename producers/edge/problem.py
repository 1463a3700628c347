"""Errors in the form that clients read, and the bodies of their requests.

Errors are `application/problem+json` (RFC 9457), and never contain a traceback. A body is limited in bytes (the server
limits its time), and is JSON without the parts that parsers read differently: a repeated key, NaN, Infinity and any
encoding except UTF-8 are refused, so that two readers of the same bytes never understand different things.
"""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        detail: the fault and what to do, for the author of the client.
        retry_after_s: when to try again, if that can help.
        close: whether the connection ends, because the rest of the request is not read.
    """

    def __init__(self, status: int, detail: str, *, retry_after_s: float | None = None, close: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.retry_after_s, self.close = status, detail, retry_after_s, close


class ProblemOut(BaseModel):
    """The reason for a refusal."""

    title: str = Field(examples=["Forbidden"])
    status: int = Field(examples=[403])
    detail: str = Field(examples=["interaction: this interaction was not served to this user"])


def answer(problem: Problem) -> JSONResponse:
    """Return the response to a problem."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(whole_seconds(problem.retry_after_s))
    if problem.close:
        headers["Connection"] = "close"
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    body = {"title": HTTPStatus(problem.status).phrase, "status": problem.status, "detail": problem.detail}
    return JSONResponse(body, problem.status, headers, MEDIA_TYPE)


def whole_seconds(seconds: float) -> int:
    """Return seconds for `Retry-After`: whole, rounded up, at least 1."""
    return max(1, math.ceil(seconds))


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request that is declared as JSON. Raises Problem 400, 413, 415."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Problem(415, "send the body as Content-Type: application/json", close=True)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Problem(415, "send the body without Content-Encoding", close=True)
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
        raise Problem(400, "the client disconnected", close=True) from error
    return bytes(body)


def parse_json(body: bytes) -> Any:  # noqa: ANN401 - a JSON tree
    """Return the JSON value of bytes. Raises Problem 400."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise Problem(400, f"the key {key[:40]!r} comes twice in one object")
            found[key] = value
        return found

    def constant(name: str) -> NoReturn:
        raise Problem(400, f"{name} is not JSON")

    try:
        return json.loads(body.decode(), object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise Problem(400, f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise Problem(400, "the body is nested too deeply") from error
    except ValueError as error:
        # Python refuses integers of thousands of digits, whose conversion would take quadratic time.
        raise Problem(400, "the body has an integer of thousands of digits") from error
