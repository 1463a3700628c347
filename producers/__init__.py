"""The processes that write new data to the log: feedback SDK and gateway, router, task feeder, rollout workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidemill.producers.feedback import AsyncFeedbackProducer, FeedbackProducer

__all__ = ["AsyncFeedbackProducer", "FeedbackProducer"]


def __getattr__(name: str) -> object:
    """Import the SDK at the first use, so that the other producers do not spend time on it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidemill.producers import feedback

    return getattr(feedback, name)
