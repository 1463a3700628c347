"""What a client is told when it gets no answer, in the shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request that gets no answer.

    Args:
        status: HTTP status.
        message: what is wrong and what to do; never a part of the prompt.
        kind: the error's `type`, for instance `invalid_request_error`.
        parameter: the field that is wrong.
    """

    def __init__(self, status: int, message: str, kind: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.parameter = status, message, kind, parameter

    def body(self) -> dict[str, Any]:
        """The error as the client reads it."""
        error = {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.status}
        return {"error": error}


def bad_request(message: str, parameter: str | None = None) -> Refusal:
    """The client's fault: 400."""
    return Refusal(400, message, "invalid_request_error", parameter)


def unavailable(message: str) -> Refusal:
    """Nobody's fault that the client could mend: 503."""
    return Refusal(503, message, "service_unavailable_error")
