"""Fixtures that every folder's tests share: a real Kafka, and names of their own on it."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings

from tests.secured_log import SecuredLog, secured_log
from tidemill.compose.processes import ChildGuard
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import create_topics

# How long an example takes says more about what else this machine does than about the code.
settings.register_profile("tidemill", deadline=None)
settings.load_profile("tidemill")

# Until all modules of tests are imported: to look for garbage meanwhile takes a third of the time.
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported: processes beside each other that each take every core wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

EXTERNAL = "TIDEMILL_KAFKA__BOOTSTRAP"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Look for garbage from here on."""
    gc.enable()


@dataclass(frozen=True, slots=True)
class Kafka:
    """A running Kafka."""

    bootstrap: str

    def fresh(self, partitions: int = 2) -> KafkaSettings:
        """Topics that no other test uses. Each partition costs the broker time."""
        made = KafkaSettings(bootstrap=self.bootstrap, topic_prefix=a_prefix(), partitions=partitions)
        create_topics(made)
        return made


def a_prefix() -> str:
    """A topic prefix that no other test uses, so that tests share a broker."""
    return f"t{uuid.uuid4().hex[:12]}."


@pytest.fixture(scope="session")
def broker() -> None:
    """Say that a test starts a broker: the fast lane (tests/fast_lane.py) leaves it out."""


@pytest.fixture(scope="session")
def vllm() -> None:
    """Say that a test starts or imports vLLM: the fast lane leaves it out."""


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, broker: None) -> Iterator[Kafka]:
    """The Kafka of TIDEMILL_KAFKA__BOOTSTRAP, or one broker of the local stack for the length of the session."""
    external = os.environ.get(EXTERNAL)
    if external:
        yield Kafka(external)
        return
    directory = tmp_path_factory.mktemp("stack")
    stack = LocalStack(StackSettings(data_dir=directory, heap_mb=320))
    # The guard stops the broker of a test run that is killed.
    with ChildGuard(directory):
        try:
            yield Kafka(stack.up(print).bootstrap)
        finally:
            # A client that a test let go of lives until it is collected, and would complain of the broker that goes.
            gc.collect()
            stack.down(print)


@pytest.fixture
def topic_prefix() -> str:
    """A topic prefix of the test's own."""
    return a_prefix()


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory, broker: None) -> Iterator[SecuredLog]:
    """A broker that asks for TLS and SASL, for the length of the session."""
    with secured_log(tmp_path_factory.mktemp("secured")) as log:
        yield log
        gc.collect()
