"""Learning from users with a real log: fetching interactions, stopping at any point, and roll-backs by the gate."""

import threading
import time
from dataclasses import replace

import pytest
from confluent_kafka import Producer

from tests.documents import delete, wait_for_ends
from tests.trainer.conftest import make_interaction, make_online_member, settings_of
from tests.trainer.run_log import Killed, decide, erase, run_of, serve, write_groups, written
from tests.waiting import until
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.publish import WeightPublisher
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, StoreSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import SILENCE_S
from tidemill.schemas.records import Exclusion, GateVerdict, Manifest, TrainStep
from tidemill.schemas.stored_object import store_claim
from tidemill.trainer.checkpoint import CheckpointStore
from tidemill.trainer.config import KlSettings, OnlineSettings, TrainerSettings
from tidemill.trainer.history import NotRepeatableError
from tidemill.trainer.online_input import InteractionLog
from tidemill.trainer.online_queue import OnlineQueue
from tidemill.trainer.run import run

DEADLINE_S = 180.0


@pytest.fixture(scope="module")
def log(kafka) -> KafkaSettings:
    """Topics that the tests of the module share; each test has its own run in them."""
    return kafka.fresh()


@pytest.fixture
def store(tmp_path) -> StoreSettings:
    return StoreSettings(root=str(tmp_path / "store"))


@pytest.fixture
def settings(tiny_checkpoint: str) -> TrainerSettings:
    return settings_of(
        model=tiny_checkpoint,
        kl=KlSettings(coefficient=0.01),
        checkpoint_every=3,
        publish=PublishSettings(anchor_every=20, skips=()),
        online=OnlineSettings(
            enabled=True, require_admission=False, simulated_groups_per_batch=1, max_wait_seconds=0.2
        ),
    )


def reasons(step: TrainStep) -> dict[str, str]:
    return {entry.group_id: entry.reason for entry in step.exclusions}


class Trainer:
    """The trainer role in a thread; it is stopped as by a signal."""

    def __init__(self, log, settings, store, run_id: str, max_steps: int = 100) -> None:
        self._stop, self.error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, args=(log, run_of(run_id, max_steps), store, settings))
        self._log, self._run_id = log, run_id

    def _run(self, log, of, store, settings) -> None:
        try:
            run(log, of, store, settings, self._stop)
        except Exception as error:  # noqa: BLE001 - the test asks for it
            self.error = error

    def wait(self, steps: int) -> list[TrainStep]:
        """Wait until there are this many recorded steps and their versions are published; return the steps."""

        def published() -> list[TrainStep]:
            assert self.error is None, self.error
            found = written(self._log, TrainStep, self._run_id)
            return found if len(found) >= steps and len(written(self._log, Manifest, self._run_id)) > steps else []

        return until(published, f"{steps} steps", DEADLINE_S, pause_s=0.1)

    def ended(self) -> Exception | None:
        """Wait until the trainer ends by itself, and return its error."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.error

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_rest: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def test_records_at_the_positions_of_members_are_fetched_and_checked(log, tmp_path) -> None:
    producer, codec = RecordProducer(log, "test"), Codec()
    plain, claimed, gone, broken, misread = (make_interaction(name) for name in ("a", "b", "c", "d", "e"))
    kept = [
        plain,
        replace(claimed, segments=[], claim=store_claim(str(tmp_path), "b", codec.encode(claimed))),
        replace(gone, segments=[], claim=replace(store_claim(str(tmp_path), "c", b"x"), uri=str(tmp_path / "none"))),
        replace(broken, segments=[replace(broken.segments[0], spans=[])]),
        replace(misread, version_min=-1),
    ]
    places = producer.send_acked(Topic.INTERACTIONS, [(r.interaction_id, r) for r in kept])
    members = [make_online_member(r, 1.0, p.offset, p.partition) for r, p in zip(kept, places, strict=True)]
    other = replace(members[0], interaction_id="z")
    beyond = [replace(members[0], offset=10_000), replace(members[0], partition=77), replace(members[0], offset=-1)]
    fetched = InteractionLog(log, vocab_size=64)
    found = fetched.fetch([*members, *beyond])
    assert [found[Position.of(m)] for m in members] == [
        plain,
        claimed,
        Exclusion.MISSING_INTERACTION,
        Exclusion.INVALID_INTERACTION,
        Exclusion.INVALID_INTERACTION,
    ]
    assert {found[Position.of(m)] for m in beyond} == {Exclusion.MISSING_INTERACTION}
    assert set(fetched.fetch([other]).values()) == {Exclusion.INVALID_INTERACTION}
    assert set(fetched.fetch([replace(members[0], topic="rollouts")]).values()) == {Exclusion.INVALID_INTERACTION}
    assert fetched.fetch([]) == {}
    fetched.close()


def test_a_gap_in_the_log_is_a_missing_interaction_without_waiting(kafka) -> None:
    """The offset of a transaction's end contains no record, like that of a compacted record; retention deleted the
    records before the low watermark."""
    log = kafka.fresh(1, [Topic.INTERACTIONS])
    record, full = make_interaction("a"), Names(log.topic_prefix).of(Topic.INTERACTIONS)
    writer = Producer({"bootstrap.servers": log.bootstrap, "transactional.id": full})
    writer.init_transactions(DEADLINE_S)
    for _ in range(2):
        writer.begin_transaction()
        writer.produce(full, Codec().encode(record), key=b"a", partition=0)
        writer.commit_transaction(DEADLINE_S)
    wait_for_ends(log, Topic.INTERACTIONS)
    fetched = InteractionLog(log, vocab_size=64)
    members = [make_online_member(record, 1.0, offset) for offset in range(4)]
    started = time.monotonic()
    missing = Exclusion.MISSING_INTERACTION
    assert list(fetched.fetch(members).values()) == [record, missing, record, missing]
    delete(log, 2, topic=Topic.INTERACTIONS)
    assert list(fetched.fetch(members).values()) == [missing, missing, record, missing]
    assert time.monotonic() - started < SILENCE_S, "the broker's end is told from a pause"
    fetched.close()


def test_a_run_learns_from_users_with_every_batch_ended_once(log, run_id, settings, store) -> None:
    producer = RecordProducer(log, "test")
    write_groups(log, [0], [run_id])
    erase(log, "user-b0-1")
    first = serve(log, "b0", 0, run_id=run_id)
    producer.send_acked(Topic.ONLINE_BATCHES, [("b0", first)])
    serve(log, "late", 0, closed_at=1, run_id=run_id)
    serve(log, "flat", 1, rewards=(0.5, 0.5), closed_at=2, run_id=run_id)
    serve(log, "foreign", 0, run_id="other")
    producer.send_bytes(Names(log.topic_prefix).of(Topic.ONLINE_BATCHES), b"no batch", key=b"x")
    # The first step waits for its simulated group however long reading it takes; for the second step there is none.
    patient = settings.online.model_copy(update={"max_wait_seconds": DEADLINE_S})
    with Trainer(log, settings.model_copy(update={"online": patient}), store, run_id, max_steps=1) as trainer:
        trainer.wait(1)
    with Trainer(log, settings, store, run_id) as trainer:
        serve(log, "b1", 1, closed_at=3, run_id=run_id)
        one, two = trainer.wait(2)
    assert [(entry.topic, entry.group_id) for entry in one.inputs] == [("online-batches", "b0"), ("groups", "g0")]
    assert reasons(one) == {"b0": "duplicate", "b0-1": "erased"}
    assert one.objective == "reinforce+composer2"
    assert (one.metrics["online/members"], one.metrics["simulated/groups"]) == (3, 1)
    assert one.rollouts == 7
    assert [entry.group_id for entry in two.inputs] == ["b1"]
    assert reasons(two) == {"late": "stale", "flat": "no_signal"}
    assert (two.objective, two.parent_version) == ("reinforce", 1)


def test_no_batch_is_trained_until_a_version_is_admitted(log, run_id, settings, store, monkeypatch) -> None:
    floored = settings.model_copy(update={"online": settings.online.model_copy(update={"require_admission": True})})
    exclude, excluded = OnlineQueue.exclude, threading.Event()

    def observed(*arguments) -> None:
        exclude(*arguments)
        excluded.set()

    monkeypatch.setattr(OnlineQueue, "exclude", observed)
    serve(log, "below", 0, run_id=run_id)
    with Trainer(log, floored, store, run_id, max_steps=1) as trainer:
        assert excluded.wait(DEADLINE_S)
        assert written(log, TrainStep, run_id) == []
        decide(log, GateVerdict.ADMIT, 0, run_id)
        serve(log, "above", 0, closed_at=1, run_id=run_id)
        (step,) = trainer.wait(1)
    assert (reasons(step), [entry.group_id for entry in step.inputs]) == ({"below": "below_floor"}, ["above"])


def test_a_step_that_stopped_before_its_manifest_is_repeated_bit_for_bit(log, settings, store, monkeypatch) -> None:
    """The batches have an erased user and a gap: the repeated step excludes the same interactions as the first one."""
    erase(log, "user-s0-1")
    for run_id in ("straight", "stopped"):
        for number in range(3):
            serve(log, f"s{number}", number, run_id=run_id, closed_at=number)
    with Trainer(log, settings, store, "straight", max_steps=3) as trainer:
        straight = trainer.wait(3)

    def crash(self, version, tensors, **options):
        if version > 1:
            raise Killed
        return publish(self, version, tensors, **options)

    publish = WeightPublisher.publish
    with monkeypatch.context() as patched:
        patched.setattr(WeightPublisher, "publish", crash)
        with Trainer(log, settings, store, "stopped") as trainer:
            assert isinstance(trainer.ended(), Killed)
    assert [m.version for m in written(log, Manifest, "stopped")] == [0, 1]
    assert CheckpointStore(store.root, "stopped", "main", 3).steps() == [], "it begins from the model again"
    # The request comes after the step was recorded: that step is kept, later interactions are excluded.
    erase(log, "user-s1-0")
    with Trainer(log, settings, store, "stopped", max_steps=3) as trainer:
        stopped = trainer.wait(3)
    assert trainer.error is None
    assert [s.fingerprint for s in stopped] == [s.fingerprint for s in straight]
    assert len({s.fingerprint for s in straight}) == 3
    assert [entry.group_id for s in stopped for entry in s.inputs] == ["s0", "s1", "s2"]
    assert reasons(stopped[0]) == {"s0-1": "erased"}
    versions = [(m.version, m.fingerprint) for m in written(log, Manifest, "stopped")]
    assert versions == [(m.version, m.fingerprint) for m in written(log, Manifest, "straight")]


def test_a_step_whose_interactions_are_deleted_is_not_repeated_without_them(
    log, run_id, settings, store, monkeypatch
) -> None:
    batch = serve(log, "deleted", 0, run_id=run_id)

    def crash(*_args: object):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("tidemill.trainer.session.Session._finish", crash)
        with Trainer(log, settings, store, run_id) as trainer:
            assert isinstance(trainer.ended(), Killed)
    member = batch.members[0]
    delete(log, member.offset + 1, member.partition, Topic.INTERACTIONS)
    with Trainer(log, settings, store, run_id) as trainer:
        error = trainer.ended()
    assert isinstance(error, NotRepeatableError) and "erased" in str(error)


def test_training_goes_back_when_the_gate_rejects_a_version(log, run_id, settings, store) -> None:
    """Versions 1 to 3 are made, 2 is promoted, 3 is rejected: step 4 starts from version 2, with its moments."""
    for number in range(3):
        serve(log, f"c{number}", number, closed_at=number, run_id=run_id)
    with Trainer(log, settings, store, run_id, max_steps=5) as trainer:
        trainer.wait(3)
        decide(log, GateVerdict.PROMOTE, 2, run_id)
        decide(log, GateVerdict.REJECT, 3, run_id)
        serve(log, "rejected", 3, closed_at=10, run_id=run_id)
        serve(log, "again", 2, closed_at=11, run_id=run_id)
        trainer.wait(4)
    # A restarted trainer, which knows everything from the log only, makes the next step.
    with Trainer(log, settings, store, run_id, max_steps=5) as trainer:
        serve(log, "after", 4, closed_at=12, run_id=run_id)
        steps = trainer.wait(5)
    assert trainer.error is None
    assert [s.parent_version for s in steps] == [0, 1, 2, 2, 4]
    assert steps[3].parent_fingerprint == steps[1].fingerprint
    assert reasons(steps[3]) == {"rejected": "rejected_version"}
    assert steps[4].parent_fingerprint == steps[3].fingerprint
    manifests = written(log, Manifest, run_id)
    assert [(m.version, m.parent) for m in manifests] == [(0, None), (1, 0), (2, 1), (3, 2), (4, 2), (5, 4)]
    assert [m.fingerprint for m in manifests[1:]] == [s.fingerprint for s in steps]
    # From only the log and the starting model, every step is reproduced, including the fork.
    for saved in (checkpoints := CheckpointStore(store.root, run_id, "main", 3)).steps():
        checkpoints._filesystem.rm(checkpoints._path(saved))
    with Trainer(log, settings, store, run_id, max_steps=5) as trainer:
        assert trainer.ended() is None
    assert written(log, TrainStep, run_id) == steps
