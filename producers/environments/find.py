"""Environments by name: installed ones by entry point, families by `family:member`, others by `module:object`.

If the name before the colon is an entry point of the group `tidemill.environments`, it means that environment or family
of environments (`reasoning_gym:chain_sum`); any other name means `package.module:object`, a subclass of `Environment`
or an instance of one. For families: options models made from a library's settings, and separate random states.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, Field, ValidationError, create_model

from tidemill.producers.environments.base import Environment, EnvironmentOptions, TaskError, faults

GROUP = "tidemill.environments"
Base = TypeVar("Base", bound=EnvironmentOptions)
_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class UnknownEnvironment(LookupError):
    """Error of a name without a loadable environment; the text has the reason and the available names."""


@dataclass(frozen=True, slots=True)
class EnvironmentType:
    name: str
    about: str
    """Description in one line, for display."""
    options_model: type[EnvironmentOptions]
    isolation: Literal["loop", "process"]
    network: bool
    make: Callable[[Any], Environment]
    """Function that opens it with an instance of `options_model`. Raises TaskError."""

    def options(self, given: Mapping[str, Any]) -> EnvironmentOptions:
        """Return checked options. Raises TaskError with the names of wrong options."""
        try:
            return self.options_model.model_validate(dict(given))
        except ValidationError as error:
            wrong = faults(error, "options", most=error.error_count())
            known = ", ".join(self.options_model.model_fields) or "none"
            raise TaskError(f"{self.name}: {wrong}; its options are {known}") from error

    def open(self, given: Mapping[str, Any]) -> Environment:
        return self.make(self.options(given))


@dataclass(frozen=True, slots=True)
class EnvironmentListing:
    """One line of the list of environments."""

    name: str
    about: str
    problem: str = ""
    """Reason why it is not offered; empty if it is."""


class EnvironmentAdapter(ABC):
    """Adapter for the environments of a library, under one entry point."""

    @abstractmethod
    def members(self) -> Iterator[EnvironmentListing]:
        """Yield every member with its name in the family. Raises ImportError if the library is not installed."""

    @abstractmethod
    def member(self, name: str) -> EnvironmentType:
        """Return one member. Raises UnknownEnvironment, ImportError."""


def environment_type(name: str) -> EnvironmentType:
    """Return the environment type of a name. Raises UnknownEnvironment."""
    head, colon, member = name.partition(":")
    found = _entry_points().get(head)
    if found is not None:
        loaded = _loaded(found)
        if isinstance(loaded, EnvironmentAdapter):
            if not member:
                raise UnknownEnvironment(f"{name} is a family: name a member, {head}:NAME (`tidemill env list {head}`)")
            try:
                return loaded.member(member)
            except ImportError as error:
                raise UnknownEnvironment(f"{name}: {error}; install tidemill[environments]") from error
        if not colon:
            return described(name, loaded)
    if not is_foreign(name):
        known = ", ".join(sorted(_entry_points()))
        raise UnknownEnvironment(f"unknown environment {name!r}: there are {known}, and any `package.module:object`")
    try:
        imported = importlib.import_module(head)
    except (Exception, SystemExit) as error:  # importing runs foreign code, which raises anything
        raise UnknownEnvironment(f"{name}: module {head} does not import: {error!r}") from error
    if not hasattr(imported, member):
        raise UnknownEnvironment(f"{name}: module {head} has no {member}")
    return described(name, getattr(imported, member))


def is_foreign(name: str) -> bool:
    """Return whether a name has the form `package.module:object`, and its first part is no entry point."""
    return name.partition(":")[0] not in _entry_points() and _MODULE.fullmatch(name) is not None


def described(name: str, loaded: object) -> EnvironmentType:
    """Return the type of a loaded class or instance. Raises UnknownEnvironment for anything else."""
    kind = loaded if isinstance(loaded, type) else type(loaded)
    if not issubclass(kind, Environment):
        raise UnknownEnvironment(f"{name} is a {kind.__name__}, not an Environment or an instance of one")
    if inspect.isabstract(kind):
        raise UnknownEnvironment(f"{name} does not define {' or '.join(sorted(kind.__abstractmethods__))}")
    about = (kind.__doc__ or "").strip().partition("\n")[0]
    if isinstance(loaded, Environment):
        made = loaded
        return EnvironmentType(name, about, EnvironmentOptions, kind.isolation, kind.network, lambda _options: made)
    return EnvironmentType(name, about, kind.options_model, kind.isolation, kind.network, kind)


def listed(family: str = "") -> Iterator[EnvironmentListing]:
    """Yield every installed environment, or those of one family."""
    for name, found in sorted(_entry_points().items()):
        if family not in ("", name):
            continue
        try:
            loaded = _loaded(found)
            if isinstance(loaded, EnvironmentAdapter):
                for each in loaded.members():
                    yield EnvironmentListing(f"{name}:{each.name}", each.about, each.problem)
            else:
                yield EnvironmentListing(name, described(name, loaded).about)
        except (ImportError, UnknownEnvironment) as error:
            missing = isinstance(error, ImportError) or isinstance(error.__cause__, ImportError)
            yield EnvironmentListing(name, "", f"{error}; install tidemill[environments]" if missing else str(error))


def options_json(options: EnvironmentOptions) -> str:
    """Return options in the form of task records: canonical JSON of the options that were set."""
    return json.dumps(options.model_dump(mode="json", exclude_unset=True), sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=1)
def _entry_points() -> Mapping[str, EntryPoint]:
    """Return entry points by name. Raises UnknownEnvironment if two distributions use one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UnknownEnvironment(
                f"two environments are named {point.name!r}: {other.value} and {point.value}; uninstall one of them"
            )
    return found


def _loaded(point: EntryPoint) -> object:
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:  # importing runs foreign code, which raises anything
        raise UnknownEnvironment(f"{point.name}: {point.value} does not import: {error!r}") from error
    return loaded() if isinstance(loaded, type) and issubclass(loaded, EnvironmentAdapter) else loaded


def check_member(family: str, kind: str, name: str, known: Iterable[str], problem: str) -> None:
    """Raise UnknownEnvironment for a member that does not exist, or is not offered because of `problem`."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known)
        meant = f"; is it {' or '.join(near)}?" if near else ""
        raise UnknownEnvironment(f"{kind} {name!r}{meant} (`tidemill env list {family}`)")
    if problem:
        raise UnknownEnvironment(f"{family}:{name} is not offered: {problem}")


def options_model(title: str, base: type[Base], settings: Mapping[str, tuple[Any, object]]) -> type[Base]:
    """Return an options model with further fields: type and default by name. `title` is the name of the new class.

    Lists and objects may also be given as text, from a command line.
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
    """Parse text to a list, an object or None: as JSON, or as elements between commas."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        read = value
    return read if isinstance(read, list | dict | None) else value.split(",")


class OwnRandomness:
    """A state of the module `random` for one episode, so that concurrent episodes do not share a state."""

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run the global generator from this state, and restore its own state afterwards. Do not await within."""
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)
