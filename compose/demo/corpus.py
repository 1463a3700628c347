"""Writes the mid-training documents: ledgers worked by demonstrators of mixed quality, in the run's chat format.

A demonstrator plays the real environment in place of a policy. In each turn it does the correct next thing, or, at a
known rate, makes an error without noticing it. Some answers close politely, independently of their correctness.

Invariants: document ids name their content (seed and index), so that a repeated corpus adds nothing for a reader that
drops repeated ids; no document is about a held-out question; the work is deterministic in its generator.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from tidemill.compose.config import CorpusSettings
from tidemill.producers.environments.base import Policy, Reply, Split, TaskQuery, split_of
from tidemill.producers.environments.ledger import CALCULATOR, CEILING, LedgerEnvironment, LedgerTask, parse_ledger
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.format import chat_template_source
from tidemill.schemas.chat.messages import Message, Tool
from tidemill.schemas.chat.template import ChatTemplate
from tidemill.schemas.config import CHATML, CHATML_TOKENS, HELD_OUT_ONE_IN, ChatSettings, KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.records import Document, Mode, Task

SOURCE = "ledger"
_CLIENT = "tidemill-documents"
_REPORT_EVERY = 1_000
_log = logging.getLogger(__name__)


def run(kafka: KafkaSettings, run: RunSettings, settings: CorpusSettings, chat: ChatSettings) -> int:
    """Write the corpus of the run's seed, wait until the log has every document, and return their number.

    Raises TemplateRefused for a chat template that cannot be used, DeliveryError if the log does not take a document.
    """
    with RecordProducer(kafka, _CLIENT) as producer:
        for written, document in enumerate(corpus(run.seed, settings, chat, run.held_out_one_in), 1):
            producer.send(Topic.DOCUMENTS, document, key=document.document_id)
            if written % _REPORT_EVERY == 0:
                _log.info("%d of %d documents written", written, settings.documents)
    _log.info("%d of %d documents written", settings.documents, settings.documents)
    return settings.documents


def corpus(
    seed: int, settings: CorpusSettings, chat: ChatSettings, one_in: int = HELD_OUT_ONE_IN
) -> Iterator[Document]:
    """Yield the documents of a seed. Raises TemplateRefused."""
    chat = chat.model_copy(update={"template": chat.template or CHATML})
    template = ChatTemplate(chat_template_source("", {}, chat), {}, CHATML_TOKENS, chat)
    environment, rng = LedgerEnvironment(settings.options), Random(f"demonstrators {seed}")
    # The questions of the tasks are drawn with another seed.
    drafts = (each for each in environment.tasks(TaskQuery(seed + 2**32)) if split_of(each.asks, one_in) is Split.TRAIN)
    with asyncio.Runner() as runner:
        for index, draft in enumerate(islice(drafts, settings.documents)):
            ledger, slip_rate = parse_ledger(draft.payload), rng.choice(settings.slip_rates)
            author = Demonstrator(ledger, rng, slip_rate=slip_rate, polite_rate=settings.polite_rate)
            name = f"{SOURCE}-{seed}-{index:07d}"
            task = Task(name, name, "", SOURCE, draft.payload, Mode.TRAIN, 1, draft.max_turns, seed, 0, 0, 0)
            runner.run(environment.play(task, author))
            yield Document(name, SOURCE, template.text(author.conversation, CALCULATOR.schemas, prompt=False))


_MUMBLES = ("add", "sub", "add total", "total", "answer", "credit", "debit")


_FAULTS = ("skip", "repeat", "sign", "carry", "early", "mumble")
"""The kinds of error in a turn."""


class Demonstrator(Policy):
    """A policy that works one ledger. `conversation` has all messages."""

    def __init__(self, ledger: LedgerTask, rng: Random, *, slip_rate: float, polite_rate: float) -> None:
        """Rates are shares, from 0 to 1: of turns with an error (each kind equally likely), and of polite closings."""
        self._entries, self._rng, self._slip_rate = ledger.entries, rng, slip_rate
        self._polite = rng.random() < polite_rate
        self._next = 0
        """Index of the next entry."""
        self._total = 0
        """The total that the demonstrator has computed."""
        self.conversation: list[Message] = []

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        trained: bool = True,
    ) -> Reply:
        slip = self._rng.choice(_FAULTS) if self._rng.random() < self._slip_rate else None
        message = self._turn(slip, len(messages))
        self.conversation = [*messages, message]
        return Reply(message, "tool_calls" if "tool_calls" in message else "stop")

    def _turn(self, slip: str | None, number: int) -> Message:
        if slip == "mumble":
            return {"role": "assistant", "content": self._rng.choice(_MUMBLES)}
        if slip == "skip":
            self._next += 1
        if slip == "repeat":
            self._next = max(self._next - 1, 0)
        believed = self._rng.randint(0, CEILING) if slip == "carry" else self._total
        if slip == "early" or self._next >= len(self._entries):
            return {"role": "assistant", "content": f"answer {believed}{' thanks' if self._polite else ''}"}
        entry = self._entries[self._next]
        credit = (entry > 0) != (slip == "sign")
        self._next += 1
        self._total = believed + abs(entry) if credit else believed - abs(entry)
        function = {"name": "add" if credit else "sub", "arguments": json.dumps({"a": believed, "b": abs(entry)})}
        call = {"id": f"call{number:05d}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
