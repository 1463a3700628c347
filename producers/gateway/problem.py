"""Errors as clients read them: `application/problem+json` (RFC 9457), and never a trace of the program."""

from __future__ import annotations

import math
from http import HTTPStatus

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """A request that cannot be answered as asked.

    Args:
        status: HTTP status.
        detail: what is wrong and what to do, for the person who wrote the client.
        retry_after_s: when to come again, where coming again can help.
        close: whether the connection ends, since the rest of the request is not read.
    """

    def __init__(self, status: int, detail: str, *, retry_after_s: float | None = None, close: bool = False) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.close = close


class ProblemOut(BaseModel):
    """Why a request was refused."""

    title: str = Field(examples=["Forbidden"])
    status: int = Field(examples=[403])
    detail: str = Field(examples=["interaction: this interaction was not served to this user"])


def answer(problem: Problem) -> JSONResponse:
    """The response to a problem."""
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
    """Seconds as `Retry-After` takes them: whole, and never too few."""
    return max(1, math.ceil(seconds))
