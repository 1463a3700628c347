"""Segments: token sequences as the log records them, and the claim check for records that hold many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tidemill.producers.sampling.completion import Completion
from tidemill.schemas.chat.contexts import Context, SampledTurn
from tidemill.schemas.codec import Codec
from tidemill.schemas.expert_ids import packed_ids, unpacked_ids
from tidemill.schemas.records import Claim, Interaction, Record, Rollout, Segment, VersionSpan
from tidemill.schemas.stored_object import digest, store_claim

OVERHEAD_BYTES = 4096
"""More than the fields of a rollout or an interaction beside its segments take."""
SPAN_BYTES = 30
"""More than one version span takes."""


def build_segment(ids: Sequence[int], turns: Iterable[SampledTurn[Completion]]) -> Segment:
    """The segment of a context.

    Its mask is 1 on the tokens of `turns`, which are in order; spans cover exactly those, and neighbours of one version
    are one span.
    """
    mask, logprobs = np.zeros(len(ids), "u1"), np.zeros(len(ids), "<f4")
    spans: list[VersionSpan] = []
    for turn in turns:
        mask[turn.start : turn.end] = 1
        logprobs[turn.start : turn.end] = turn.made.logprobs
        for span in turn.made.spans:
            begun = VersionSpan(span.version, span.start + turn.start, span.end + turn.start)
            last = spans[-1] if spans else None
            if last is not None and (last.version, last.end) == (begun.version, begun.start):
                begun = VersionSpan(last.version, spans.pop().start, begun.end)
            spans.append(begun)
    return Segment(
        n_tokens=len(ids),
        token_ids=np.asarray(ids, dtype="<u4").tobytes(),
        loss_mask=mask.tobytes(),
        logprobs=logprobs.tobytes(),
        spans=spans,
    )


def build_expert_ids(contexts: Iterable[Context[Completion]]) -> bytes:
    """The expert ids of the segments of contexts, packed; empty where those of a token are not known.

    A token has the ids of the first answer that said them: a later one may have computed it anew, for a newer version.
    """
    parts = []
    for context in contexts:
        known = 0
        for turn in context.turns:
            if not turn.made.expert_ids:
                return b""
            ids = unpacked_ids(turn.made.expert_ids)
            first = turn.end - 1 - len(ids)
            if first > known:
                return b""
            parts.append(ids[known - first :])
            known = turn.end - 1
    if len({(ids.shape[1:], ids.dtype) for ids in parts}) != 1:
        return b""
    return packed_ids(np.concatenate(parts))


class SegmentClaims:
    """Leaves the bytes of a record that is too large for the log in the object store.

    What holds: the claimed bytes are the whole record, encoded as on the log, so that `schemas.stored_object` gives it
    back as it was; their name is their digest, so that a repeated store is the same object.
    """

    def __init__(self, root: str, run_id: str, limit_bytes: int, codec: Codec) -> None:
        self._root = f"{root.rstrip('/')}/{run_id}/claims"
        self._limit_bytes, self._codec = limit_bytes, codec

    def keep(self, payload: bytes) -> Claim:
        """Store bytes that a record refers to beside its segments."""
        return store_claim(self._root, digest(payload), payload)

    def checked(self, record: Record) -> Record:
        """The record as it goes to the log: itself, or without segments and with a claim."""
        if not isinstance(record, Rollout | Interaction):
            return record
        arrays = sum(len(s.token_ids) + len(s.loss_mask) + len(s.logprobs) for s in record.segments)
        spans = sum(len(segment.spans) for segment in record.segments)
        if OVERHEAD_BYTES + arrays + SPAN_BYTES * spans <= self._limit_bytes:
            return record
        payload = self._codec.encode(record)
        no_segments: list[Segment] = []
        return replace(record, segments=no_segments, claim=self.keep(payload))
