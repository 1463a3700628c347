"""Settings of the corpus writer."""

from __future__ import annotations

from pydantic import Field

from tidemill.schemas.config import Section


class CorpusSettings(Section):
    """The mid-training documents to write: ledgers worked by clerks of mixed quality."""

    documents: int = Field(default=12_000, ge=1)
    """Documents to write."""

    options: dict[str, int] = Field(default_factory=dict)
    """Difficulty of the ledgers by name, as for tasks."""

    slip_rates: tuple[float, ...] = Field(default=(0.1, 0.25), min_length=1)
    """One clerk each: the share of its turns that go wrong. Every document's clerk is drawn evenly."""

    polite_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of the documents whose answer closes politely. The simulated reward does not ask for it, users may."""
