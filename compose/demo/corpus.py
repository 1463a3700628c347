"""Writes the mid-training documents: ledgers worked by demonstrators of mixed quality, in the run's chat format.

What holds: document ids name their content (seed and place), so that writing a corpus again adds nothing for a reader
that drops repeated ids; no document is about a held-out question.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from tidemill.compose.config import CorpusSettings
from tidemill.compose.demo.demonstrator import Demonstrator
from tidemill.producers.environments.base import Split, TaskQuery, split_of
from tidemill.producers.environments.ledger import CALCULATOR, LedgerEnvironment, parse_ledger
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.format import CHATML, CHATML_TOKENS, chat_template_source
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import HELD_OUT_ONE_IN, ChatSettings, KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Document, Mode, Task

SOURCE = "ledger"
_CLIENT = "tidemill-documents"
_REPORT_EVERY = 1_000
_log = logging.getLogger(__name__)

Report = Callable[[int, int], None]
"""Called with the documents written so far and the documents to write."""


def run(
    kafka: KafkaSettings, run: RunSettings, settings: CorpusSettings, chat: ChatSettings, report: Report | None = None
) -> int:
    """Write the corpus of the run's seed and wait until the log has every document; the number of documents.

    Raises TemplateRefused for a chat template that cannot be used, DeliveryError when the log does not take a document.
    """
    report = report or _log_progress
    with RecordProducer(kafka, _CLIENT) as producer:
        for written, document in enumerate(corpus(run.seed, settings, chat, run.held_out_one_in), 1):
            producer.send(Topic.DOCUMENTS, document, key=document.document_id)
            if written % _REPORT_EVERY == 0:
                report(written, settings.documents)
    report(settings.documents, settings.documents)
    return settings.documents


def corpus(
    seed: int, settings: CorpusSettings, chat: ChatSettings, one_in: int = HELD_OUT_ONE_IN
) -> Iterator[Document]:
    """Yields the documents of a seed. Raises TemplateRefused."""
    chat = chat.model_copy(update={"template": chat.template or CHATML})
    template = ChatTemplate(chat_template_source("", {}, chat), {}, CHATML_TOKENS, chat)
    environment, rng = LedgerEnvironment(settings.options), Random(f"demonstrators {seed}")
    # The questions of the tasks come from the stream of another seed.
    drafts = (each for each in environment.tasks(TaskQuery(seed + 2**32)) if split_of(each.asks, one_in) is Split.TRAIN)
    with asyncio.Runner() as runner:
        for index, draft in enumerate(islice(drafts, settings.documents)):
            ledger, slip_rate = parse_ledger(draft.payload), rng.choice(settings.slip_rates)
            author = Demonstrator(ledger, rng, slip_rate=slip_rate, polite_rate=settings.polite_rate)
            name = f"{SOURCE}-{seed}-{index:07d}"
            task = Task(name, name, "", SOURCE, draft.payload, Mode.TRAIN, 1, draft.max_turns, seed, 0, 0, 0)
            runner.run(environment.play(task, author))
            yield Document(name, SOURCE, template.text(author.conversation, CALCULATOR.schemas, prompt=False))


def _log_progress(written: int, total: int) -> None:
    _log.info("%d of %d documents written", written, total)
