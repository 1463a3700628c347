"""The page on which a run is watched: views of the sink's tables, served to a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.consumers.sink.config import SinkSettings
    from tidemill.consumers.view.config import ViewSettings


def run(sink: SinkSettings, view: ViewSettings, *, open_tables: bool) -> None:
    """Serve the page until SIGTERM or SIGINT; see `role.run`."""
    # The server is loaded by the process that serves, not by one that only reads its settings.
    from tidemill.consumers.view.role import run as run_role

    run_role(sink, view, open_tables=open_tables)
