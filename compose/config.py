"""The typed configuration of Tidemill: all sections of all roles, from a TOML file, the environment and flags.

Later sources win: TOML file, then `TIDEMILL_<SECTION>__<KEY>` in the environment, then flags. Unknown keys are refused.
"""

from __future__ import annotations

import json
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from tidemill.compose.demo.simulated_users.config import UsersSettings
from tidemill.compose.stack.config import StackSettings
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.view.config import ViewSettings
from tidemill.producers.config import FeedSettings, GatewaySettings, RolloutSettings, RouterSettings
from tidemill.producers.environments.ledger import LedgerOptions
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, Section, StoreSettings
from tidemill.streams.config import StreamSettings
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.streams.online.config import BatchSettings
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.midtrain_config import MidtrainSettings

DEFAULT_FILE = Path("tidemill.toml")


class Act(StrEnum):
    """A part of the demonstration."""

    ONE = "one"
    """The model learns in simulation."""
    TWO = "two"
    """Users arrive, and it learns their preferences."""
    BOTH = "both"


class CorpusSettings(Section):
    """The mid-training documents to write: ledgers worked by demonstrators of mixed quality."""

    documents: int = Field(default=12_000, ge=1)
    """Documents to write."""

    options: LedgerOptions = LedgerOptions()
    """Difficulty of the ledgers, as for tasks."""

    slip_rates: tuple[float, ...] = Field(default=(0.1, 0.25), min_length=1)
    """One demonstrator per rate: the share of its turns with an error. A document's author is drawn evenly."""

    polite_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the documents whose answer closes politely. The simulated reward does not ask for it, users may."""


class DemoSettings(Section):
    """Settings of `tidemill demo`."""

    data_dir: Path = Path("data/demo")
    """Each demonstration stores its log, objects, tables and role logs in its own directory below this one."""

    model: str = ""
    """Model to start from (`tidemill models get`). Empty: mid-train a tiny one from random weights."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options for any environment that knows them, if `--environment` names another one than the recipe does."""

    act: Act = Act.BOTH
    """The acts to play. Act two alone starts from `model`, which should be above `gate.floor` already."""

    replicas: int = Field(default=1, ge=1)
    """vLLM replicas of the first act; the second one has a stable and a canary replica."""

    workers: int = Field(default=1, ge=1)
    """Rollout workers to run."""

    online_batches: int = Field(default=6, ge=1)
    """Online batches to learn from in the second act."""

    online_limit_s: float = Field(default=420.0, gt=0)
    """Longest time of the users in the second act."""

    measured_answers: int = Field(default=120, ge=1)
    """Number of held-out users' questions with which satisfaction is measured, before and after."""

    endings_timeout_s: float = Field(default=90.0, gt=0)
    """Longest wait, after the users have left, until every interaction has ended in a reward or an exclusion."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """How long a role may take to start."""

    stall_timeout_s: float = Field(default=180.0, gt=0)
    """The demonstration fails if the log gets no record for this long."""


class NumericsSettings(Section):
    """Settings of the arithmetic of sampler and trainer."""

    batch_invariant: bool = False
    """Sets `replica.batch_invariant` and `trainer.batch_invariant`: no token's logprob depends on what else is computed
    at the same time. Costs speed in both."""


class TidemillSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="TIDEMILL_",
        env_nested_delimiter="__",
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    kafka: KafkaSettings = Field(default_factory=KafkaSettings)
    """The connection to the log."""
    store: StoreSettings = Field(default_factory=StoreSettings)
    """The object store for large payloads."""
    run: RunSettings = Field(default_factory=RunSettings)
    """The training run."""
    chat: ChatSettings = Field(default_factory=ChatSettings)
    """The conversion of conversations to tokens."""
    stack: StackSettings = Field(default_factory=StackSettings)
    """The local Kafka."""
    corpus: CorpusSettings = Field(default_factory=CorpusSettings)
    """The mid-training documents."""
    numerics: NumericsSettings = Field(default_factory=NumericsSettings)
    """Arithmetic of replicas and trainer."""
    midtrain: MidtrainSettings = Field(default_factory=MidtrainSettings)
    """Next-token training that makes the starting checkpoint."""
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    """Reinforcement learning from groups."""
    feed: FeedSettings = Field(default_factory=FeedSettings)
    """The task feeder and its admission control."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """Rollout workers."""
    stream: StreamSettings = Field(default_factory=StreamSettings)
    """Stream workers, and group assembly."""
    join: JoinSettings = Field(default_factory=JoinSettings)
    """The feedback join: from users' signals to rewards."""
    batches: BatchSettings = Field(default_factory=BatchSettings)
    """Online batches: from rewards to the inputs of a step."""
    router: RouterSettings = Field(default_factory=RouterSettings)
    """The OpenAI-compatible router of the product."""
    product: ProductSettings = Field(default_factory=ProductSettings)
    """The product's keys: for the router and feedback."""
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    """The feedback gateway."""
    users: UsersSettings = Field(default_factory=UsersSettings)
    """Simulated users."""
    replica: ReplicaSettings = Field(default_factory=ReplicaSettings)
    """The vLLM replica."""
    gate: GateSettings = Field(default_factory=GateSettings)
    """The gate, which decides which version users get."""
    sink: SinkSettings = Field(default_factory=SinkSettings)
    """The ClickHouse sink."""
    view: ViewSettings = Field(default_factory=ViewSettings)
    """The page that shows a run."""
    demo: DemoSettings = Field(default_factory=DemoSettings)
    """The demonstration."""

    @model_validator(mode="after")
    def _numerics_of_roles(self) -> Self:
        if self.numerics.batch_invariant:
            on = {"batch_invariant": True}
            self.trainer, self.replica = self.trainer.model_copy(update=on), self.replica.model_copy(update=on)
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return flags, then the environment, then the TOML file."""
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))


def load_settings(file: Path | None = None, flags: dict[str, Any] | None = None) -> TidemillSettings:
    """Return the configuration from a file (default `tidemill.toml`, if it exists), the environment and flags.

    Args:
        file: a TOML file whose tables are the sections.
        flags: a tree of values, section first, as parsed from the command line.

    Raises:
        ValueError: the file cannot be read, a key is unknown, or a value is out of range.
    """
    if file is not None and not file.is_file():
        raise ValueError(f"configuration file {file} does not exist")

    class FromFile(TidemillSettings):
        model_config = SettingsConfigDict(toml_file=file or DEFAULT_FILE)

    try:
        return FromFile(**(flags or {}))
    except ValidationError as error:
        lines = [f"  {'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
        raise ValueError("the configuration is not usable:\n" + "\n".join(lines)) from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"configuration file {file or DEFAULT_FILE}: {error}") from error


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Parse `["run.max_steps=3"]` to `{"run": {"max_steps": "3"}}`; the model parses the values.

    A value that begins with `[` or `{` is JSON, as in an environment variable.

    Raises:
        ValueError: an assignment has no `section.key=value` form, or its JSON cannot be read.
    """
    tree: dict[str, Any] = {}
    for text in assignments:
        path, equals, value = text.partition("=")
        keys = path.split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise ValueError(f"--set {text!r}: expected SECTION.KEY=VALUE, for instance run.max_steps=40")
        try:
            read = json.loads(value) if value.startswith(("[", "{")) else value
        except ValueError as error:
            raise ValueError(
                f"--set {path}: the value begins like JSON, but cannot be read as JSON: {error}"
            ) from error
        merge(tree, nest(keys, read))
    return tree


def nest(keys: list[str], value: object) -> dict[str, Any]:
    """Convert `["a", "b"], 1` to `{"a": {"b": 1}}`."""
    tree: Any = value
    for key in reversed(keys):
        tree = {key: tree}
    return dict(tree)


def merge(into: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge `other` into `into`, key by key; `other` wins. Returns `into`."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value
    return into
