"""The typed configuration of Tidemill: all sections of all roles, from a TOML file, the environment and flags.

Later sources win: TOML file, then `TIDEMILL_<SECTION>__<KEY>` in the environment, then flags. Unknown keys are refused.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from tidemill.compose.stack.config import StackSettings
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.view.config import ViewSettings
from tidemill.producers.config import FeedSettings, GatewaySettings, RolloutSettings, RouterSettings
from tidemill.producers.environments.ledger import LedgerOptions
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, Section, StoreSettings
from tidemill.streams.config import BatchSettings, StreamSettings
from tidemill.streams.gate.config import GateSettings
from tidemill.streams.join.config import JoinSettings
from tidemill.trainer.config import TrainerSettings
from tidemill.trainer.midtrain_config import MidtrainSettings

DEFAULT_FILE = Path("tidemill.toml")
PREFIX = "TIDEMILL_"
"""First part of the names of environment variables with settings."""
SERVICE_NAME = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")
"""Names and values of the variables that Kubernetes sets for its services, such as TIDEMILL_GATEWAY_PORT."""


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


class UsersSettings(Section):
    """Settings of the simulated users: their number, their preferences and their behaviour."""

    router: str = Field(default="http://127.0.0.1:8200", pattern=r"^https?://")
    """Address of the router, http://host:port."""

    api_key: SecretStr = SecretStr("")
    """The product's key for the router (`router.api_keys`). Secrets belong in the environment
    (TIDEMILL_USERS__API_KEY)."""

    seed: int = Field(default=0, ge=0)
    """Root of the users' randomness: their habits, their questions and their reactions."""

    ordinary: int = Field(default=60, ge=0)
    """Users who ask and react."""

    bots: int = Field(default=2, ge=0)
    """Users who vote at random on all answers, many times."""

    held_out: int = Field(default=12, ge=0)
    """Users from whom nothing is learnt: satisfaction is measured on their answers."""

    held_out_share: float = Field(default=0.15, ge=0, le=1)
    """Share of the questions that held-out users ask, if there are other users too."""

    bot_share: float = Field(default=0.05, ge=0, le=1)
    """Share of the questions that bots ask, if there are other users too."""

    likes_polite: bool = True
    """The preference of all users, which no simulated reward measures: an answer that closes politely, or one that
    does not."""

    changed_preference_at: float | None = Field(default=None, ge=0)
    """Time of a change of preference, in seconds after the start: then all users like the opposite. None: never."""

    vote_rate: float = Field(default=0.6, ge=0, le=1)
    """Mean share of the answers that an ordinary user votes on."""

    flip_rate: float = Field(default=0.05, ge=0, le=1)
    """Share of the votes that are the opposite of the user's opinion."""

    mind_change_rate: float = Field(default=0.03, ge=0, le=1)
    """Share of the votes that are later replaced by the opposite vote."""

    vote_delay_s: float = Field(default=1.0, ge=0)
    """Mean time between an answer and its vote; the delays are random, and a few are several times as long."""

    consent_rate: float = Field(default=0.9, ge=0, le=1)
    """Share of the ordinary users who let the product learn from them."""

    leave_rate: float = Field(default=0.05, ge=0, le=1)
    """Share of the ordinary users who withdraw their consent at some time."""

    leaves_within: int = Field(default=20, ge=1)
    """Greatest number of questions after which a user who withdraws their consent does so."""

    shuffle_thumbs: bool = False
    """Control run: votes are exchanged with earlier votes, so that they are independent of their answers."""

    shuffle_window: int = Field(default=64, ge=2, multiple_of=2)
    """Number of votes among which `shuffle_thumbs` exchanges."""

    options: LedgerOptions = LedgerOptions()
    """Difficulty of the questions, as for tasks."""

    interactions_per_second: float = Field(default=30.0, gt=0)
    """Most answers that are requested from the router per second; a question takes several."""

    concurrency: int = Field(default=24, ge=1)
    """Most concurrent conversations."""

    request_timeout_s: float = Field(default=30.0, gt=0)
    """Longest time that a user waits for an answer; then they end the conversation."""

    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the product. The trainer's importance weights assume 1."""

    max_turn_tokens: int = Field(default=32, ge=1)
    """Most tokens of one answer of the model."""

    report_every_s: float = Field(default=1.0, gt=0)
    """Seconds between two reports of the users' activity."""


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
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
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

    check_variables()
    try:
        return FromFile(**(flags or {}))
    except ValidationError as error:
        raise ValueError(unusable(error)) from error
    except SettingsError as error:
        # The library names only the section, in quotes.
        whole = (PREFIX + str(error).split('"')[1]).lower()
        wrong = [name for name in sorted(os.environ) if name.lower() == whole or name.lower().startswith(f"{whole}__")]
        raise ValueError(
            f"environment variable {' or '.join(wrong)}: a list or a table is written as JSON, and this is none: "
            f"{error.__cause__}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"configuration file {file or DEFAULT_FILE}: {error}") from error


def check_variables() -> None:
    """Raise ValueError for a variable of the environment that names no setting, which the library would ignore."""
    sections: dict[str, Any] = {name: field.annotation for name, field in TidemillSettings.model_fields.items()}
    for variable, value in os.environ.items():
        name, delimiter, _ = variable.lower().removeprefix(PREFIX.lower()).partition("__")
        if not variable.upper().startswith(PREFIX) or name in sections:
            continue
        if delimiter:
            raise ValueError(f"environment variable {variable}: there is no section {name!r}")
        of_kubernetes = SERVICE_NAME.search(variable) or SERVICE_VALUE.match(value)
        # The flags of these settings, such as --bootstrap, name no section.
        of_log = name in KafkaSettings.model_fields
        if of_log or (name.partition("_")[0] in sections and not of_kubernetes):
            keys = ((section, key) for section, model in sections.items() for key in model.model_fields)
            known = [f"{PREFIX}{section}__{key}".upper() for section, key in keys]
            closest = difflib.get_close_matches(variable.upper(), known, n=1, cutoff=0)[0]
            raise ValueError(f"environment variable {variable}: no setting has this name; the closest is {closest}")


def unusable(error: ValidationError) -> str:
    """Return the wrong settings, one per line, each with its fault but without its value."""
    lines = [f"  {'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()]
    return "the configuration is not usable:\n" + "\n".join(lines)


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
