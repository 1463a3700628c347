"""The first writers: the feedback SDK and gateway, the router, the task feeder, the rollout workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.producers.feedback import AsyncFeedbackProducer, FeedbackProducer

__all__ = ["AsyncFeedbackProducer", "FeedbackProducer"]


def __getattr__(name: str) -> object:
    """Load the SDK when it is asked for, so that the other producers do not pay for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidemill.producers import feedback

    return getattr(feedback, name)
