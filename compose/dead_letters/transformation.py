"""`module:function` on the command line: the function of somebody's own that mends a dead letter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.consumers.operate.replay.dead_letters import StoredLetter


class TransformError(ValueError):
    """A transformation that cannot be used, or that failed on a letter."""


def transformation(text: str) -> Callable[[StoredLetter], bytes | None]:
    """The function of `module:function`; modules are found in the current directory too.

    It is called with a `StoredLetter` and returns the bytes that go back, or None to leave the letter where it is.

    Raises TransformError, and the function that is returned does where the other fails.
    """
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise TransformError(f"--transform {text!r}: expected MODULE:FUNCTION")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise TransformError(f"--transform {text!r}: {error}") from error

    def checked(letter: StoredLetter) -> bytes | None:
        try:
            made: Any = function(letter)
        except Exception as error:  # somebody's own code: the letter that it failed on has to be named
            raise TransformError(f"--transform {text!r} failed on {letter.name}: {error!r}") from error
        if made is not None and not isinstance(made, bytes):
            raise TransformError(f"--transform {text!r} returned {type(made).__name__} for {letter.name}, not bytes")
        return made

    return checked
