"""Options models made from the settings of a library: the same names, types and defaults, checked like our own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
