"""Settings of weight publication, for any trainer: how deltas are coded, where they lie, when anchors are written.

What has to be known before a role is started, without the libraries that the publication itself needs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tidemill.schemas.config import Section


class CodecChoice(Section):
    """How the blocks of a delta are cut, coded and sealed."""

    block_elements: int = Field(default=1 << 24, ge=1, le=1 << 24)
    """Elements of the largest block: smaller ones cost some bytes, and less memory on both sides."""

    coder: Literal["auto", "rans", "pcodec", "zstd"] = "auto"
    """Entropy coder of sparse blocks; auto takes the smallest."""

    digest: Literal["xxh3", "blake3"] = "xxh3"
    """Digest over a block: xxh3 finds damage; blake3 also withstands malice, where the store is not trusted."""


class PublishSettings(Section):
    """Publication of weight versions."""

    codec: CodecChoice = CodecChoice()
    """The delta codec."""

    log_limit_bytes: int = Field(default=64 << 20, ge=0)
    """A shard of a delta above this lies in the object store, as one object, and not in the log."""

    on_device: bool = True
    """Tensors on a GPU are compared and encoded there: only changed elements, and small tensors, come to the CPU. The
    version before is held there too, and the trainer's copy of the next one: 4 bytes a parameter of the rank in bf16.
    Off: both lie in the CPU's memory, and each tensor is copied there whole."""

    shards: int = Field(default=1, ge=1)
    """Shards that each rank splits a delta over, each a run of chunks in one partition of the log."""

    anchor_every: int = Field(default=20, ge=1)
    """An anchor is written at the latest this many versions after the last one."""

    anchor_bytes_ratio: float = Field(default=1.0, gt=0)
    """An anchor is also written once the deltas since the last one exceed this share of its size: a reader that
    starts at an anchor never has more than this to read beside it."""

    anchor_file_bytes: int = Field(default=5 << 30, ge=1)
    """Weights in one file of an anchor."""

    skips: tuple[Annotated[int, Field(ge=2)], ...] = (8, 64)
    """Lengths of skip-deltas: with 8, every eighth version also gets a delta from the version eight before it, in the
    object store, where only replicas that fell behind read it. Each length costs a copy of the weights in memory, and 8
    and 64 together about half as many bytes again as the versions' own deltas. Empty: none."""

    skip_backlog: int = Field(default=1, ge=1)
    """Versions that may wait for their skip-deltas beside the one under way; what comes then goes without."""

    skip_bases: Literal["memory", "log"] = "memory"
    """Where the older weights come from: a copy of the weights kept in memory for each length, or read again from an
    anchor and the deltas after it, which takes one copy while it lasts."""

    incarnation: str = ""
    """Names the life of the version numbers that version 0 begins. Empty: a new one. To make a run again from a copy of
    its groups and rollouts, give the one of then: they count their versions in it."""

    @field_validator("skips")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"skips {list(value)}: name each length once")
        return tuple(sorted(value))
