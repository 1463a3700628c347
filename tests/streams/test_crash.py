"""SIGKILL of Faust's group assembly worker, several times during its work: no group is corrupted, lost or changed.

The control is a naive worker under the same kills. It must fail; otherwise the test would prove nothing.
test_transactional.py kills the transactional runner at each step of a transaction.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from stream_support import ASSEMBLY, fresh_topics, kill_through, rollout, stream_process

from tests.conftest import a_prefix
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, Rollout

GROUPS = 400
GROUP_SIZE = 8
KILL_AT = (100, 250)
"""Kill the worker when this many distinct groups were read from the log."""
STREAM = {"max_batch": 20, "instance": "one", "stall_timeout_s": 0, "commit_interval_s": 1.0}
"""Small batches, for many batches between two kills; a static member, so a restart does not wait for the old one."""


def interleaved(seed: int, duplicates: float) -> Iterator[Rollout]:
    """Yield all rollouts of all groups, neighbours mixed, and a share of them a second time shortly after."""
    chance = random.Random(seed)
    order = [(g + chance.uniform(0, 40), g, i) for g in range(GROUPS) for i in range(GROUP_SIZE)]
    order += [(at + chance.uniform(0, 80), g, i) for at, g, i in order if chance.random() < duplicates]
    for _, group, index in sorted(order):
        yield rollout(f"g{group}", index, group_size=GROUP_SIZE, reward=float(index))


def fill(kafka: KafkaSettings, duplicates: float) -> None:
    producer = RecordProducer(kafka, "test")
    for record in interleaved(7, duplicates):
        producer.send(Topic.ROLLOUTS, record, key=record.group_id)
    producer.flush()


@pytest.mark.timeout(900)
def test_killed_worker_loses_and_corrupts_nothing(kafka, topic_prefix, tmp_path: Path):
    settings = fresh_topics(kafka.bootstrap, topic_prefix, 4, ASSEMBLY)
    fill(settings, duplicates=0.1)
    with LogReader(settings, [Topic.GROUPS]) as groups, stream_process(settings, tmp_path, **STREAM) as worker:
        found = kill_through(groups, worker, KILL_AT, GROUPS)
        assert worker.stop() == 0
        found += list(groups.read_to_end())
    contents: dict[str, set[bytes]] = {}
    for located in found:
        assert isinstance(located.record, Group)
        contents.setdefault(located.record.group_id, set()).add(located.value or b"")
    assert len(contents) == GROUPS
    assert {len(values) for values in contents.values()} == {1}, "a repeated group must be the same bytes"
    for located in found:
        expected = [f"{located.record.group_id}/{i:03d}" for i in range(GROUP_SIZE)]
        assert [m.rollout_id for m in located.record.members] == expected
    print(f"{len(KILL_AT)} kills, {len(found) - GROUPS} groups written again, all identical")


@pytest.mark.timeout(900)
def test_naive_control_is_corrupted_by_the_same_kills(kafka, tmp_path: Path):
    # A slow machine may run this process so late that the worker has nothing in hand at the kills.
    for number in range(4):
        settings = fresh_topics(kafka.bootstrap, a_prefix(), 4, ASSEMBLY)
        fill(settings, duplicates=0.0)
        with (
            LogReader(settings, [Topic.GROUPS]) as groups,
            stream_process(settings, tmp_path / str(number), command=["naive_worker"], **STREAM) as worker,
        ):
            found = kill_through(groups, worker, KILL_AT, KILL_AT[-1] + 100)
        corrupt = [m for m in (json.loads(f.value or b"") for f in found) if max(Counter(m).values()) > 1]
        print(f"{len(KILL_AT)} kills, {len(corrupt)} corrupt groups of {len(found)}")
        if corrupt:
            return
    pytest.fail("no kill corrupted a group: the kills prove nothing")
