"""Mid-training: it makes the checkpoint from which reinforcement learning starts, from documents of the log.

Invariants: the result depends only on the documents up to the recorded offsets, the settings and the seed (for one
number of threads and one build of the tensor library); each document is used once, in the order of the ids.

Documents are packed into rows: every document occurs exactly once in an epoch, its tokens in order, cut only if it is
longer than a row; a piece of one token, in which nothing is predicted, is left out; a token is predicted only from
earlier tokens of its own piece; the order of an epoch depends only on the seed.

The matrices inside the network are trained by Muon, momentum with orthogonalised updates, all other parameters by
AdamW: after Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the learning rate
scaled to AdamW's size of update by 0.2 * sqrt(max(rows, columns)) as in Liu et al., "Muon is scalable for LLM training"
(2025). The iteration runs in fp32: the matrices are small, and not every CPU multiplies bf16 quickly. On the
mid-training of the `ledger` environment it needs about a third of the tokens that AdamW alone needs.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.chat.format import chat_template_source
from tidemill.schemas.config import CHATML, ChatSettings, KafkaSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Document
from tidemill.trainer.attention import separate_calls
from tidemill.trainer.midtrain_config import MidtrainSettings
from tidemill.trainer.model import build_model, checkpoint_place, save_checkpoint, train_tokenizer, use_packed_attention

RECORD_FILE = "midtrain.json"
_CLIENT = "tidemill-midtrain"
_NO_LABEL = -100
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """Pieces of documents in a row of L tokens."""

    input_ids: Tensor
    """i8[1, L]."""
    position_ids: Tensor
    """i8[1, L], starting at 0 with each piece."""
    labels: Tensor
    """i8[L]: the next token of the same piece, -100 at a piece's last token."""
    lengths: tuple[int, ...]
    """Tokens of each piece; they sum to L."""


def epochs(documents: Sequence[Sequence[int]], row_tokens: int, seed: int) -> Iterator[DocumentRow]:
    """Yield rows without end, the documents in a new order each epoch. Raises ValueError without tokens to predict."""
    cuts = (document[at : at + row_tokens] for document in documents for at in range(0, len(document), row_tokens))
    pieces = [piece for piece in cuts if len(piece) > 1]
    if not pieces:
        raise ValueError("the documents hold no two tokens in a row, so there is nothing to train on")
    generator = np.random.default_rng(seed)
    while True:
        held: list[Sequence[int]] = []
        used = 0
        for place in generator.permutation(len(pieces)):
            piece = pieces[place]
            if used + len(piece) > row_tokens:
                yield _row(held)
                held, used = [], 0
            held.append(piece)
            used += len(piece)
        yield _row(held)


def _row(pieces: Sequence[Sequence[int]]) -> DocumentRow:
    ids = [token for piece in pieces for token in piece]
    positions = [position for piece in pieces for position in range(len(piece))]
    labels = [label for piece in pieces for label in (*piece[1:], _NO_LABEL)]
    return DocumentRow(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        labels=torch.tensor(labels),
        lengths=tuple(len(piece) for piece in pieces),
    )


def run(kafka: KafkaSettings, run: RunSettings, settings: MidtrainSettings, chat: ChatSettings) -> None:
    """Read the documents, train, and write the checkpoint to `settings.output`.

    Raises LookupError if there are no documents or they are no longer stored, ValueError for settings that do not fit,
    FileExistsError if the output would replace something else than a checkpoint.
    """
    checkpoint_place(settings.output)  # before the training
    texts, until = read_corpus(kafka, settings)
    _log.info("%d documents to train on", len(texts))
    model, tokenizer, losses, tokens = midtrain(texts, settings, run.seed)
    # Everything that is needed to make the checkpoint again, and the result.
    record = {
        "seed": run.seed,
        "settings": settings.model_dump(mode="json"),
        "until": until,
        "documents": len(texts),
        "tokens": tokens,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    template = chat_template_source("", {}, chat.model_copy(update={"template": chat.template or CHATML}))
    save_checkpoint(
        settings.output,
        model,
        tokenizer,
        settings.tokenizer.special_tokens[-1],
        template,
        files={RECORD_FILE: json.dumps(record, indent=2) + "\n"},
    )
    _log.info("checkpoint written to %s", settings.output)


def read_corpus(kafka: KafkaSettings, settings: MidtrainSettings) -> tuple[list[str], dict[int, int]]:
    """Return the documents below `settings.until`, or up to the present end of the topic, and the offset after the last
    one, by partition; write dead letters for other values.

    Raises LookupError if the topic ends before the given offsets, or has no document below them.
    """
    with LogReader(kafka, [Topic.DOCUMENTS], client_id=_CLIENT) as reader, RecordProducer(kafka, _CLIENT) as producer:
        until, limits = {partition: end for (_, partition), end in reader.end_offsets().items()}, settings.until
        for partition, offset in limits.items():
            if offset > until.get(partition, 0):
                raise LookupError(
                    f"midtrain.until wants offset {offset} of documents[{partition}], which ends at "
                    f"{until.get(partition)}"
                )
        if limits:
            until = {partition: limits.get(partition, 0) for partition in until}
        found: dict[str, Document] = {}
        for located in reader.read_to_end():
            if located.offset >= until[located.partition]:
                continue
            if isinstance(located.record, Document):
                found.setdefault(located.record.document_id, located.record)
            else:
                reason = located.error or f"a {type(located.record).__name__} record, not a Document"
                send_dead_letter(producer, Names(kafka.topic_prefix), located, reason, _CLIENT)
    texts = [found[name].text for name in sorted(found) if settings.source in ("", found[name].source)]
    if not texts:
        named = f" with the source {settings.source!r} (midtrain.source)" if settings.source else ""
        raise LookupError(f"the documents topic holds nothing to train on{named}: write some with `tidemill documents`")
    return texts, until


def midtrain(
    texts: Sequence[str], settings: MidtrainSettings, seed: int
) -> tuple[PreTrainedModel, Tokenizer, list[float], int]:
    """Train a tokenizer, then a model from random weights. Deterministic in its arguments; sets torch's threads.

    Returns the model, the tokenizer, the mean negative log-likelihood of a token in nats for each step, and the number
    of tokens of all steps.
    """
    torch.set_num_threads(settings.threads)
    tokenizer = train_tokenizer(texts[: settings.tokenizer.training_documents], settings.tokenizer)
    model = build_model(settings.model, tokenizer, settings.tokenizer.special_tokens[-1], seed)
    use_packed_attention(model)
    documents = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    row_tokens = min(settings.row_tokens, settings.model.max_positions)
    optimizer = HybridOptimizer(model, settings.betas, settings.momentum, settings.weight_decay)
    began, losses, tokens = time.monotonic(), [], 0
    for step, row in enumerate(islice(epochs(documents, row_tokens, seed), settings.steps)):
        loss = loss_of(model, row)
        loss.backward()  # type: ignore[no-untyped-call]
        if not torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).isfinite():
            raise RuntimeError(f"mid-training diverged at step {step + 1}: lower midtrain.learning_rate")
        optimizer.step(learning_rate(step, settings))
        losses.append(loss.item())
        tokens += row.input_ids.numel()
        if (step + 1) % settings.report_every == 0 or step + 1 == settings.steps:
            recent = losses[-settings.report_every :]
            progress = {
                "step": step + 1,
                "steps": settings.steps,
                "loss": round(sum(recent) / len(recent), 4),
                "tokens": tokens,
                "seconds": round(time.monotonic() - began, 4),
            }
            _log.info("midtrain %s", json.dumps(progress))
    return model, tokenizer, losses, tokens


def learning_rate(step: int, settings: MidtrainSettings) -> float:
    """Return the learning rate of step `step` (the first is 0): linear warm-up times cosine decay."""
    warm = min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
    floor = settings.final_learning_rate
    return settings.learning_rate * warm * (floor + (1 - floor) * cosine)


def loss_of(model: PreTrainedModel, row: DocumentRow) -> torch.Tensor:
    """Return f4[]: mean negative log-likelihood of the row's labelled tokens, in nats."""
    tree = separate_calls(row.lengths)
    logits = model(input_ids=row.input_ids, position_ids=row.position_ids, tree=tree, use_cache=False).logits
    return cross_entropy(logits[0].float(), row.labels)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that moves singular values towards 1, with the greatest slope at zero."""

_ITERATIONS = 5
_NORM_FLOOR = 1e-7


class HybridOptimizer:
    """Muon for a model's inner matrices, AdamW for its embeddings, output head and vectors."""

    def __init__(
        self, model: PreTrainedModel, betas: tuple[float, float], momentum: float, weight_decay: float
    ) -> None:
        self._matrices, others = split_parameters(model)
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._momentum, self._weight_decay = momentum, weight_decay
        self._adamw = torch.optim.AdamW(others, lr=0.0, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply and clear the gradients."""
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            if matrix.grad is None:
                continue
            momentum.lerp_(matrix.grad, 1 - self._momentum)
            ahead = matrix.grad.lerp(momentum, self._momentum)
            scale = 0.2 * math.sqrt(max(matrix.shape))
            matrix.mul_(1 - learning_rate * self._weight_decay)
            matrix.add_(orthogonal(ahead), alpha=-learning_rate * scale)
            matrix.grad = None
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return f4[r, c] with the singular vectors of `matrix` and singular values roughly 1 (between 0.5 and 1.5)."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=_NORM_FLOOR)
    a, b, c = NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def split_parameters(model: PreTrainedModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices inside the network, and all other parameters: embeddings, output head, vectors."""
    ends = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    inner: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for parameter in model.parameters():
        is_inner = parameter.ndim == 2 and id(parameter) not in ends
        (inner if is_inner else outer).append(parameter)
    return inner, outer
