"""Mid-training: documents of the log become the checkpoint that reinforcement learning starts from.

What holds: the result is a function of the documents up to the recorded offsets, the settings and the seed (for one
number of threads and one build of the tensor library); documents are taken once each, in the order of their ids.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.chat.format import CHATML, chat_template_source
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Document
from tidemill.trainer.midtrain_config import MidtrainSettings
from tidemill.trainer.model import build_model, save_checkpoint, train_tokenizer
from tidemill.trainer.muon import HybridOptimizer
from tidemill.trainer.packing import DocumentRow, epochs
from tidemill.trainer.probe import use_packed_attention
from tidemill.trainer.tree import separate_calls

RECORD_FILE = "midtrain.json"
_CLIENT = "tidemill-midtrain"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of the log, and where in the log they end."""

    texts: list[str]
    until: dict[int, int]
    """Offset after the last one read, by partition."""


@dataclass(frozen=True, slots=True)
class MidtrainProgress:
    """How far training has come."""

    step: int
    steps: int
    loss: float
    """Mean negative log-likelihood of a token over the steps since the last report, in nats."""
    tokens: int
    """Tokens trained on so far."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """A trained model with its tokenizer and the course of the loss."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    losses: list[float]
    """Mean negative log-likelihood of a token, in nats, one for each step."""
    tokens: int


Report = Callable[[MidtrainProgress], None]


def run(
    kafka: KafkaSettings,
    run: RunSettings,
    settings: MidtrainSettings,
    chat: ChatSettings,
    report: Report | None = None,
) -> None:
    """Read the documents, train, and write the checkpoint to `settings.output`.

    Raises LookupError when there are no documents or they are no longer kept, ValueError for settings that do not fit.
    """
    corpus = read_corpus(kafka, settings)
    _log.info("%d documents to train on", len(corpus.texts))
    result = midtrain(corpus.texts, settings, run.seed, report or _log_progress)
    end_token = settings.tokenizer.special_tokens[-1]
    record = _record(corpus, result, settings, run.seed)
    save_checkpoint(
        settings.output,
        result.model,
        result.tokenizer,
        end_token,
        chat_template_source("", {}, chat.model_copy(update={"template": chat.template or CHATML})),
        also=lambda directory: _write_record(directory, record),
    )
    _log.info("checkpoint written to %s", settings.output)


def read_corpus(kafka: KafkaSettings, settings: MidtrainSettings) -> Corpus:
    """The documents below `settings.until`, or up to the end of the topic as it is now; dead letters for the rest.

    Raises LookupError when the topic does not reach the offsets asked for, or holds no document below them.
    """
    with LogReader(kafka, [Topic.DOCUMENTS], client_id=_CLIENT) as reader, RecordProducer(kafka, _CLIENT) as producer:
        until = _checked_until(settings.until, reader.end_offsets())
        found: dict[str, Document] = {}
        for located in reader.read_to_end():
            if located.offset >= until[located.partition]:
                continue
            _take(located, found, producer, Names(kafka.topic_prefix))
    texts = [found[name].text for name in sorted(found) if settings.source in ("", found[name].source)]
    if not texts:
        raise LookupError("the documents topic holds nothing to train on: write some with `tidemill documents`")
    return Corpus(texts, until)


def midtrain(texts: Sequence[str], settings: MidtrainSettings, seed: int, report: Report) -> Result:
    """Train a tokenizer, then a model from random weights. Deterministic in its arguments; sets torch's threads."""
    torch.set_num_threads(settings.threads)
    tokenizer = train_tokenizer(texts[: settings.tokenizer.training_documents], settings.tokenizer)
    model = build_model(settings.model, tokenizer, settings.tokenizer.special_tokens[-1], seed)
    use_packed_attention(model)
    documents = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    rows = islice(epochs(documents, _row_limit(settings), seed), settings.steps)
    losses, tokens = _train(model, rows, settings, report)
    return Result(model, tokenizer, losses, tokens)


def learning_rate(step: int, settings: MidtrainSettings) -> float:
    """The learning rate of step `step` (the first is 0): linear warm-up times cosine decay."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    floor = settings.final_learning_rate
    return settings.learning_rate * warm * (floor + (1 - floor) * cosine)


def loss_of(model: PreTrainedModel, row: DocumentRow) -> torch.Tensor:
    """f4[]: mean negative log-likelihood of the row's labelled tokens, in nats."""
    tree = separate_calls(row.lengths)
    logits = model(input_ids=row.input_ids, position_ids=row.position_ids, tree=tree, use_cache=False).logits
    return cross_entropy(logits[0].float(), row.labels)


def _train(
    model: PreTrainedModel, rows: Iterable[DocumentRow], settings: MidtrainSettings, report: Report
) -> tuple[list[float], int]:
    optimizer = HybridOptimizer(model, settings.betas, settings.momentum, settings.weight_decay)
    began, losses, tokens = time.monotonic(), [], 0
    for step, row in enumerate(rows):
        losses.append(_step(model, optimizer, row, learning_rate(step, settings), settings.max_grad_norm))
        tokens += row.input_ids.numel()
        if (step + 1) % settings.report_every == 0 or step + 1 == settings.steps:
            recent = losses[-settings.report_every :]
            mean = sum(recent) / len(recent)
            report(MidtrainProgress(step + 1, settings.steps, mean, tokens, time.monotonic() - began))
    return losses, tokens


def _step(
    model: PreTrainedModel, optimizer: HybridOptimizer, row: DocumentRow, rate: float, max_grad_norm: float
) -> float:
    loss = loss_of(model, row)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm, error_if_nonfinite=True)
    optimizer.step(rate)
    return loss.item()


def _row_limit(settings: MidtrainSettings) -> int:
    if settings.row_tokens > settings.model.max_positions:
        return settings.model.max_positions
    return settings.row_tokens


def _checked_until(asked: Mapping[int, int], ends: Mapping[tuple[Topic, int], int]) -> dict[int, int]:
    now = {partition: end for (_, partition), end in ends.items()}
    if not asked:
        return now
    for partition, offset in asked.items():
        if offset > now.get(partition, 0):
            raise LookupError(
                f"midtrain.until wants offset {offset} of documents[{partition}], which ends at {now.get(partition)}"
            )
    return {partition: asked.get(partition, 0) for partition in now}


def _take(located: ConsumedRecord, found: dict[str, Document], producer: RecordProducer, names: Names) -> None:
    if isinstance(located.record, Document):
        found.setdefault(located.record.document_id, located.record)
    else:
        reason = located.error or f"a {type(located.record).__name__} record, not a Document"
        send_dead_letter(producer, names, located, reason, _CLIENT)


def _record(corpus: Corpus, result: Result, settings: MidtrainSettings, seed: int) -> dict[str, object]:
    """What it takes to make the checkpoint again, and how it came out."""
    return {
        "seed": seed,
        "settings": settings.model_dump(mode="json"),
        "until": corpus.until,
        "documents": len(corpus.texts),
        "tokens": result.tokens,
        "first_loss": result.losses[0],
        "last_loss": result.losses[-1],
    }


def _write_record(directory: Path, record: Mapping[str, object]) -> None:
    (directory / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", "utf-8")


def _log_progress(progress: MidtrainProgress) -> None:
    _log.info("midtrain %s", json.dumps({name: round(value, 4) for name, value in asdict(progress).items()}))
