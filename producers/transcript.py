"""Builds the token record of one episode: what was read, what was sampled, by which weights.

What holds: the context is exactly the tokens appended, in order, and nothing is tokenised again; the mask is 1 on
sampled tokens alone; the spans cover exactly those, in order, and neighbours of one version are one span.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from tidemill.producers.completion import Completion
from tidemill.schemas.records import Segment, VersionSpan


class TranscriptBuilder:
    """Grows one segment. Sampled tokens come as checked `Completion`s."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._mask = bytearray()
        self._logprobs = array("f")
        self._spans: list[VersionSpan] = []

    @property
    def ids(self) -> list[int]:
        """The context so far. The caller must not change it."""
        return self._ids

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self._mask)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Version spans so far, in segment coordinates."""
        return tuple(self._spans)

    def append_prompt(self, ids: Sequence[int]) -> None:
        """Append tokens that pose the task."""
        self._append_read(ids)

    def append_tool(self, ids: Sequence[int]) -> None:
        """Append tool output, up to where the next turn is sampled."""
        self._append_read(ids)

    def append_sampled(self, completion: Completion) -> None:
        """Append a sampled turn, its spans shifted from turn to segment coordinates."""
        start = len(self._ids)
        self._ids.extend(completion.token_ids)
        self._mask.extend(b"\x01" * len(completion.token_ids))
        self._logprobs.extend(completion.logprobs)
        for span in completion.spans:
            self._append_span(VersionSpan(span.version, span.start + start, span.end + start))

    def segment(self) -> Segment:
        """The segment as recorded."""
        return Segment(
            n_tokens=len(self._ids),
            token_ids=np.asarray(self._ids, dtype="<u4").tobytes(),
            loss_mask=bytes(self._mask),
            logprobs=np.asarray(self._logprobs, dtype="<f4").tobytes(),
            spans=list(self._spans),
        )

    def _append_read(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)
        self._mask.extend(bytes(len(ids)))
        self._logprobs.extend([0.0] * len(ids))

    def _append_span(self, span: VersionSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == span.version and last.end == span.start:
            self._spans[-1] = VersionSpan(last.version, last.start, span.end)
        else:
            self._spans.append(span)
