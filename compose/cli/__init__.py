"""The command line `tidemill`: its commands, each imported when it is called, and the errors that end a command."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from threading import current_thread, main_thread
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, which would take a third of the time and find no garbage; an interrupt ends
    the process at once, since Python's own handler would print a traceback."""
    interrupt, collects = signal.getsignal(signal.SIGINT), gc.isenabled()
    # Only the main thread may change the handler, and only Python's own is replaced.
    replaced = interrupt is signal.default_int_handler and current_thread() is main_thread()
    if replaced:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
    finally:
        if replaced:
            signal.signal(signal.SIGINT, interrupt)
        if collects:
            gc.enable()


with importing():
    import typer
    from confluent_kafka import KafkaError, KafkaException
    from pydantic import ValidationError
    from typer.core import TyperGroup
    from typer.main import get_group

LOG, PRODUCERS, STREAMS, TRAINER = "The log", "Producers", "Streams", "Trainer"
CONSUMERS, LOOP = "Consumers", "The whole loop"
COMMANDS: dict[str, tuple[str | None, str, str]] = {
    "stack": (None, "cli.stack_commands", "stack_app"),
    "topics": (LOG, "cli.log_commands", "topics"),
    "audit": (LOG, "cli.log_commands", "audit"),
    "weights": (LOG, "cli.weights_command", "weights_app"),
    "replay": (LOG, "cli.replay_copy cli.replay_stage cli.replay_steps", "replay_app"),
    "dead-letters": (LOG, "cli.dead_letters_command", "dead_letters_app"),
    "models": (PRODUCERS, "models_command", "models_app"),
    "env": (PRODUCERS, "cli.env_command", "env_app"),
    "feed": (PRODUCERS, "cli.roles", "feed"),
    "rollout": (PRODUCERS, "cli.roles", "rollout"),
    "route": (PRODUCERS, "cli.roles", "route"),
    "gateway": (PRODUCERS, "cli.roles", "gateway"),
    "documents": (PRODUCERS, "cli.roles", "documents"),
    "stream": (STREAMS, "cli.roles", "stream"),
    "train": (TRAINER, "cli.roles", "train"),
    "trainer": (TRAINER, "cli.trainer_command", "trainer_app"),
    "serve": (CONSUMERS, "cli.roles", "serve"),
    "sink": (CONSUMERS, "cli.roles", "sink"),
    "query": (CONSUMERS, "cli.log_commands", "query"),
    "view": (CONSUMERS, "cli.roles", "view"),
    "trace": (CONSUMERS, "cli.log_commands", "trace"),
    "tune": (CONSUMERS, "cli.tune_command cli.replay_steps", "tune_app"),
    "gate": (CONSUMERS, "cli.gate_command", "gate_app"),
    "users": (CONSUMERS, "cli.users_command", "users_app"),
    "plan": (LOOP, "plan", "plan"),
    "demo": (LOOP, "demo.command", "demo"),
}
"""Every command in the order of `--help`: its heading there; the modules that define it, or add commands to it, in
`tidemill.compose`; and its function or app in the first of them."""


class CommandsOnDemand(Mapping[str, Any]):
    """The commands by name; the modules of a command are imported when it is looked up, for `--help` those of all."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - of a class that typer keeps to itself
        heading, modules, attribute = COMMANDS[name]
        with importing():
            first, *_ = [import_module(f"tidemill.compose.{module}") for module in modules.split()]
        found, one = getattr(first, attribute), typer.Typer(rich_markup_mode="markdown")
        if isinstance(found, typer.Typer):
            one.add_typer(found, name=name, rich_help_panel=heading)
        else:
            one.command(name, rich_help_panel=heading)(found)
        return get_group(one).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Tidemill(TyperGroup):
    """The command line."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - typer's
        super().__init__(**attributes | {"commands": CommandsOnDemand()})


app = typer.Typer(
    cls=Tidemill,
    name="tidemill",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Train a language model continuously from the events of a running product, on a durable, replayable log.

Try it: `tidemill demo`. You can also start each role separately, with any Kafka:

    tidemill topics --create --bootstrap kafka:9092
    tidemill train --bootstrap kafka:9092 --run-id tuesday
    tidemill serve --bootstrap kafka:9092 --run-id tuesday --port 8100

Settings come from a TOML file (`--config`), then the environment (`TIDEMILL_RUN__MAX_STEPS=40`), then flags
(`--set run.max_steps=40`). A flag overrides the environment, which overrides the file.""",
)
app.callback()(lambda: None)  # without it, or a command of its own, typer makes no group

EXPLAINED = (ValueError, LookupError, ConnectionError, TimeoutError, RuntimeError, OSError)
"""Errors whose message is written for the user; all other errors keep their traceback."""


def main() -> None:
    """Run the command line; an error of `EXPLAINED`, or brokers that are lost, end in one line and status 1."""
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries
    try:
        app()
    except (*EXPLAINED, KafkaException) as error:
        message = str(error) or type(error).__name__
        if isinstance(error, KafkaException):
            from tidemill.schemas.log.client_settings import TRANSIENT

            cause = error.args[0]
            if cause.code() not in TRANSIENT | {KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE}:
                raise
            message = (
                f"Kafka does not answer any more ({cause.str()}): check that its brokers run, then start this again"
            )
        if isinstance(error, ValidationError):
            from tidemill.compose.config import unusable

            message = unusable(error)
        if os.environ.get("TIDEMILL_TRACEBACK"):
            raise
        typer.echo(f"tidemill: {message} (TIDEMILL_TRACEBACK=1 shows where)", err=True)
        sys.exit(1)
