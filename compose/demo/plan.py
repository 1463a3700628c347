"""What the demonstration will run: its directory, the configuration that every role gets, and each role's arguments."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from tidemill.compose.config import TidemillSettings
from tidemill.compose.stack.ports import pick_ports

CONFIG_NAME = "settings.toml"


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """One demonstration: everything that it writes lies below `directory`."""

    directory: Path
    settings: TidemillSettings
    ports: tuple[int, ...]
    """One HTTP port a replica."""

    @classmethod
    def of(cls, settings: TidemillSettings) -> DemoPlan:
        """A plan with a new directory and free ports."""
        run_id = f"demo-{settings.run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = (settings.demo.data_dir / run_id).absolute()
        directory.mkdir(parents=True)
        changed = settings.model_copy(
            update={
                "run": settings.run.model_copy(update={"run_id": run_id}),
                "store": settings.store.model_copy(update={"root": str(directory / "store")}),
            }
        )
        return cls(directory, changed, tuple(pick_ports(settings.demo.replicas, base_port=0)))

    def with_log_of(self, settings: TidemillSettings) -> DemoPlan:
        """The plan with the address of the log known."""
        return replace(self, settings=self.settings.model_copy(update={"kafka": settings.kafka}))

    @property
    def sink_directory(self) -> Path:
        """Where ClickHouse keeps its tables."""
        return self.directory / "clickhouse"

    @property
    def model_directory(self) -> Path:
        """The starting checkpoint: the configured one, or where mid-training leaves it."""
        given = self.settings.demo.model
        return Path(given).absolute() if given else self.directory / "model"

    @property
    def replica_urls(self) -> list[str]:
        """HTTP addresses of the replicas."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def write_config(self) -> None:
        """Write the settings that every role reads, as TOML, beside the data: the demonstration can be looked up."""
        (self.directory / CONFIG_NAME).write_text(tomli_w.dumps(self._tree()), "utf-8")

    def _tree(self) -> dict[str, Any]:
        tree = self.settings.model_dump(mode="json", exclude_none=True)
        tree["sink"]["path"] = str(self.sink_directory)
        tree["midtrain"]["output"] = str(self.model_directory)
        tree["trainer"]["model"] = str(self.model_directory)
        tree["rollout"]["replicas"] = self.replica_urls
        tree["feed"]["replicas"] = len(self.ports)
        tree["stream"]["data_dir"] = str(self.directory / "stream")
        return tree

    def arguments(self, role: str) -> list[str]:
        """Command-line arguments of a role."""
        command = ["train", "--phase", "midtrain"] if role == "midtrain" else [role]
        return [*command, "--config", str(self.directory / CONFIG_NAME)]

    def loop_roles(self) -> list[tuple[str, list[str]]]:
        """Name and arguments of every role of the loop."""
        replicas = [
            (f"replica-{n}", [*self.arguments("serve"), "--replica-id", f"replica-{n}", "--port", str(port)])
            for n, port in enumerate(self.ports)
        ]
        workers = [(f"rollout-{n}", self.arguments("rollout")) for n in range(self.settings.demo.workers)]
        return [("train", self.arguments("train")), *replicas, ("stream", self.arguments("stream")), *workers,
                ("feed", self.arguments("feed"))]  # fmt: skip
