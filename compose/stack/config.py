"""Settings of the local stack, and its errors. Each message names the fault and what to do about it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from tidemill.schemas.config import Section

HOST = "127.0.0.1"
"""The local stack listens on the loopback interface, and elsewhere only at its `network_listeners`."""


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/tidemill`, or `~/.cache/tidemill`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"


class StackSettings(Section):
    """Settings of Apache Kafka on this machine."""

    data_dir: Path = Path("data/stack")
    """Directory of the brokers' data, logs, ports and process ids. One directory is one cluster."""

    brokers: int = 1
    """Number of brokers in the cluster, 1 or 3, each also a KRaft controller. Fixed at the first start."""

    heap_mb: int = Field(default=384, ge=192)
    """Java heap of each broker, in MiB."""

    base_port: int = Field(default=0, ge=0, le=65_000)
    """First of 2 * brokers consecutive ports. 0: free ones, chosen once and kept for later starts."""

    network_listeners: tuple[str, ...] = ()
    """Further HOST:PORT, one per broker, at which clients of another network (containers, namespaces) reach it. All of
    them can read and write: the listeners require no password. None: the loopback interface only."""

    properties: dict[str, str] = Field(default_factory=dict)
    """Further properties of every broker, with Kafka's own names; they override Tidemill's. With them a listener can
    require TLS and passwords."""

    fast_start: bool = True
    """Use only the JVM's quick compiler: about half the CPU time at start, a lower peak throughput."""

    start_timeout_s: float = Field(default=120.0, gt=0)
    """How long the brokers may take until the admin API sees all of them, in seconds."""

    stop_timeout_s: float = Field(default=20.0, gt=0)
    """How long a broker may take to stop after SIGTERM before it gets SIGKILL, in seconds."""

    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Directory in which Kafka's jars are kept between clusters and runs."""

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
    """An operation of the local stack failed."""
