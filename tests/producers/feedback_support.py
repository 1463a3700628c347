"""Shared by the feedback tests: keys, tokens, reading the topic, and a broker that a test can stall."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pydantic import SecretStr

from tests.brokers import START_S
from tests.conftest import Kafka
from tests.waiting import until
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import Pseudonyms, Signer
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.reader import LogReader

PRODUCT = ProductSettings(signing_keys=(SecretStr("s" * 32),), pseudonym_key=SecretStr("p" * 32))
FORGER = ProductSettings(signing_keys=(SecretStr("f" * 32),), pseudonym_key=SecretStr("p" * 32))
NOWHERE = "127.0.0.1:9"
"""An address at which nothing listens."""
DEADLINE_S = 180.0


def pseudonym(user: str | None = "ann") -> str:
    return Pseudonyms(PRODUCT).of(user)


def token(interaction_id: str = "i-1", user: str | None = "ann", product: ProductSettings = PRODUCT) -> str:
    """Return the interaction token that the router returns to a user."""
    return Signer(product).sign(interaction_id, Pseudonyms(product).of(user))


def written(settings: KafkaSettings) -> list[ConsumedRecord]:
    """Return every feedback record of the topic, in order within each partition."""
    with LogReader(settings, [Topic.FEEDBACK]) as reader:
        return list(reader.read_to_end(DEADLINE_S))


def url_in(log: Path, runs: Callable[[], bool]) -> str:
    """Return the address of a server that chose its own port, from the output of its process."""

    def url() -> str:
        assert runs(), log.read_text("utf-8")
        found = re.search(r"(http://127\.0\.0\.1:\d+)\s", log.read_text("utf-8"))
        return found[1] if found else ""

    return until(url, "the address of the server", DEADLINE_S)


def printed_blocks(module: ModuleType) -> list[str]:
    """Return the indented blocks of a module's docstring."""
    blocks: list[list[str]] = [[]]
    for line in (module.__doc__ or "").splitlines():
        if line.startswith("    ") or (not line.strip() and blocks[-1]):
            blocks[-1].append(line[4:])
        elif blocks[-1]:
            blocks.append([])
    return ["\n".join(block).strip() for block in blocks if block]


@dataclass(frozen=True, slots=True)
class StallingLog:
    """A separate broker. Within `stalled` it does not answer, but its connections stay open."""

    settings: KafkaSettings
    pid: int

    def _stands_still(self) -> bool:
        try:
            states = [stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except OSError:  # A thread has ended since the listing.
            return False
        return set(states) == {"T"}

    @contextmanager
    def stalled(self) -> Iterator[None]:
        os.kill(self.pid, signal.SIGSTOP)
        try:
            # Its threads stop one by one; a thread that still runs may answer.
            until(self._stands_still, "the broker has stopped", DEADLINE_S)
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def stalling_log(directory: Path) -> Iterator[StallingLog]:
    stack = LocalStack(StackSettings(data_dir=directory, heap_mb=256, start_timeout_s=START_S))
    try:
        status = stack.up(print)
        pid = status.nodes[0].pid
        assert pid is not None
        yield StallingLog(Kafka(status.bootstrap).fresh(topics=[Topic.FEEDBACK]), pid)
    finally:
        stack.down(print)
