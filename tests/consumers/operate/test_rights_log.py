"""Users' requests on a real Kafka: an erasure killed at any write is finished by the next run, and no data remains."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)
from typer.testing import CliRunner

from tests.consumers.product_support import SECOND, ProductLog, feedback, interaction, outcome, use
from tests.consumers.sink_support import START_US
from tidemill.compose.cli import app
from tidemill.consumers.operate.rights.erase import erase, read_consent_status
from tidemill.consumers.operate.rights.records import SWEPT, choose
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import Pseudonyms
from tidemill.schemas.catalogue import Names, Topic, user_request_key
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer, send_dead_letter
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Tick, UserRequest, UserWish
from tidemill.schemas.stored_object import store_claim

PARTITIONS = 2
DEADLINE_S = 120.0
WRITES = 1 + PARTITIONS + 1 + 6
"""Writes of the erasure of one `person`: the request, its copies, and one tombstone for each record."""
KILLS = (0, 1, 2, 6, 9)
"""Numbers of writes after which an erasure is killed, each of another user."""
KILLED = """
import json, os, signal, sys
from tidemill.consumers.operate.rights.erase import erase
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.producer import RecordProducer
kafka, root, kills = json.loads(sys.argv[1])
send, sent = RecordProducer.send_bytes, 0
def dying(self, *arguments, **options):
    global sent
    if sent == at:
        self._producer.flush(100)
        os.kill(os.getpid(), signal.SIGKILL)
    sent += 1
    send(self, *arguments, **options)
RecordProducer.send_bytes = dying
for at in kills:
    if not os.fork():
        erase(KafkaSettings(**kafka), StoreSettings(root=root), f"killed{at}", "tester")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
"""


@pytest.fixture(scope="module")
def settings(kafka: Any) -> KafkaSettings:
    return kafka.fresh(PARTITIONS, (*SWEPT, Topic.USER_REQUESTS))


def person(settings: KafkaSettings, user: str, root: Path, *, at: int = START_US) -> None:
    """Write six records of a user (two interactions, one of them claimed), and one interaction of another user."""
    claim = store_claim(str(root), f"claims/{user}", b"the whole interaction")
    served = [interaction(f"{user}-0", user, served_at=at), interaction(f"{user}-1", user, served_at=at, claim=claim)]
    log = ProductLog(settings, PARTITIONS)
    log.write(*served, outcome(served[0], 1.0, signals=[use("e0")]), outcome(served[1], None, "no_signal"))
    log.write(feedback("e0", f"{user}-0", user, observed_at=at), feedback("e1", f"{user}-1", "judge", observed_at=at))
    log.write(interaction(f"other-of-{user}", "other", served_at=at))


def read(settings: KafkaSettings, *topics: Topic) -> list[ConsumedRecord]:
    """Return the records of some topics; by default, of those that contain data of users or their requests."""
    with LogReader(settings, topics or (*SWEPT, Topic.USER_REQUESTS)) as reader:
        return list(reader.read_to_end(DEADLINE_S))


def live(records: list[ConsumedRecord], user: str) -> list[ConsumedRecord]:
    """Return the records of a user that a new reader still receives after tombstones."""
    newest = {(one.topic, one.partition, one.key): one for one in records if one.topic in SWEPT}
    return [one for one in newest.values() if one.value and user.encode() in (one.key or b"") + one.value]


def wishes(records: list[ConsumedRecord], user: str) -> list[UserRequest]:
    found = [one.record for one in records if one.topic is Topic.USER_REQUESTS]
    return [record for record in found if isinstance(record, UserRequest) and record.user_id == user]


def assert_erased(settings: KafkaSettings, user: str, root: Path) -> None:
    records = read(settings)
    left = live(records, user)
    assert all(isinstance(one.record, UserRequest) for one in left if not (one.key or b"").startswith(b"other-of"))
    copies = sorted((one.topic.value, one.partition) for one in left if isinstance(one.record, UserRequest))
    assert copies == [*(("interactions", p) for p in range(PARTITIONS)), ("outcomes", 0)]
    assert len({one.record for one in left if isinstance(one.record, UserRequest)}) == 1
    assert len(wishes(records, user)) == 1
    assert f"other-of-{user}".encode() in {one.key for one in left}
    assert not (root / "claims" / user).exists()


def test_an_erasure_deletes_all_records_of_the_user_and_no_others(settings: KafkaSettings, tmp_path: Path):
    person(settings, "ann", tmp_path)
    done = erase(settings, StoreSettings(root=str(tmp_path)), "ann", "tester")
    assert done.tombstones == {"interactions": 2, "outcomes": 2, "feedback": 2} == done.found
    assert (done.carried_on, done.left, done.claims.deleted) == (False, {}, 1)
    assert_erased(settings, "ann", tmp_path)
    again = erase(settings, StoreSettings(root=str(tmp_path)), "ann", "tester")
    assert (again.carried_on, again.request, again.tombstones) == (True, done.request, {})
    assert_erased(settings, "ann", tmp_path)


def test_feedback_on_an_interaction_that_was_written_during_the_reading_is_erased_too(
    settings: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    person(settings, "late", tmp_path)
    log, read_to_end, written = ProductLog(settings, PARTITIONS), LogReader.read_to_end, []

    def written_meanwhile(reader: LogReader, *arguments: Any) -> Iterator[ConsumedRecord]:
        """Let another user judge a new answer after the interactions were read, and before the feedback is."""
        if {topic for topic, _ in reader.next_offsets()} == {Topic.FEEDBACK} and not written:
            written.append(interaction("late-2", "late", served_at=START_US))
            log.write(written[0], feedback("e2", "late-2", "judge", observed_at=START_US))
        return read_to_end(reader, *arguments)

    monkeypatch.setattr(LogReader, "read_to_end", written_meanwhile)
    done = erase(settings, StoreSettings(root=str(tmp_path)), "late", "tester")
    assert (done.tombstones, done.left) == ({"interactions": 3, "outcomes": 2, "feedback": 3}, {})
    assert_erased(settings, "late", tmp_path)


def test_interactions_are_deleted_last_since_they_lead_to_the_rest(
    settings: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    person(settings, "ordered", tmp_path)
    send, buried = RecordProducer.send_bytes, []

    def watched(self: RecordProducer, topic: str, value: bytes | None, **options: Any) -> None:
        if value is None:
            buried.append((topic.rpartition(".")[2], (tmp_path / "claims" / "ordered").exists()))
        send(self, topic, value, **options)

    monkeypatch.setattr(RecordProducer, "send_bytes", watched)
    erase(settings, StoreSettings(root=str(tmp_path)), "ordered", "tester")
    assert {topic for topic, _ in buried[:4]} == {"outcomes", "feedback"}
    assert buried[4:] == [("interactions", False)] * 2


@pytest.fixture(scope="module")
def killed(settings: KafkaSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store, after the erasures that were killed."""
    root = tmp_path_factory.mktemp("store")
    for writes in KILLS:
        person(settings, f"killed{writes}", root)
    arguments = json.dumps([settings.model_dump(), str(root), KILLS])
    subprocess.run([sys.executable, "-c", KILLED, arguments], timeout=DEADLINE_S, check=True)
    return root


@pytest.mark.parametrize("writes", KILLS)
def test_killed_at_any_write_it_is_finished_by_the_next_run(settings: KafkaSettings, killed: Path, writes: int):
    user = f"killed{writes}"
    assert len(wishes(read(settings, Topic.USER_REQUESTS), user)) == min(writes, 1)
    done = erase(settings, StoreSettings(root=str(killed)), user, "tester")
    assert done.carried_on is (writes > 0)
    assert sum(done.tombstones.values()) == WRITES - max(writes, 4)
    assert_erased(settings, user, killed)


def test_a_user_who_returned_makes_a_new_erasure_request(settings: KafkaSettings, tmp_path: Path):
    person(settings, "back", tmp_path)
    store = StoreSettings(root=str(tmp_path))
    first = erase(settings, store, "back", "tester")
    person(settings, "back", tmp_path, at=now_us())
    second = erase(settings, store, "back", "tester")
    assert not second.carried_on
    assert first.request != second.request
    assert sum(second.tombstones.values()) == 6
    assert wishes(read(settings, Topic.USER_REQUESTS), "back") == [first.request, second.request]


def test_a_dry_run_and_an_unknown_user_write_nothing(settings: KafkaSettings, tmp_path: Path):
    person(settings, "dry", tmp_path)
    store = StoreSettings(root=str(tmp_path))
    done = erase(settings, store, "dry", "tester", dry_run=True)
    assert (done.request, done.found) == (None, {"interactions": 2, "outcomes": 2, "feedback": 2})
    records = read(settings)
    assert len([one for one in live(records, "dry") if not (one.key or b"").startswith(b"other")]) == 6
    with pytest.raises(ValueError, match="nothing was written"):
        erase(settings, store, "nobody", "tester")
    assert wishes(records, "dry") == wishes(read(settings, Topic.USER_REQUESTS), "nobody") == []


def test_a_users_dead_letters_are_reported_with_their_expiry_time(settings: KafkaSettings, tmp_path: Path):
    person(settings, "dead", tmp_path)
    names, began_ms = Names(settings.topic_prefix), int(time.time() * 1000)
    with RecordProducer(settings, "test-letters") as producer:
        for key, value in ((b"dead-0/e9", b"broken"), (b"elsewhere", b"broken"), (b"\xff\xfe", b"broken")):
            letter = ConsumedRecord(Topic.FEEDBACK, 0, 0, START_US // 1000, key, value, None, "unknown framing")
            send_dead_letter(producer, names, letter, "unknown framing", "test")
    found = read_consent_status(settings, "dead")
    assert found["dead_letters"].counts == {names.of(Topic.FEEDBACK): 1}
    assert found["dead_letters"].gone_at_ms is not None
    # The dead letters' retention counts from the time when they were written, even if the record is older.
    assert began_ms <= found["dead_letters"].gone_at_ms - 90 * 86_400_000 <= time.time() * 1000


def test_choices_are_copied_into_every_partition_and_made_once(settings: KafkaSettings):
    out = choose(settings, "chooser", UserWish.OPT_OUT, "tester", START_US)
    assert (out["carried_on"], out["copies"]) == (False, PARTITIONS + 1)
    assert choose(settings, "chooser", UserWish.OPT_OUT, "tester", START_US + SECOND)["carried_on"]
    back = choose(settings, "chooser", UserWish.OPT_IN, "tester", START_US + 2 * SECOND)
    records = read(settings)
    assert [one.wish for one in wishes(records, "chooser")] == [UserWish.OPT_OUT, UserWish.OPT_IN]
    copies = [one for one in records if one.topic in SWEPT and one.record == back["request"]]
    assert {(one.topic, one.partition, one.key) for one in copies} == {
        (topic, p, user_request_key("chooser", p).encode())
        for topic, p in [*((Topic.INTERACTIONS, p) for p in range(PARTITIONS)), (Topic.OUTCOMES, 0)]
    }


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch, settings: KafkaSettings, tmp_path: Path) -> ProductSettings:
    made = ProductSettings.with_random_keys()
    monkeypatch.chdir(tmp_path)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIDEMILL_KAFKA__BOOTSTRAP", settings.bootstrap)
    monkeypatch.setenv("TIDEMILL_KAFKA__TOPIC_PREFIX", settings.topic_prefix)
    monkeypatch.setenv("TIDEMILL_STORE__ROOT", str(tmp_path))
    return made


def test_the_commands_take_the_products_id_and_print_json(
    settings: KafkaSettings, product: ProductSettings, tmp_path: Path
):
    pseudonym = Pseudonyms(product).of("4711")
    person(settings, pseudonym, tmp_path)
    run = CliRunner().invoke
    shown = json.loads(run(app, ["users", "show", "4711", "--json"]).stdout)
    assert shown["held"] == {"interactions": 2, "outcomes": 2, "feedback": 2}
    assert "no requests" in run(app, ["users", "show", pseudonym, "--pseudonym"]).stdout
    assert run(app, ["users", "opt-out", "4711", "--by", "4711"]).exit_code == 0
    assert "dry run" in run(app, ["users", "erase", "4711", "--by", "dpo", "--dry-run"]).stdout
    done = run(app, ["users", "erase", "4711", "--by", "dpo", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["request"]["requested_by"] == "dpo"
    assert told["tombstones"] == {"interactions": 2, "outcomes": 2, "feedback": 2}
    assert json.loads(run(app, ["users", "show", "4711", "--json"]).stdout)["held"] == {}
    assert isinstance(run(app, ["users", "erase", "", "--by", "dpo"]).exception, ValueError)
    assert isinstance(run(app, ["users", "erase", "x" * 600, "--by", "dpo"]).exception, ValueError)
    assert "nothing was written" in str(run(app, ["users", "erase", "never-seen", "--by", "dpo"]).exception)


@pytest.fixture
def eager_cleaner(settings: KafkaSettings) -> Iterator[None]:
    """Configure the broker to compact at once and to check often."""
    admin = admin_client(settings)
    brokers = [str(number) for number in admin.list_topics(timeout=60).brokers]
    names = Names(settings.topic_prefix)
    for broker in brokers:
        _alter(admin, ResourceType.BROKER, broker, {"log.cleaner.backoff.ms": "100"})
    eager = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.0", "max.compaction.lag.ms": "100"}
    for topic in SWEPT:
        _alter(admin, ResourceType.TOPIC, names.of(topic), eager)
    yield
    for broker in brokers:
        _alter(admin, ResourceType.BROKER, broker, {"log.cleaner.backoff.ms": None})


def _alter(admin: Any, kind: ResourceType, name: str, values: Mapping[str, str | None]) -> None:
    resource = ConfigResource(kind, name)
    for option, value in values.items():
        what = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        resource.add_incremental_config(ConfigEntry(option, value, incremental_operation=what))
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(60)


def test_after_compaction_no_byte_of_the_user_is_read(settings: KafkaSettings, eager_cleaner: None, tmp_path: Path):
    person(settings, "compacted", tmp_path)
    erase(settings, StoreSettings(root=str(tmp_path)), "compacted", "tester")
    deadline = time.monotonic() + DEADLINE_S
    while left := [one for one in read(settings, *SWEPT) if holds(one, b"compacted")]:
        assert time.monotonic() < deadline, [(one.topic, one.partition, one.offset) for one in left]
        # Only closed segments are compacted, and a segment is closed by a record with a later time.
        with RecordProducer(settings, "test-ticks") as producer:
            for topic in SWEPT:
                for partition in range(1 if topic is Topic.OUTCOMES else PARTITIONS):
                    producer.send(topic, Tick("test", now_us()), key=f"tick{partition}", partition=partition)
        time.sleep(0.2)
    assert b"other-of-compacted" in {one.key for one in read(settings, Topic.INTERACTIONS)}


def holds(one: ConsumedRecord, name: bytes) -> bool:
    """Whether a record holds data of a user: copies of their request and other users' interactions do not."""
    theirs = isinstance(one.record, UserRequest) or (one.key or b"").startswith(b"other-of")
    return not theirs and one.value is not None and name in (one.key or b"") + one.value
