"""Fixtures for the tests of all folders: a real Kafka, and topic prefixes that no other test uses."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.brokers import PLAIN, SECURED, START_S, directory_of_brokers
from tests.secured_log import SecuredLog, secured_log
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log import admin

# The duration of an example depends more on the load than on the code. Each run has the same examples, so that
# a failure is that of the change under test; `pytest --hypothesis-profile random` looks for others.
settings.register_profile("tidemill", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("random", settings.get_profile("tidemill"), derandomize=False)
settings.load_profile("tidemill")

# Off until all test modules are imported: garbage collection would take a third of the import time.
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported. Parallel processes that each use every core wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background with interrupts ignored. The processes that tests start inherit
    # that, and some tests interrupt them.
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXTERNAL = "TIDEMILL_KAFKA__BOOTSTRAP"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Enable garbage collection again after the imports."""
    gc.enable()


@dataclass(frozen=True, slots=True)
class Kafka:
    """A running Kafka."""

    bootstrap: str

    def fresh(self, partitions: int = 2, topics: Iterable[Topic] = Topic, prefix: str = "") -> KafkaSettings:
        """Create topics, with their dead letters, that no other test uses. Each partition costs the broker time."""
        made = KafkaSettings(bootstrap=self.bootstrap, topic_prefix=prefix or a_prefix(), partitions=partitions)
        create_some(made, topics)
        return made


def create_some(kafka: KafkaSettings, topics: Iterable[Topic]) -> None:
    """Create these topics of the catalogue and their dead-letter topics."""
    names = Names(kafka.topic_prefix)
    wanted = {name(topic) for topic in topics for name in (names.of, names.dead_letter)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admin, "REQUEST_TIMEOUT_S", 180.0)  # the broker shares a slow machine with several tests
        admin.create_missing(
            admin.admin_client(kafka), [new for new in admin.wanted_topics(kafka) if new.topic in wanted]
        )


def a_prefix() -> str:
    """Return a topic prefix that no other test uses, so that tests can share a broker."""
    return f"t{uuid.uuid4().hex[:12]}."


@pytest.fixture(scope="session")
def broker() -> None:
    """Mark a test that starts a broker: the fast lane (tests/fast_lane.py) leaves it out."""


@pytest.fixture(scope="session")
def vllm() -> None:
    """Mark a test that starts or imports vLLM: the fast lane leaves it out."""


@pytest.fixture(scope="session")
def brokers(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The directory of the brokers of the test run."""
    of_all_workers = getattr(request.config, "workerinput", {}).get("brokers")
    if of_all_workers:
        yield Path(of_all_workers)
        return
    with directory_of_brokers() as directory:
        yield directory


@pytest.fixture(scope="session")
def kafka(brokers: Path, broker: None) -> Kafka:
    """The Kafka of TIDEMILL_KAFKA__BOOTSTRAP, or one broker of the local stack for the whole test run."""
    # Not imported with this module: the settings of all roles take long.
    from tidemill.compose import options

    # The broker may get no processor for many seconds on a busy machine.
    options.PATIENCE_S = 120.0
    if external := os.environ.get(EXTERNAL):
        return Kafka(external)
    settings = StackSettings(data_dir=brokers / PLAIN, heap_mb=384, start_timeout_s=START_S)
    return Kafka(LocalStack(settings).up(print).bootstrap)


@pytest.fixture
def topic_prefix() -> str:
    """A topic prefix that only this test uses."""
    return a_prefix()


@pytest.fixture(scope="session")
def secured(brokers: Path, broker: None) -> SecuredLog:
    """A broker that requires TLS and SASL, for the whole test run."""
    return secured_log(brokers / SECURED)
