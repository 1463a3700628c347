"""Commands of the roles: long-running processes that only the log connects.

A role's own modules are imported in its command, so that a host needs only the extra of its role.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from tidemill.compose.demo.plan import CONFIG_NAME
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
from tidemill.consumers.replica.environment import prepare_environment, quick_imports
from tidemill.streams.config import ProcessorName


@with_settings
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


@with_settings
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


@with_settings
def documents(settings_of: SettingsOf) -> None:
    """Write the mid-training documents of the run's seed to their topic."""
    settings = begin_role(settings_of)
    from tidemill.compose.demo.corpus import run

    run(settings.kafka, settings.run, settings.corpus, settings.chat)


@with_settings
def feed(
    settings_of: SettingsOf,
    sync: Annotated[bool | None, typer.Option("--sync/--async", help="Issue only one step's tasks at a time.")] = None,
) -> None:
    """Issue tasks, within the bound on policy lag, and held-out tasks for evaluation."""
    settings = begin_role(settings_of, feed__sync=sync)
    from tidemill.producers.tasks.feeder import run

    run(settings.kafka, settings.run, settings.feed, settings.rollout)


@with_settings
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


@with_settings
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


@with_settings
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


@with_settings
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


@with_settings
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
