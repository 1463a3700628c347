"""Writes the mid-training documents of the ledger environment.

What holds: no document is about a held-out ledger; document `i` of a seed is always the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from tidemill.producers.environment import Split, Transcript
from tidemill.producers.harness import END, opening, tool_output
from tidemill.producers.ledger.book import Ledger
from tidemill.producers.ledger.clerk import Clerk
from tidemill.producers.ledger.tasks import LedgerOptions, ledgers
from tidemill.schemas.records import Document

SOURCE = "ledger"


def documents(seed: int, count: int, options: LedgerOptions, clerks: Sequence[Clerk]) -> Iterator[Document]:
    """Yields `count` documents, one ledger each, worked by a clerk drawn evenly from `clerks`."""
    authors, subjects = Random(f"ledger clerks {seed}"), Random(f"ledger documents {seed}")
    for index, ledger in enumerate(ledgers(subjects, count, Split.TRAIN, options)):
        transcript = authors.choice(clerks).work(ledger, authors, options.spare_turns)
        yield Document(f"{SOURCE}-{seed}-{index:07d}", SOURCE, render(ledger, transcript))


def render(ledger: Ledger, transcript: Transcript) -> str:
    """An episode as the text that the harness would have made of it, the last turn's end marker included."""
    parts = [opening(ledger.prompt())]
    for turn in transcript:
        parts.append(turn.text + END)
        parts.append("" if turn.observation.done else tool_output(turn.observation.text))
    return "".join(parts)
