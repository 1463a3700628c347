"""The sink's state file, beside its tables: who has them open, and where to ask."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STATE_FILE = "tidemill-sink.json"


@dataclass(frozen=True, slots=True)
class SinkState:
    """A running sink."""

    pid: int
    url: str
    database: str


def write_state(directory: Path, state: SinkState) -> None:
    """Announce a sink; a reader sees the whole file or none."""
    fresh = directory / f"{STATE_FILE}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(state)), "utf-8")
    fresh.replace(directory / STATE_FILE)


def read_state(directory: Path) -> SinkState | None:
    """The sink that announced itself last, which may have been killed since; None without one."""
    try:
        return SinkState(**json.loads((directory / STATE_FILE).read_text("utf-8")))
    except FileNotFoundError:
        return None


def remove_state(directory: Path) -> None:
    """The sink has stopped."""
    (directory / STATE_FILE).unlink(missing_ok=True)
