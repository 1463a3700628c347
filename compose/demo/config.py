"""Settings of the demonstration, and of the mid-training documents that its model begins with."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field

from tidemill.producers.environments.ledger import LedgerOptions
from tidemill.schemas.config import Section


class Act(StrEnum):
    """A part of the demonstration."""

    ONE = "one"
    """The model learns in simulation."""
    TWO = "two"
    """Users arrive, and it learns what they like."""
    BOTH = "both"


class CorpusSettings(Section):
    """The mid-training documents to write: ledgers worked by demonstrators of mixed quality."""

    documents: int = Field(default=12_000, ge=1)
    """Documents to write."""

    options: LedgerOptions = LedgerOptions()
    """Difficulty of the ledgers, as for tasks."""

    slip_rates: tuple[float, ...] = Field(default=(0.1, 0.25), min_length=1)
    """One demonstrator each: the share of its turns that go wrong. The author of a document is drawn evenly."""

    polite_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the documents whose answer closes politely. The simulated reward does not ask for it, users may."""


class DemoSettings(Section):
    """How `tidemill demo` runs the loop."""

    data_dir: Path = Path("data/demo")
    """Each demonstration keeps its log, store, tables and role logs in a directory of its own below this one."""

    model: str = ""
    """Model to start from (`tidemill models get`). Empty: mid-train a tiny one from nothing."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Options for any environment that knows them, where `--environment` names another than the recipe's."""

    act: Act = Act.BOTH
    """Which acts are played. Act two alone starts from `model`, which should be above `gate.floor` already."""

    replicas: int = Field(default=1, ge=1)
    """vLLM replicas of the first act; the second one has a stable and a canary replica."""

    workers: int = Field(default=1, ge=1)
    """Rollout workers to run."""

    online_batches: int = Field(default=6, ge=1)
    """Online batches to learn from in the second act."""

    online_limit_s: float = Field(default=420.0, gt=0)
    """Longest time that users are there in the second act."""

    measured_answers: int = Field(default=120, ge=1)
    """Held-out users' questions by which satisfaction is measured, before and after."""

    endings_timeout_s: float = Field(default=90.0, gt=0)
    """Longest wait, when the users have left, until every interaction has ended in a reward or an exclusion."""

    start_timeout_s: float = Field(default=180.0, gt=0)
    """How long a role may take to start."""

    stall_timeout_s: float = Field(default=180.0, gt=0)
    """The demonstration is given up when nothing at all happens in the log for this long."""
