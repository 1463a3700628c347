"""`tidemill stack up|down|status`: the local Kafka on the command line."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.compose.config import load_settings
from tidemill.compose.options import ConfigOption
from tidemill.compose.output import CsvOption, JsonOption, print_json, print_rows
from tidemill.compose.stack.kafka import LocalStack, NodeState, StackStatus

stack_app = typer.Typer(
    no_args_is_help=True,
    help="""Apache Kafka on this machine, loopback only: start it, stop it, show its state.

Needs Java 17 and, the first time, Maven. The commands of the other roles find it by themselves.""",
)

DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="The cluster's directory; default data/stack.")]
BrokersOption = Annotated[int | None, typer.Option("--brokers", help="1 (the default) or 3; fixed at the first start.")]
HeapOption = Annotated[int | None, typer.Option("--heap-mb", help="Java heap of each broker in MiB; default 384.")]
PortOption = Annotated[
    int | None,
    typer.Option("--port", help="First port; each broker takes 2. Default: free ports, kept for later starts."),
]


@stack_app.command()
def up(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    brokers: BrokersOption = None,
    heap_mb: HeapOption = None,
    port: PortOption = None,
    as_json: JsonOption = False,
    as_csv: CsvOption = False,
) -> None:
    """Start the brokers and wait until they serve. Safe to repeat: brokers that run are not touched.

    Example: tidemill stack up --brokers 3 --port 19092
    """
    stack = _stack(config, data_dir=data_dir, brokers=brokers, heap_mb=heap_mb, base_port=port)
    _show(stack.up(_tell), as_json, as_csv)


@stack_app.command()
def down(
    config: ConfigOption = None, data_dir: DataDirOption = None, as_json: JsonOption = False, as_csv: CsvOption = False
) -> None:
    """Stop the brokers and end all their processes. The data stays, for the next start.

    Example: tidemill stack down --data-dir data/stack
    """
    stack = _stack(config, data_dir=data_dir)
    stack.down(_tell)
    _show(stack.status(), as_json, as_csv)


@stack_app.command()
def status(
    config: ConfigOption = None, data_dir: DataDirOption = None, as_json: JsonOption = False, as_csv: CsvOption = False
) -> None:
    """Show each broker's state, process and address. Exit status 1 unless all of them serve.

    Example: tidemill stack status --json
    """
    found = _stack(config, data_dir=data_dir).status()
    _show(found, as_json, as_csv)
    raise typer.Exit(0 if found.ready else 1)


def _stack(config: Path | None, **flags: Any) -> LocalStack:  # noqa: ANN401 - values of any setting
    given = {name: value for name, value in flags.items() if value is not None}
    return LocalStack(load_settings(config, {"stack": given}).stack)


def _tell(message: str) -> None:
    """Print progress to standard error: standard output is for the result."""
    typer.echo(message, err=True)


def _show(found: StackStatus, as_json: bool, as_csv: bool) -> None:
    if as_json:
        print_json({"ready": found.ready, **asdict(found)})
        return
    if found.nodes:
        stopped = all(node.state is NodeState.STOPPED for node in found.nodes)
        state = "ready" if found.ready else "stopped" if stopped else "not ready"
        _tell(f"{state} at {found.bootstrap} ({found.data_dir})")
    else:
        _tell(f"no cluster in {found.data_dir}; `tidemill stack up` makes one")
    if found.nodes or as_csv:
        rows = ((node.node_id, node.state, node.pid, node.address, node.log) for node in found.nodes)
        print_rows(("broker", "state", "pid", "address", "log"), rows, as_csv=as_csv)
