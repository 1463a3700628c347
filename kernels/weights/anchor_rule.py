"""When an anchor is due."""

from __future__ import annotations

from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import SinceAnchor


def anchor_due(since: SinceAnchor, delta_bytes: int, settings: PublishSettings) -> bool:
    """Whether the next version, with a delta of `delta_bytes`, gets an anchor: by count or by bytes, what comes first.

    The bytes are those that a reader who starts at the last anchor would read beside it to reach the next version.
    """
    if since.versions + 1 >= settings.anchor_every:
        return True
    return since.delta_bytes + delta_bytes > settings.anchor_bytes_ratio * since.anchor_bytes
