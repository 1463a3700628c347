"""Settings of the local stack, and its errors. Every message says what is wrong and what to do about it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from tidemill.schemas.config import Section

HOST = "127.0.0.1"
"""The local stack listens on the loopback interface, and elsewhere only where `network_listeners` say so."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tidemill`, or `~/.cache/tidemill`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"


class StackSettings(Section):
    """How Apache Kafka runs on this machine."""

    data_dir: Path = Path("data/stack")
    """Where the brokers keep their data, logs, ports and process ids. One directory is one cluster."""

    brokers: int = 1
    """Brokers of the cluster, 1 or 3, each of them a KRaft controller as well. Fixed at the first start."""

    heap_mb: int = Field(default=384, ge=192)
    """Java heap of each broker, in MiB."""

    base_port: int = Field(default=0, ge=0, le=65_000)
    """First of 2 * brokers consecutive ports. 0: free ones, chosen once and kept for later starts."""

    network_listeners: tuple[str, ...] = ()
    """Further HOST:PORT, one a broker, at which clients of another network (containers, namespaces) reach it. Anyone
    there may read and write: the listeners ask for no password. None: the loopback interface only."""

    properties: dict[str, str] = Field(default_factory=dict)
    """Further properties of every broker, in Kafka's own names; they win over Tidemill's. With them a listener asks for
    TLS and passwords."""

    fast_start: bool = True
    """Compile with the JVM's quick compiler only: about half the CPU time at start, a lower peak throughput."""

    start_timeout_s: float = Field(default=120.0, gt=0)
    """How long the brokers may take until the admin API sees all of them, in seconds."""

    stop_timeout_s: float = Field(default=20.0, gt=0)
    """How long a broker may take to stop after SIGTERM before it gets SIGKILL, in seconds."""

    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Where Kafka's jars are kept between clusters and runs."""

    @field_validator("brokers")
    @classmethod
    def _one_or_three(cls, value: int) -> int:
        if value not in (1, 3):
            raise ValueError("1 or 3 brokers: two or four controllers survive no more than one or three do")
        return value

    @model_validator(mode="after")
    def _one_listener_a_broker(self) -> Self:
        if self.network_listeners and len(self.network_listeners) != self.brokers:
            raise ValueError(f"network_listeners: {len(self.network_listeners)} for {self.brokers} broker(s)")
        wrong = [where for where in self.network_listeners if not re.fullmatch(r"[A-Za-z0-9.-]+:[0-9]{1,5}", where)]
        if wrong:
            raise ValueError(f"network_listeners: {wrong[0]!r} is not HOST:PORT")
        return self


class StackError(RuntimeError):
    """The local stack could not do what was asked."""
