"""Settings of weight publication, for any trainer: coding and storage of deltas, and when anchors are written.

This module does not import the libraries that publication needs, because it is read before a role starts.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from tidemill.schemas.config import Section


class CodecChoice(Section):
    """Settings of the delta codec: block size, entropy coder and digest."""

    block_elements: int = Field(default=1 << 24, ge=1, le=1 << 24)
    """Elements of the largest block: smaller blocks cost more bytes, but less memory for writer and reader."""

    coder: Literal["auto", "rans", "pcodec", "zstd"] = "auto"
    """Entropy coder of sparse blocks; auto: rans, or pcodec for a block that it makes smaller."""

    digest: Literal["xxh3", "blake3"] = "xxh3"
    """Digest over a block: xxh3 detects damage; blake3 also detects manipulation, if the store is not trusted."""


class PublishSettings(Section):
    """Publication of weight versions."""

    codec: CodecChoice = CodecChoice()
    """The delta codec."""

    log_limit_bytes: int = Field(default=64 << 20, ge=0)
    """A shard of a delta above this size is written to the object store, as one object, and not to the log."""

    on_device: bool = True
    """Compare and encode tensors on the GPU: only changed elements, and small tensors, are copied to the CPU. The GPU
    also holds the previous version and the trainer's copy of the next: 4 bytes per parameter of the rank in bf16.
    Off: both are in the CPU's memory, and each tensor is copied there whole."""

    shards: int = Field(default=1, ge=1)
    """Number of shards into which each rank splits a delta; each shard is a sequence of chunks in one partition."""

    anchor_every: int = Field(default=20, ge=1)
    """An anchor is written at most this many versions after the last one."""

    anchor_bytes_ratio: float = Field(default=1.0, gt=0)
    """An anchor is also written when the deltas since the last one exceed this share of its size. It bounds the
    bytes of deltas that a reader needs after an anchor."""

    anchor_file_bytes: int = Field(default=5 << 30, ge=1)
    """Bytes of weights in one file of an anchor."""

    skips: tuple[Annotated[int, Field(ge=2)], ...] = (8, 64)
    """Lengths of skip-deltas: with 8, every eighth version also gets a delta from the version eight before it, in the
    object store; only replicas that are behind read it. Each length costs a copy of the weights in memory; 8 and 64
    together need about half as many bytes as the versions' own deltas. Empty: none."""

    skip_backlog: int = Field(default=1, ge=1)
    """Versions that may wait for their skip-deltas while one is encoded; further versions get no skip-delta."""

    skip_bases: Literal["memory", "log"] = "memory"
    """Source of the older weights: a copy of the weights in memory for each length, or an anchor and the deltas after
    it, which needs one copy temporarily."""

    incarnation: str = ""
    """Id of the version numbers that begin with version 0. Empty: a new one. To repeat a run from a copy of its groups
    and rollouts, set its earlier incarnation: their version numbers belong to it."""

    @field_validator("skips")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"skips {list(value)}: name each length once")
        return tuple(sorted(value))
