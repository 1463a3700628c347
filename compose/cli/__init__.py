# ruff: noqa: E402 - the modules are imported while the collector of garbage is off, and an interrupt ends the process
"""The command line: `tidemill`, with one command per role, and the errors that end a command.

The roles are long-running processes that only the log connects. Their commands are here, the others in modules of this
folder. Modules that need an extra, or much time, are imported inside their command, so that `--help` is fast and a host
needs only the extra of its role.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

# During the imports an interrupt ends the process at once: Python's own handler would print a traceback.
_interrupt = signal.getsignal(signal.SIGINT)
if _interrupt is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Garbage collection during the imports takes a third of their time and finds no garbage.
_looks_for_garbage = gc.isenabled()
gc.disable()

import typer
from confluent_kafka import KafkaError, KafkaException
from pydantic import ValidationError

import tidemill.compose.cli.replay_copy
import tidemill.compose.cli.replay_stage
import tidemill.compose.cli.replay_steps  # noqa: F401 - each module adds its commands
from tidemill.compose.cli.dead_letters_command import dead_letters_app
from tidemill.compose.cli.env_command import env_app
from tidemill.compose.cli.gate_command import gate_app
from tidemill.compose.cli.log_commands import audit, query, topics, trace
from tidemill.compose.cli.replay_copy import replay_app
from tidemill.compose.cli.stack_commands import stack_app
from tidemill.compose.cli.trainer_command import trainer_app
from tidemill.compose.cli.tune_command import tune_app
from tidemill.compose.cli.users_command import users_app
from tidemill.compose.cli.weights_command import weights_app
from tidemill.compose.config import unusable
from tidemill.compose.demo.command import demo
from tidemill.compose.demo.plan import CONFIG_NAME
from tidemill.compose.models_command import models_app
from tidemill.compose.options import (
    ConfigOption,
    SetOption,
    SettingsOf,
    begin_role,
    given,
    log_to_stderr,
    settings_from,
    with_settings,
)
from tidemill.compose.plan import plan
from tidemill.consumers.replica.environment import prepare_environment, quick_imports
from tidemill.schemas.log.client_settings import TRANSIENT
from tidemill.streams.config import ProcessorName

if _interrupt is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)
if _looks_for_garbage:
    gc.enable()


def serve(
    settings_of: SettingsOf,
    replica_id: Annotated[str | None, typer.Option(help="Name of the replica.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI-compatible server.")] = None,
    region: Annotated[str | None, typer.Option(help="Region, for staleness.")] = None,
    pool: Annotated[str | None, typer.Option(help="stable: promoted versions; canary: the one under trial.")] = None,
) -> None:
    """Run a replica: vLLM's OpenAI-compatible server and the weight subscriber.

    Starts from the newest anchor, applies each version while requests are in flight, proves it from its live tensors.
    """
    settings = begin_role(settings_of, replica__replica_id=replica_id, replica__port=port, replica__region=region,
                      replica__pool=pool)  # fmt: skip
    # vLLM, which the role imports, reads its environment when it is imported.
    prepare_environment(settings.replica.threads, settings.replica.batch_invariant)
    with quick_imports():
        from tidemill.consumers.replica.role import serve as serve_replica

    serve_replica(settings.kafka, settings.run, settings.replica, settings.chat)


def route(
    settings_of: SettingsOf,
    port: Annotated[int | None, typer.Option(help="Port of the OpenAI-compatible server.")] = None,
    stable: Annotated[list[str] | None, typer.Option(help="Address of a stable replica, http://host:port.")] = None,
    canary: Annotated[list[str] | None, typer.Option(help="Address of a canary replica, http://host:port.")] = None,
) -> None:
    """Serve product traffic with OpenAI's protocol, and write each answer to the log as an interaction.

    Each backend needs an API key ([router] api_keys), the product two keys of its own ([product]); if keys are missing,
    the error says how to make them. The gate's newest canary decision sets the share of users in the canary pool.
    """
    settings = begin_role(settings_of, router__port=port, router__pools__stable=stable, router__pools__canary=canary)
    from tidemill.producers.edge.router import run

    run(settings.kafka, settings.run, settings.store, settings.product, settings.router, settings.chat)


def documents(settings_of: SettingsOf) -> None:
    """Write the mid-training documents of the run's seed to their topic."""
    settings = begin_role(settings_of)
    from tidemill.compose.demo.corpus import run

    run(settings.kafka, settings.run, settings.corpus, settings.chat)


def feed(
    settings_of: SettingsOf,
    sync: Annotated[bool | None, typer.Option("--sync/--async", help="Issue only one step's tasks at a time.")] = None,
) -> None:
    """Issue tasks, within the bound on policy lag, and held-out tasks for evaluation."""
    settings = begin_role(settings_of, feed__sync=sync)
    from tidemill.producers.tasks.feeder import run

    run(settings.kafka, settings.run, settings.feed, settings.rollout)


def rollout(
    settings_of: SettingsOf,
    replica: Annotated[
        list[str] | None, typer.Option(help="Address of a replica, http://host:port; may be repeated.")
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option(help="Unique name of this worker: when started again, it continues its tasks at once.")
    ] = None,
) -> None:
    """Run a rollout worker: play episodes of tasks with replicas, with token ids in and out."""
    settings = begin_role(settings_of, rollout__replicas=replica, rollout__worker_id=worker_id)
    from tidemill.producers.rollout.worker import run

    run(settings.kafka, settings.run, settings.store, settings.rollout, settings.chat)


def gateway(
    settings_of: SettingsOf,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0 takes a free one.")] = None,
) -> None:
    """Take feedback over HTTP from product backends in any language; its page /docs has examples.

    Needs the product's keys ([product]) and an API key per backend ([gateway] api_keys); errors say how to make them.
    """
    settings = begin_role(settings_of, gateway__host=host, gateway__port=port)
    from tidemill.producers.edge.gateway import run

    run(settings.kafka, settings.product, settings.gateway)


def stream(
    settings_of: SettingsOf,
    processor: Annotated[
        ProcessorName,
        typer.Argument(
            help="assembly: rollouts to groups; join: interactions and feedback to outcomes; batches: outcomes to "
            "online batches."
        ),
    ] = ProcessorName.ASSEMBLY,
) -> None:
    """Run one of the stream processors. Start each of them at least once; several workers share its partitions.

    `stream.runner` chooses how it writes: faust (at least once) or transactional (once; each batch is a transaction).
    """
    settings = begin_role(settings_of)
    from tidemill.streams.runner.worker import processor_of, run

    chosen = processor_of(processor, settings.run, settings.stream, settings.join, settings.batches)
    run(settings.kafka, settings.run, settings.stream, chosen)


def train(
    settings_of: SettingsOf,
    phase: Annotated[
        Literal["rl", "midtrain"], typer.Option(help="rl: learn from groups; midtrain: make the starting model.")
    ] = "rl",
    model: Annotated[str | None, typer.Option(help="Directory of the starting Hugging Face causal model.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
) -> None:
    """Train: from groups to weight versions, or (--phase midtrain) from documents to a starting checkpoint.

    On several ranks: `torchrun --nproc-per-node 8 -m tidemill train`. `trainer.device` chooses CPU or GPU.
    """
    if phase == "midtrain":
        settings = begin_role(settings_of, midtrain__output=model)
        with quick_imports():
            from tidemill.trainer import midtrain

        midtrain.run(settings.kafka, settings.run, settings.midtrain, settings.chat)
        return
    settings = begin_role(settings_of, trainer__model=model, run__max_steps=max_steps)
    with quick_imports():
        from tidemill.trainer.run import run

    run(settings.kafka, settings.run, settings.store, settings.trainer)


def sink(
    settings_of: SettingsOf,
    http_port: Annotated[int | None, typer.Option(help="Port of the read-only ClickHouse HTTP endpoint.")] = None,
) -> None:
    """Write every topic into ClickHouse tables and serve them read-only over ClickHouse's HTTP protocol."""
    settings = begin_role(settings_of, sink__http_port=http_port)
    from tidemill.consumers.sink.service import run

    run(settings.kafka, settings.run, settings.sink)


def view(
    data_dir: Annotated[
        Path | None,
        typer.Argument(help="Directory of a demonstration, or of a sink's tables, to look at when the run is over."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at; beyond loopback, set view.token.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0 takes a free one.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Show a run in a browser: learning, rollouts, users, weights and the log, while it runs or after it.

    Examples: `tidemill view data/demo/demo-0-20261101-120000` shows a finished run · `tidemill view` reads from the
    running sink of the settings · `tidemill view --set sink.host=clickhouse` from a ClickHouse server.
    """
    from tidemill.consumers.view.app import run

    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    own = data_dir / CONFIG_NAME if data_dir is not None else None
    of_demo = own is not None and own.is_file()
    tables = None if data_dir is None or of_demo else str(data_dir)
    # The port in a demonstration's settings was chosen only for the time of its run.
    asked = port if port is not None or not of_demo else 0
    settings = settings_from(
        {"config": own if of_demo and config is None else config, "assignments": assignments},
        given(sink__path=tables, view__host=host, view__port=asked),
    )
    run(settings.sink, settings.view, open_tables=data_dir is not None)


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
app.command(rich_help_panel="The log")(with_settings(topics))
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
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries
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
        if isinstance(error, ValidationError):
            message = unusable(error)
        if os.environ.get("TIDEMILL_TRACEBACK"):
            raise
        typer.echo(f"tidemill: {message} (TIDEMILL_TRACEBACK=1 shows where)", err=True)
        sys.exit(1)
