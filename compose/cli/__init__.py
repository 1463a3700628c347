# ruff: noqa: E402 - the modules are imported while the collector of garbage is off
"""The command line: `tidemill`, with one command per role, and the errors that end a command.

A role's modules are imported inside its command, so that `--help` is fast and a host needs only the extra of its role.
"""

from __future__ import annotations

import gc
import os
import sys

# Garbage collection during the imports takes a third of their time and finds no garbage.
_looks_for_garbage = gc.isenabled()
gc.disable()

import typer
from confluent_kafka import KafkaError, KafkaException

import tidemill.compose.cli.replay_copy
import tidemill.compose.cli.replay_stage
import tidemill.compose.cli.replay_steps  # noqa: F401 - each module adds its commands
from tidemill.compose.cli.dead_letters_command import dead_letters_app
from tidemill.compose.cli.env_command import env_app
from tidemill.compose.cli.gate_command import gate_app
from tidemill.compose.cli.log_commands import audit, query, topics, trace
from tidemill.compose.cli.replay_copy import replay_app
from tidemill.compose.cli.roles import documents, feed, gateway, rollout, route, serve, sink, stream, train, view
from tidemill.compose.cli.stack_commands import stack_app
from tidemill.compose.cli.trainer_command import trainer_app
from tidemill.compose.cli.tune_command import tune_app
from tidemill.compose.cli.users_command import users_app
from tidemill.compose.cli.weights_command import weights_app
from tidemill.compose.demo.command import demo
from tidemill.compose.models_command import models_app
from tidemill.compose.options import with_settings
from tidemill.compose.plan import plan
from tidemill.schemas.log.client_settings import TRANSIENT

if _looks_for_garbage:
    gc.enable()

app = typer.Typer(
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

app.add_typer(stack_app, name="stack")
app.command(rich_help_panel="The log")(topics)
app.command(rich_help_panel="The log")(with_settings(audit))
app.add_typer(weights_app, name="weights", rich_help_panel="The log")
app.add_typer(replay_app, name="replay", rich_help_panel="The log")
app.add_typer(dead_letters_app, name="dead-letters", rich_help_panel="The log")
app.add_typer(models_app, name="models", rich_help_panel="Producers")
app.add_typer(env_app, name="env", rich_help_panel="Producers")
for _role in (feed, rollout, route, gateway, documents):
    app.command(rich_help_panel="Producers")(with_settings(_role))
app.command(rich_help_panel="Streams")(with_settings(stream))
app.command(rich_help_panel="Trainer")(with_settings(train))
app.add_typer(trainer_app, name="trainer", rich_help_panel="Trainer")
for _role in (serve, sink):
    app.command(rich_help_panel="Consumers")(with_settings(_role))
app.command(rich_help_panel="Consumers")(query)
app.command(rich_help_panel="Consumers")(view)
app.command(rich_help_panel="Consumers")(with_settings(trace))
app.add_typer(tune_app, name="tune", rich_help_panel="Consumers")
app.add_typer(gate_app, name="gate", rich_help_panel="Consumers")
app.add_typer(users_app, name="users", rich_help_panel="Consumers")
app.command(rich_help_panel="The whole loop")(with_settings(plan))
app.command(rich_help_panel="The whole loop")(demo)

EXPLAINED = (ValueError, LookupError, ConnectionError, TimeoutError, RuntimeError, OSError)
"""Errors whose message is written for the user; all other errors keep their traceback."""
LOST = TRANSIENT | {KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE}
"""Errors of Kafka's client when the brokers do not answer."""


def main() -> None:
    """Run the command line; an error of `EXPLAINED`, or brokers that are lost, end in one line and status 1."""
    try:
        app()
    except (*EXPLAINED, KafkaException) as error:
        message = str(error) or type(error).__name__
        if isinstance(error, KafkaException):
            cause = error.args[0]
            if cause.code() not in LOST:
                raise
            message = (
                f"Kafka does not answer any more ({cause.str()}): check that its brokers run, then start this again"
            )
        if os.environ.get("TIDEMILL_TRACEBACK"):
            raise
        typer.echo(f"tidemill: {message} (TIDEMILL_TRACEBACK=1 shows where)", err=True)
        sys.exit(1)
