"""The process of the simulated users: opens the product, lets the crowd use it, and tells what they saw."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator

from tidemill.compose.demo.simulated_users.config import UsersSettings
from tidemill.compose.demo.simulated_users.crowd import Crowd, Product, Seen
from tidemill.compose.demo.simulated_users.questions import Question
from tidemill.compose.demo.simulated_users.serving import open_product
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas.config import KafkaSettings

Say = Callable[[Seen], None]
"""Told what the users have seen so far, now and then and once at the end."""


def run(
    kafka: KafkaSettings, product: ProductSettings, settings: UsersSettings, asked: Iterator[Question], say: Say
) -> None:
    """Let users ask `asked` until it ends, or SIGINT or SIGTERM comes.

    Raises:
        NobodyAsks, TaskError: the settings leave nobody, or nothing, to ask.
        KeysMissing: the product's keys are not configured.
        BadAnswer: the router is not Tidemill's.
        FeedbackNotDelivered and the SDK's other errors.
    """
    try:
        asyncio.run(_main(kafka, product, settings, asked, say))
    except ExceptionGroup as group:
        # The first error is the cause; the group around it says nothing to the person at the keyboard.
        raise _first(group) from group


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = group.exceptions[0]
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error


async def _main(
    kafka: KafkaSettings, product: ProductSettings, settings: UsersSettings, asked: Iterator[Question], say: Say
) -> None:
    async with open_product(kafka, product, settings) as opened:
        await simulate(settings, opened, asked, say)


async def simulate(settings: UsersSettings, product: Product, asked: Iterator[Question], say: Say) -> None:
    """Hold the conversations of `asked` with a product until they end, or a signal or the caller ends them."""
    crowd = Crowd(settings, product)
    asking = asyncio.create_task(crowd.ask(asked))
    telling = asyncio.create_task(_tell(crowd, settings.report_every_s, say))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asking.cancel)
    try:
        await asyncio.wait({asking})
    finally:
        asking.cancel()
        telling.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    say(crowd.seen())
    if not asking.cancelled():
        asking.result()


async def _tell(crowd: Crowd, every_s: float, say: Say) -> None:
    while True:
        await asyncio.sleep(every_s)
        say(crowd.seen())
