"""For adapters of libraries: options models made from a library's settings, and random states of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, Field, create_model

from tidemill.producers.environments.base import EnvironmentOptions

Base = TypeVar("Base", bound=EnvironmentOptions)


def options_model(title: str, base: type[Base], settings: Mapping[str, tuple[Any, object]]) -> type[Base]:
    """Add settings to a model of options.

    Args:
        title: the name of the new class.
        settings: type and default by name. Lists and objects are taken from the text of a command line as well.
    """
    fields: dict[str, Any] = {}
    for name, (hint, default) in settings.items():
        hint = tuple[Any, ...] if hint is tuple else hint
        parts = (hint, *get_args(hint))  # the type, and the members of a union
        if any(get_origin(part) in (list, tuple, Sequence) or is_dataclass(part) for part in parts):
            hint = Annotated[hint, BeforeValidator(structured)]
        fields[name] = (hint, Field(default=default))
    return create_model(title, __base__=base, **fields)


def structured(value: object) -> object:
    """A list, an object or nothing from text: JSON, or elements between commas."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = value
    return read if isinstance(read, list | dict | None) else value.split(",")


class OwnRandomness:
    """A state of the module `random` that belongs to one episode, so that episodes side by side do not mix."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the global generator go on from this state, and give it back after. Do not await within."""
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)
