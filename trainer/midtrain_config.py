"""Settings of mid-training: the model to build, the documents to read and the schedule."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tidemill.schemas.config import CHATML_TOKENS, Section


class ModelShape(Section):
    """A Qwen3 to build with random weights. The default has 1.8 million parameters."""

    hidden_size: int = Field(default=192, ge=32, multiple_of=32)
    """Width of the residual stream; vLLM's kernels need multiples of 32."""

    intermediate_size: int = Field(default=576, ge=32, multiple_of=32)
    """Width of the feed-forward layers."""

    layers: int = Field(default=4, ge=1)
    """Transformer layers."""

    heads: int = Field(default=6, ge=1)
    """Query heads."""

    kv_heads: int = Field(default=2, ge=1)
    """Key and value heads; the query heads are divided evenly among them."""

    head_dim: int = Field(default=32, ge=32, multiple_of=32)
    """Width of a head; vLLM's kernels need multiples of 32."""

    max_positions: int = Field(default=2048, ge=64)
    """Longest context."""

    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position embedding."""

    tied_embeddings: bool = True
    """Input and output embeddings are one tensor."""

    @model_validator(mode="after")
    def _heads_share_evenly(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class TokenizerSettings(Section):
    """A byte-level BPE tokenizer to train from the documents."""

    vocab_size: int = Field(default=640, ge=320)
    """Maximum tokens: 256 bytes, the special tokens and merges; fewer if the documents give fewer merges."""

    special_tokens: tuple[str, ...] = Field(default=CHATML_TOKENS, min_length=1)
    """Tokens of the chat template that are never split; the last one ends a turn."""

    phrases: bool = True
    """Merges cross words, and stop at digits, ends of lines and special tokens: useful for documents with much fixed
    text, such as tool calls, in which a phrase becomes a token. False: merges stay within a word, useful for prose."""

    training_documents: int = Field(default=5_000, ge=1)
    """Number of first documents from which the merges are counted."""


class MidtrainSettings(Section):
    """Next-token training on packed documents, from random weights to a Hugging Face checkpoint."""

    output: str = "data/model"
    """Directory of the checkpoint to write; an older checkpoint there is replaced."""

    source: str = ""
    """Train only on documents of this source. Empty: on all."""

    until: dict[int, int] = Field(default_factory=dict)
    """First offset not to read, by partition of the documents topic. Empty: the ends of the topic at the start. The
    offsets used are recorded in the checkpoint, so that a run can be repeated from the same documents."""

    model: ModelShape = ModelShape()
    """The model to build."""

    tokenizer: TokenizerSettings = TokenizerSettings()
    """The tokenizer to train."""

    steps: int = Field(default=200, ge=1)
    """Optimizer steps; after all documents, the next epoch uses them in another order."""

    row_tokens: int = Field(default=1_536, ge=16)
    """Tokens of one packed row, which is the batch of one step, at most `model.max_positions`; longer documents are cut
    into pieces of this size."""

    learning_rate: float = Field(default=3e-3, gt=0)
    """Peak of the learning rate."""

    final_learning_rate: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the cosine decay, as a share of the peak."""

    warmup_steps: int = Field(default=30, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moments; AdamW trains embeddings and vectors."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Muon's momentum; Muon trains the matrices inside the network."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""

    threads: int = Field(default=2, ge=1)
    """Threads of the tensor library; results are reproducible for a fixed number."""

    report_every: int = Field(default=25, ge=1)
    """Steps between two lines of progress."""
