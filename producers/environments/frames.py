"""Messages between the worker and the process of an environment: lists in JSON, one a line."""

from __future__ import annotations

import json
import traceback

from tidemill.producers.environments.base import ContextFull, EnvironmentFailed, GenerationFailed, TaskError
from tidemill.producers.environments.find import UnknownEnvironment
from tidemill.schemas.chat.messages import BadMessage

MOST_TEXT = 2000
"""Characters of an error's text, and of its traceback."""
PORTABLE: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (GenerationFailed, ContextFull, BadMessage, EnvironmentFailed, TaskError, UnknownEnvironment)
}
"""Errors that are raised on the other side as themselves."""


class FrameTooLarge(ValueError):
    """A message above the limit; the text goes on from the name of what is sent."""


def encode(frame: object, most: int) -> bytes:
    """One line of UTF-8. Raises FrameTooLarge; TypeError, ValueError or RecursionError for what JSON cannot hold."""
    line = json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(line) > most:
        raise FrameTooLarge(f"has {len(line):,} bytes, and a message to or from its process at most {most:,}")
    return line


def failure(error: BaseException) -> list[str]:
    """An error as it is sent: its type when it is portable, its text, and the traceback of one that is not."""
    kind = next((name for name, known in PORTABLE.items() if isinstance(error, known)), "")
    try:
        text = str(error) if kind else repr(error)
        trace = "" if kind else "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - the text of a foreign error is foreign code as well
        text, trace = type(error).__name__, ""
    return [kind, *(part.encode(errors="replace").decode() for part in (text[:MOST_TEXT], trace[-MOST_TEXT:]))]
