"""Writes the mid-training documents to their topic.

What holds: document ids name their content (seed and place), so writing a corpus again adds nothing to what a reader
that drops repeated ids sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from tidemill.producers.corpus_config import CorpusSettings
from tidemill.producers.ledger.clerk import Clerk
from tidemill.producers.ledger.corpus import documents
from tidemill.producers.ledger.tasks import LedgerOptions
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.producer import RecordProducer
from tidemill.schemas.records import Document

_CLIENT = "tidemill-documents"
_REPORT_EVERY = 1_000
_log = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Called with the documents written so far and the documents to write."""


def run(kafka: KafkaSettings, run: RunSettings, settings: CorpusSettings, report: Report | None = None) -> int:
    """Write the corpus of the run's seed and wait until the log has all of it; the number of documents.

    Raises TaskError for options that the ledger refuses, DeliveryError when the log does not take a document.
    """
    report = report or _log_progress
    with RecordProducer(kafka, _CLIENT) as producer:
        for written, document in enumerate(corpus(run.seed, settings), 1):
            producer.send(Topic.DOCUMENTS, document, key=document.document_id)
            if written % _REPORT_EVERY == 0:
                report(written, settings.documents)
    report(settings.documents, settings.documents)
    return settings.documents


def corpus(seed: int, settings: CorpusSettings) -> Iterator[Document]:
    """Yields the documents of a seed. Raises TaskError for options that the ledger refuses."""
    clerks = [Clerk(rate, settings.polite_rate) for rate in settings.slip_rates]
    return documents(seed, settings.documents, LedgerOptions.of(settings.options), clerks)


def _log_progress(written: int, total: int) -> None:
    _log.info("%d of %d documents written", written, total)
