"""The feedback SDK: a product's backend reports signals of its users about the answers that they were served.

From any thread, without waiting for the log:

    from tidemill.producers import FeedbackProducer
    from tidemill.producers.product.settings import ProductSettings

    with FeedbackProducer("kafka:9092", ProductSettings.from_environment()) as feedback:
        vote = feedback.thumbs_up(token, user="ann@example.com")
        feedback.send(token, "edit_kept_soon", 0.8, user="ann@example.com")
        feedback.withdraw(token, vote, user="ann@example.com")

From asyncio, where an awaited signal is in the log:

    import asyncio
    from tidemill.producers import AsyncFeedbackProducer
    from tidemill.producers.product.settings import ProductSettings

    async def main() -> None:
        async with AsyncFeedbackProducer("kafka:9092", ProductSettings.from_environment()) as feedback:
            vote = await feedback.thumbs_down(token, user="ann@example.com")
            await feedback.withdraw(token, vote, user="ann@example.com")

    asyncio.run(main())

`token` is the interaction token that the router returned. The keys that sign it are read from
`TIDEMILL_PRODUCT__SIGNING_KEYS` and `TIDEMILL_PRODUCT__PSEUDONYM_KEY`.
"""

from tidemill.producers.feedback.event import (
    BadFeedback,
    FailedEvent,
    FeedbackNotDelivered,
    FeedbackQueueFull,
    LogUnreachable,
    NotServed,
)
from tidemill.producers.feedback.producer import AsyncFeedbackProducer, FeedbackProducer
from tidemill.producers.feedback.queue import FeedbackCounts

__all__ = [
    "AsyncFeedbackProducer", "BadFeedback", "FailedEvent", "FeedbackCounts", "FeedbackNotDelivered",
    "FeedbackProducer", "FeedbackQueueFull", "LogUnreachable", "NotServed",
]  # fmt: skip
