"""The plan of the demonstration: its directory, the configuration that every role gets, and each role's arguments.

The product's keys are made for one demonstration and given to its processes in their environment; they are never
written to a file.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.stack.process import pick_ports
from tidemill.producers.product.settings import ProductSettings, key_hash
from tidemill.schemas.records import Arm

CONFIG_NAME = "settings.toml"
ONLINE_CONFIG_NAME = "settings-online.toml"
SECRETS: Mapping[str, Any] = {
    "product": {"signing_keys", "pseudonym_key"},
    "router": {"api_keys"},
    "users": {"api_key"},
    "gateway": {"api_keys"},
    "sink": {"password"},
}
"""The settings that are never written to a file, in addition to the log's passwords."""
PASSWORDS = ("password", "secret", "key.pem", "passphrase", "oauthbearer.config")
"""The ends of the names of `kafka.client_options` that are passwords, or secrets of another kind."""
STABLE = "stable-0"
CANARY = "canary-0"
BACKEND = "users"
"""Name of the product's backend, whose API key the simulated users have."""

RoleArguments = tuple[str, list[str]]
"""Name and arguments of a role."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """One demonstration: it writes only below `directory`."""

    directory: Path
    settings: TidemillSettings
    replica_ports: tuple[int, ...]
    """Of the replicas of the first act; all ports are for HTTP, and were free when the demonstration was planned."""
    stable_port: int
    canary_port: int
    router_port: int
    view_port: int
    api_key: str = field(repr=False)
    product: ProductSettings = field(repr=False)

    @classmethod
    def of(cls, settings: TidemillSettings) -> DemoPlan:
        """Make a plan with a new directory, free ports and new keys. Raises ValueError for an act without a model."""
        if settings.demo.act is Act.TWO and not settings.demo.model:
            raise ValueError(
                "without act one, act two has no model to start from: give --model DIRECTORY, or play both acts"
            )
        run_id = f"demo-{settings.run.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = (settings.demo.data_dir / run_id).absolute()
        directory.mkdir(parents=True)
        changed = settings.model_copy(
            update={
                "run": settings.run.model_copy(update={"run_id": run_id}),
                "store": settings.store.model_copy(update={"root": str(directory / "store")}),
            }
        )
        *replicas, stable, canary, router, view = pick_ports(settings.demo.replicas + 4, base_port=0)
        keys = secrets.token_urlsafe(), ProductSettings.with_random_keys()
        return cls(directory, changed, tuple(replicas), stable, canary, router, view, *keys)

    def with_log_of(self, settings: TidemillSettings) -> DemoPlan:
        """Return the plan with the address of the log."""
        return replace(self, settings=self.settings.model_copy(update={"kafka": settings.kafka}))

    @property
    def acts(self) -> tuple[Act, ...]:
        act = self.settings.demo.act
        return (Act.ONE, Act.TWO) if act is Act.BOTH else (act,)

    @property
    def sink_directory(self) -> Path:
        """The directory of ClickHouse's tables."""
        return self.directory / "clickhouse"

    @property
    def stack_directory(self) -> Path:
        """The directory of the local Kafka's log."""
        return self.directory / "kafka"

    @property
    def log_directory(self) -> Path:
        """The directory in which each role writes its own log."""
        return self.directory / "logs"

    @property
    def model_directory(self) -> Path:
        """The starting checkpoint: the configured one, or the output of mid-training."""
        given = self.settings.demo.model
        return Path(given).absolute() if given else self.directory / "model"

    @property
    def online_steps(self) -> int:
        """The last optimizer step of the second act, counted from the first step of the first act."""
        simulated = self.settings.run.max_steps if Act.ONE in self.acts else 0
        return simulated + self.settings.demo.online_batches

    @property
    def router_address(self) -> str:
        return _address(self.router_port)

    @property
    def view_address(self) -> str:
        return _address(self.view_port)

    def write_config(self) -> None:
        """Write the settings that the roles read, as TOML, next to the data, for later reference."""
        tree: dict[str, Any] = self.settings.model_dump(mode="json", exclude_none=True, exclude=SECRETS)
        options = tree["kafka"]["client_options"]
        tree["kafka"]["client_options"] = {name: options[name] for name in options if not name.endswith(PASSWORDS)}
        tree["sink"]["path"] = str(self.sink_directory)
        if "http_port" not in self.settings.sink.model_fields_set:
            tree["sink"]["http_port"] = 0  # another demonstration, or a ClickHouse server, may use the default port
        tree["view"] |= {"host": "127.0.0.1", "port": self.view_port, "token": "", "model": str(self.model_directory)}
        tree["midtrain"]["output"] = tree["trainer"]["model"] = str(self.model_directory)
        tree["rollout"]["replicas"] = [_address(port) for port in self.replica_ports]
        tree["feed"]["replicas"] = len(self.replica_ports)
        tree["stream"]["data_dir"] = str(self.directory / "stream")
        (self.directory / CONFIG_NAME).write_text(tomli_w.dumps(tree), "utf-8")
        # Then the settings of the second act.
        simulated = self.settings.trainer.online.simulated_groups_per_batch
        tree["run"] |= {"max_steps": self.online_steps, "groups_per_step": max(1, simulated)}
        tree["trainer"]["online"]["enabled"] = True
        # The learning-rate schedule belongs to the simulated loop: it has ended, or never began.
        tree["trainer"]["optimizer"] |= {"warmup_steps": 0, "decay_steps": 0}
        stable, canary = [_address(self.stable_port)], [_address(self.canary_port)]
        tree["router"] |= {"port": self.router_port, "pools": {"stable": stable, "canary": canary}}
        tree["users"] |= {"router": self.router_address, "seed": self.settings.run.seed}
        # The canary replica does the simulated work: it has the version that the bench needs.
        tree["rollout"]["replicas"] = canary
        tree["feed"] |= {"replicas": 1, "replica_ids": [CANARY], "eval_every": 1}
        (self.directory / ONLINE_CONFIG_NAME).write_text(tomli_w.dumps(tree), "utf-8")

    def role_environment(self) -> dict[str, str]:
        """Return the environment of every role: that of this process without settings, and the passwords.

        Settings in it are in the files too, where the plan has changed some: a role would prefer those of the
        environment.
        """
        config, own = TidemillSettings.model_config, dict[str, str]()
        prefix, delimiter = config["env_prefix"].lower(), str(config["env_nested_delimiter"])
        for name, value in os.environ.items():
            section = name.lower().removeprefix(prefix).partition(delimiter)[0]
            if not (name.lower().startswith(prefix) and section in TidemillSettings.model_fields):
                own[name] = value
        hidden = {name: value for name, value in self.settings.kafka.client_options.items() if name.endswith(PASSWORDS)}
        if hidden:
            own["TIDEMILL_KAFKA__CLIENT_OPTIONS"] = json.dumps(hidden)
        if password := self.settings.sink.password.get_secret_value():
            own["TIDEMILL_SINK__PASSWORD"] = password
        return own

    def product_environment(self) -> dict[str, str]:
        """Return the environment variables of the router and the users: the product's keys."""
        return {
            **self.product.environment(),
            "TIDEMILL_ROUTER__API_KEYS": json.dumps({BACKEND: key_hash(self.api_key)}),
            "TIDEMILL_USERS__API_KEY": self.api_key,
        }

    def arguments(self, *command: str) -> list[str]:
        """Return the command-line arguments of a role of the first act, or of both."""
        return [*command, "--config", str(self.directory / CONFIG_NAME)]

    def loop_roles(self) -> list[RoleArguments]:
        replicas = [
            (f"replica-{n}", [*self.arguments("serve"), "--replica-id", f"replica-{n}", "--port", str(port)])
            for n, port in enumerate(self.replica_ports)
        ]
        workers = [
            (f"rollout-{n}", [*self.arguments("rollout"), "--worker-id", f"rollout-{n}"])
            for n in range(self.settings.demo.workers)
        ]
        return [("train", self.arguments("train")), *replicas, ("stream", self.arguments("stream")), *workers,
                ("feed", self.arguments("feed"))]  # fmt: skip

    def online_roles(self) -> list[RoleArguments]:
        """Return the roles of learning from users, except the users, their router and group assembly."""
        # The feeder benches a version only while steps are left, so its number of steps is one more than are taken.
        feed = [*self._online("feed"), "--set", f"run.max_steps={self.online_steps + 1}"]
        replicas = [
            (name, [*self._online("serve"), "--replica-id", name, "--pool", pool, "--port", str(port)])
            for name, pool, port in (
                (STABLE, Arm.STABLE.value, self.stable_port),
                (CANARY, Arm.CANARY.value, self.canary_port),
            )
        ]
        return [
            ("train-online", self._online("train")),
            *replicas,
            ("join", self._online("stream", "join")),
            ("batches", self._online("stream", "batches")),
            ("gate", self._online("gate", "run")),
            ("rollout-online", [*self._online("rollout"), "--worker-id", "rollout-online"]),
            ("feed-online", feed),
        ]

    def router_role(self) -> RoleArguments:
        return "route", self._online("route")

    def users_role(self) -> RoleArguments:
        return "users", [*self._online("users", "simulate"), "--json"]

    def measuring_role(self, name: str) -> RoleArguments:
        """Return the role of only the held-out users, for a measurement."""
        answers = str(self.settings.demo.measured_answers)
        return name, [*self._online("users", "simulate"), "--json", "--measure", answers]

    def _online(self, *command: str) -> list[str]:
        return [*command, "--config", str(self.directory / ONLINE_CONFIG_NAME)]


def _address(port: int) -> str:
    return f"http://127.0.0.1:{port}"
