"""The page's process: a server of the page, and of the tables where no sink has them open."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.http_api import query_server
from tidemill.consumers.sink.query import SinkState, answers, read_state, remove_state, write_state
from tidemill.consumers.sink.writer import Writer
from tidemill.consumers.view.app import application
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.tables import Tables
from tidemill.schemas.http_room import bind
from tidemill.schemas.http_server import BoundedConfig, ThreadServer
from tidemill.schemas.shutdown import stop_on_signals

log = logging.getLogger(__name__)

GRACE_S = 2
BACKLOG = 128


def run(sink: SinkSettings, view: ViewSettings, *, open_tables: bool) -> None:
    """Serve the page until SIGTERM or SIGINT.

    Args:
        open_tables: open the embedded engine's tables here where no running sink has them open, so that a run that is
            over can be looked at. A sink cannot start beside that.

    Raises:
        PortTaken: the address cannot be bound.
        EngineBusy: another process that is no sink has the tables open.
        RuntimeError: the server ended by itself.
    """
    stop = stop_on_signals()
    with ExitStack() as stack:
        listener = stack.enter_context(bind(view.host, view.port, "view.port", BACKLOG))
        if open_tables and sink.embedded:
            _open_tables(stack, sink)
        config = BoundedConfig(application(Tables(sink, view), view), view.http, lifespan="on", grace_s=GRACE_S)
        server = stack.enter_context(ThreadServer("view-http", listener, config))
        log.info("the page is at %s", server.url)
        server.watch(stop)


def _open_tables(stack: ExitStack, sink: SinkSettings) -> None:
    state = read_state(sink.directory)
    if state is not None and answers(state):
        return
    if not sink.directory.is_dir():
        raise FileNotFoundError(
            f"there are no tables in {sink.directory}: name the directory of a demonstration or of a sink's tables"
        )
    client = connect(sink)
    stack.callback(client.close)
    # The tables of an older run get the columns and the topics that are new since: the queries name them all.
    Writer(client, sink.database, sink.table_engine, merges=sink.merges)
    server = stack.enter_context(query_server(sink.model_copy(update={"http_port": 0})))
    write_state(sink.directory, SinkState(os.getpid(), server.url, sink.database))
    stack.callback(remove_state, sink.directory)
