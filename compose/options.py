"""Options that every role of the command line shares, the settings made from them, and the log of these settings.

`with_settings` gives a command these options and passes it a loaded `TidemillSettings` in their place. A configured
bootstrap address always takes precedence over the local stack.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.compose.config import TidemillSettings, load_settings, merge, nest, parse_assignments
from tidemill.compose.stack.kafka import local_bootstrap
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.access import check_access
from tidemill.schemas.log.admin import wait_for_broker

SettingsOf = Callable[[dict[str, Any]], TidemillSettings]
"""Passed to a command by `with_settings`: returns its settings for a tree of its own flags."""
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file with the settings; default tidemill.toml where it exists.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one setting (a list as JSON); may be repeated."),
]
BootstrapOption = Annotated[
    str | None, typer.Option("--bootstrap", help="Kafka address, host:port. Default: the local stack, where it runs.")
]
PrefixOption = Annotated[str | None, typer.Option("--topic-prefix", help="Prefix of every topic name.")]
RunIdOption = Annotated[str | None, typer.Option("--run-id", help="Name of the training run.")]
BranchOption = Annotated[str | None, typer.Option("--branch", help="Branch of the weight chain.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds that the log may deliver nothing.")]
VERSION = re.compile(r"v?([0-9]{1,12})")

_COMMON: dict[str, tuple[Any, list[str]]] = {
    "config": (ConfigOption, []),
    "assignments": (SetOption, []),
    "bootstrap": (BootstrapOption, ["kafka", "bootstrap"]),
    "topic_prefix": (PrefixOption, ["kafka", "topic_prefix"]),
    "run_id": (RunIdOption, ["run", "run_id"]),
}


def settings_from(options: dict[str, Any], flags: dict[str, Any] | None = None) -> TidemillSettings:
    """Return settings from the common options (by parameter name) and a role's own flags, which override `--set`."""
    tree = parse_assignments(options.get("assignments") or [])
    for name, (_, keys) in _COMMON.items():
        if keys and options.get(name) is not None:
            merge(tree, nest(keys, options[name]))
    return load_settings(options.get("config"), merge(tree, flags or {}))


def key_values(texts: list[str], flag: str = "--option", example: str = "max_value=30") -> dict[str, str]:
    """Convert `["max_value=30"]` to `{"max_value": "30"}`. Raises ValueError, with the flag's name, without `=`."""
    pairs = [text.partition("=") for text in texts]
    wrong = next((key for key, equals, _ in pairs if not equals or not key), None)
    if wrong is not None:
        raise ValueError(f"{flag} {wrong!r}: expected KEY=VALUE, for instance {example}")
    return {key: value for key, _, value in pairs}


def given(**flags: Any) -> dict[str, Any]:  # noqa: ANN401 - flag values of any type
    """Return a flag tree from `section__key=value` arguments; None means that a flag was not given."""
    tree: dict[str, Any] = {}
    for path, value in flags.items():
        if value is not None:
            merge(tree, nest(path.split("__"), value))
    return tree


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `settings_of` by the common options.

    The command calls `settings_of(flag tree)` to load its settings.
    """
    annotations = {name: annotation for name, (annotation, _) in _COMMON.items()}
    return with_options(command, "settings_of", annotations, {}, settings_from)


def with_options(
    command: Callable[..., None],
    parameter: str,
    annotations: Mapping[str, Any],
    defaults: Mapping[str, Any],
    make: Callable[..., Any],
) -> Callable[..., None]:
    """Replace one parameter of a command by options, by name; the command gets `make` with their values in its place.

    Args:
        defaults: of options whose default is not None.
    """

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:  # noqa: ANN401 - typer's values
        values = {name: arguments.pop(name) for name in annotations}
        command(**{parameter: functools.partial(make, values)}, **arguments)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in annotations.items()
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


PATIENCE_S = 10.0
"""Longest wait for an answer of the log, in seconds."""


def with_local_log(settings: TidemillSettings) -> TidemillSettings:
    """Return settings with a known Kafka address: the configured one, or that of the running local stack.

    Raises:
        ConnectionError: neither exists, or the configured brokers refuse this client (AccessRefused).
        SecurityError: the configured security cannot open a connection.
    """
    kafka = settings.kafka
    if not kafka.bootstrap:
        address = local_bootstrap(settings.stack)
        if address is None:
            raise ConnectionError(
                "no Kafka: give --bootstrap HOST:PORT (or TIDEMILL_KAFKA__BOOTSTRAP), or start the local stack with "
                "`tidemill stack up`"
            )
        kafka = with_address(kafka, address)
    check_access(kafka)
    return settings.model_copy(update={"kafka": kafka})


def log_to_stderr() -> None:
    """Write the log of the process itself to standard error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def begin_role(settings_of: SettingsOf, **flags: Any) -> TidemillSettings:  # noqa: ANN401 - flag values of any type
    """Return settings of a long-running role with a known Kafka address; its own flags are those of `given`."""
    log_to_stderr()
    return with_local_log(settings_of(given(**flags)))


def with_address(kafka: KafkaSettings, address: str) -> KafkaSettings:
    """Return the same settings with another bootstrap address."""
    return kafka.model_copy(update={"bootstrap": address})


def with_reachable_log(settings: TidemillSettings) -> TidemillSettings:
    """Return settings with a Kafka address that answers. Raises ConnectionError."""
    found = with_local_log(settings)
    # The client's own log, with many lines a second, would hide the one line that says what to do.
    quiet = {**found.kafka.client_options, "log_level": "0"}
    wait_for_broker(found.kafka.model_copy(update={"client_options": quiet}), PATIENCE_S)
    return found


def version_number(text: str) -> int:
    """Parse `40` or `v40` to 40. Raises ValueError."""
    match = VERSION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no version: write 40 or v40")
    return int(match[1])
