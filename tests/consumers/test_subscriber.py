"""The subscriber with an engine of plain arrays and a log in memory: damage is refused, never served, and healed later.

`follow` feeds it: it continues to read during an update, sets unusable records aside, and raises errors of its parts.
"""

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.consumers import replica_driver as driver
from tests.consumers.replica_support import FETCH_S, ArrayReplica, base_directory, small_view
from tests.records import build
from tidemill.consumers.replica import staging
from tidemill.consumers.replica.config import ReplicaSettings
from tidemill.consumers.replica.staging import LONGEST_S, Backoff
from tidemill.consumers.replica.state import ReplicaState
from tidemill.consumers.replica.subscriber import ReplicaFault, follow
from tidemill.kernels.weights import delta_shard
from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.kernels.wire import DeltaError
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.records import AckStatus, GateDecision, GateVerdict, SkipDelta, Tick

PROVED, REFUSED, ANCHORED = AckStatus.PROVED, AckStatus.REFUSED, AckStatus.ANCHORED


class Harness(ArrayReplica):
    """A replica that serves version 0 of a small set of tensors, and its trainer."""

    def __init__(self, directory):
        self.view, self.views = small_view(), [small_view()]
        self.base, self.directory, self.log = base_directory(directory / "base"), directory, driver.MemoryLog()
        anchor = driver.save_view(self.view, self.base, directory / "v0")
        super().__init__(driver.publish(self.log, 0, None, self.view, anchor), self.log, directory / "staging")

    def next(self, anchor=False, fraction=0.01, **how):
        """Publish the next version; returns its manifest."""
        version = len(self.views)
        old, self.view = self.view, driver.nudged(self.view, version, fraction)
        self.views.append(self.view)
        where = driver.save_view(self.view, self.base, self.directory / f"v{version}") if anchor else None
        return driver.publish(self.log, version, old, self.view, where, **how)

    def skip(self, base, version):
        """Publish a skip-delta; returns its record."""
        return driver.publish_skip(self.log, version, base, self.views[base], self.views[version])


def decision(verdict, version=None):
    return build(GateDecision, run_id="test", verdict=GateVerdict(verdict), version=version, reason="reward fell")


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path)
    yield made
    made.close()


def test_every_version_is_applied_proved_and_acknowledged(harness):
    for version in range(1, 6):
        manifest = harness.next()
        assert harness.observe(manifest) == [(PROVED, version, version)]
        assert harness.acks[-1].fingerprint == manifest.fingerprint
    assert harness.engine.holds(harness.view)


def test_the_status_reports_the_serving_format(harness):
    for version, form in enumerate(["", "mxfp8", ""], 1):
        harness.observe(replace(harness.next(), serving_format=form))
        assert (harness.ledger.status.version, harness.ledger.status.serving_format) == (version, form)


def test_a_version_with_other_activations_is_refused_with_the_reason(harness):
    assert harness.observe(replace(harness.next(), serving_activations="nvfp4")) == [(REFUSED, 1, 0)]
    assert harness.acks[-1].reason == (
        "version 1 has serving_activations nvfp4, and this engine computes version 0 with none: start the replica again"
    )


def test_a_version_that_changes_nothing_is_proved_too(harness):
    same = driver.publish(harness.log, 1, harness.view, harness.view)
    assert harness.observe(same) == [(PROVED, 1, 1)] and harness.engine.holds(harness.view)


@pytest.mark.parametrize("how", [{"n_shards": 2}, {"n_shards": 2, "store": True}], ids=["in the log", "in the store"])
def test_a_delta_of_several_shards_is_one_version(harness, how):
    how = {**how, "store": harness.directory / "store"} if "store" in how else how
    for version in range(1, 4):
        assert harness.observe(harness.next(**how)) == [(PROVED, version, version)]
    assert harness.engine.holds(harness.view)


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_stored_shard_that_is_damaged_is_refused(harness, damage):
    manifest = harness.next(store=harness.directory / "store")
    (file,) = (harness.directory / "store").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\0") if damage == "changed" else file.unlink()
    assert harness.observe(manifest) == [(REFUSED, 1, 0)]
    assert harness.observe(harness.next(anchor=True)) == [(ANCHORED, 2, 2)]


def test_a_backlog_is_applied_in_one_update(harness):
    records = [harness.next() for _ in range(3)]
    assert harness.observe(*records) == [(PROVED, 3, 3)]
    assert "caught up from version 0 over 3 deltas" in harness.acks[-1].reason
    assert harness.engine.holds(harness.view) and len(harness.engine.written) == 1


def test_a_replica_that_is_behind_takes_the_skip_delta(harness):
    records = [harness.next(fraction=0.2) for _ in range(6)]
    assert harness.observe(*records, harness.skip(0, 5)) == [(PROVED, 6, 6)]
    assert "2 deltas (1 of them skip-deltas)" in harness.acks[-1].reason and harness.engine.holds(harness.view)


def test_a_damaged_skip_delta_is_refused_and_avoided(harness):
    records = [harness.next(fraction=0.2) for _ in range(6)]
    skip = harness.skip(0, 6)
    driver.corrupt(harness.log, skip.shards[0].offsets[0])
    assert harness.observe(*records, skip) == [(REFUSED, 6, 0), (PROVED, 6, 6)]
    assert harness.engine.holds(harness.view)


def test_versions_replay_over_chunks_that_were_read_before(harness):
    manifests = [harness.next() for _ in range(3)]
    assert harness.observe(manifests[2]) == [(REFUSED, 3, 0)]
    assert harness.observe(manifests[0]) == [(PROVED, 1, 1)]
    assert harness.observe(manifests[1]) == [(PROVED, 3, 3)]
    assert harness.engine.holds(harness.view)


def test_a_corrupt_chunk_is_refused_before_the_engine_changes_and_healed_by_the_next_anchor(harness):
    harness.observe(harness.next())
    broken = harness.next()
    driver.corrupt(harness.log, broken.shards[0].offsets[0])
    assert harness.observe(broken) == [(REFUSED, 2, 1)]
    assert harness.acks[-1].fingerprint == "" and "digest" in harness.acks[-1].reason
    assert harness.engine.holds(harness.views[1])
    assert harness.observe(harness.next()) == [(REFUSED, 3, 1)]
    assert harness.observe(harness.next(anchor=True)) == [(ANCHORED, 4, 4)]
    assert "re-synced from the anchor of version 4" in harness.acks[-1].reason
    assert harness.observe(harness.next()) == [(PROVED, 5, 5)]
    assert harness.engine.loads == 0 and harness.engine.holds(harness.view)


def test_a_chunk_with_other_contents_and_their_digest_is_refused(harness):
    manifest = harness.next(fraction=0.2)
    driver.corrupt(harness.log, manifest.shards[0].offsets[0], sealed=True)
    assert harness.observe(manifest) == [(REFUSED, 1, 0)] and harness.engine.holds(harness.views[0])
    assert harness.observe(harness.next(anchor=True)) == [(ANCHORED, 2, 2)]


def test_chunks_that_the_log_holds_twice_change_nothing(harness, monkeypatch):
    monkeypatch.setattr(delta_shard, "CHUNK_BYTES", 256)
    append = harness.log.append
    monkeypatch.setattr(harness.log, "append", lambda record: [append(record), append(record)][0])
    assert harness.observe(harness.next(fraction=0.2)) == [(PROVED, 1, 1)]
    assert len(harness.log.located) > 4 and harness.engine.holds(harness.view)


@pytest.mark.parametrize(("order", "wrong"), [((0, 0, 1), 1), ((1, 0, 2), 0)], ids=["a chunk twice", "another order"])
def test_a_manifest_that_misplaces_chunks_is_refused(harness, monkeypatch, order, wrong):
    monkeypatch.setattr(delta_shard, "CHUNK_BYTES", 256)
    manifest = harness.next(fraction=0.2)
    (shard,) = manifest.shards
    moved = [*(shard.offsets[place] for place in order), *shard.offsets[3:]]
    assert harness.observe(replace(manifest, shards=[replace(shard, offsets=moved)])) == [(REFUSED, 1, 0)]
    assert harness.acks[-1].reason.startswith(f"chunk {wrong} of version 1")
    assert harness.observe(harness.next(anchor=True)) == [(ANCHORED, 2, 2)] and harness.engine.holds(harness.view)


def test_a_second_version_of_a_known_number_is_refused_and_a_later_one_of_an_older_parent_served(harness):
    """Two trainers write a version; then the trainer goes back."""
    for version in (1, 2):
        assert harness.observe(harness.next()) == [(PROVED, version, version)]
    other = driver.nudged(harness.views[1], 99)
    assert harness.observe(driver.publish(harness.log, 2, harness.views[1], other)) == [(REFUSED, 2, 2)]
    assert harness.acks[-1].reason.startswith("fork: version 2 was published")
    back = driver.publish(harness.log, 3, harness.views[1], other, parent=1)
    assert harness.observe(back) == [(ANCHORED, 3, 3)] and harness.engine.holds(other)
    assert harness.acks[-1].reason.startswith("re-synced from the anchor of version 0 and 2 deltas")


def test_a_backlog_with_a_corrupt_chunk_is_followed_up_to_it(harness):
    records = [harness.next() for _ in range(4)]
    driver.corrupt(harness.log, records[2].shards[0].offsets[0])
    assert harness.observe(*records) == [(REFUSED, 3, 0), (PROVED, 2, 2), (REFUSED, 4, 2)]
    assert harness.engine.holds(harness.views[2])


def test_an_anchor_that_differs_in_most_elements_is_written_whole(harness):
    harness.next(fraction=0.9)
    assert harness.observe(harness.next(anchor=True, fraction=0.9)) == [(ANCHORED, 2, 2)]
    assert harness.engine.loads == 1 and harness.engine.holds(harness.view)


def test_an_anchor_of_a_remote_store_is_copied_read_and_removed(harness):
    harness.next()
    manifest = harness.next(anchor=True)
    remote = fsspec.filesystem("memory")
    remote.put(manifest.anchor.uri, "/store/v2", recursive=True)
    elsewhere = replace(manifest, anchor=replace(manifest.anchor, uri="memory://store/v2"))
    assert harness.observe(elsewhere) == [(ANCHORED, 2, 2)] and harness.engine.holds(harness.view)
    assert list((harness.directory / "staging").iterdir()) == []
    assert Path(manifest.anchor.uri).exists()


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("damaged", "tokenizer.json of anchor {} was changed after it was written"),
        ("another version", "of the anchor has fingerprint"),
    ],
)
def test_an_anchor_that_cannot_be_used_is_refused_and_the_last_version_stays(harness, fault, reason, remote):
    """The files of an anchor include its tokenizer, because it decides what the served tokens mean."""
    (harness.base / "tokenizer.json").write_text("{ }")
    harness.next()
    manifest = harness.next(anchor=True)
    if fault == "damaged":
        (Path(manifest.anchor.uri) / "tokenizer.json").write_text("{}")
    else:
        driver.save_view(harness.views[1], harness.base, Path(manifest.anchor.uri))
    if remote:
        where = f"/store/{harness.directory.name}"
        fsspec.filesystem("memory").put(manifest.anchor.uri, where, recursive=True)
        manifest = replace(manifest, anchor=replace(manifest.anchor, uri=f"memory:/{where}"))
    assert harness.observe(manifest) == [(REFUSED, 2, 0), (REFUSED, 2, 0)]
    assert reason.format(manifest.anchor.uri) in harness.acks[-2].reason and "no usable" in harness.acks[-1].reason
    assert list(harness.directory.glob("staging/*")) == [], "the copy of a refused anchor stays"
    assert harness.engine.holds(harness.views[0])


def test_a_delta_of_other_weights_is_refused_before_the_engine_is_touched(harness):
    harness.view = driver.nudged(harness.view, 99)
    assert harness.observe(harness.next()) == [(REFUSED, 1, 0)]
    assert harness.engine.written == [] and harness.engine.loads == 0


@pytest.mark.parametrize("field", ["fingerprint", "tensors"])
def test_a_manifest_that_names_other_fingerprints_is_refused(harness, field):
    manifest = harness.next()
    tensors = [replace(tensor, fingerprint="0" * 32) for tensor in manifest.tensors]
    wrong = {"fingerprint": "0" * 32} if field == "fingerprint" else {"tensors": tensors}
    assert harness.observe(replace(manifest, **wrong)) == [(REFUSED, 1, 0)]
    assert harness.engine.holds(harness.views[0])


def test_an_unproved_version_is_undone(harness):
    manifest = harness.next()
    harness.engine.lose_writes = True
    with pytest.raises(ReplicaFault):
        harness.observe(manifest)
    assert harness.acks[-1].status is REFUSED and harness.acks[-1].serving_version == 0


def test_a_version_whose_changes_cannot_be_proved_is_written_whole(harness):
    harness.engine.lose_changes = True
    assert harness.observe(harness.next()) == [(REFUSED, 1, 0), (ANCHORED, 1, 1)]
    assert harness.engine.loads == 1 and harness.engine.holds(harness.view)


def test_a_write_that_a_rank_refuses_is_reported_with_its_reason_and_the_version_is_written_whole(harness):
    harness.engine.refuse_changes = "rank 1: the changes in shared memory are damaged"
    assert harness.observe(harness.next()) == [(REFUSED, 1, 0), (ANCHORED, 1, 1)]
    assert harness.acks[-2].reason == f"the engine could not write it: {harness.engine.refuse_changes}"
    assert harness.engine.loads == 1 and harness.engine.holds(harness.view)


def test_damage_in_live_memory_is_found_and_healed_from_the_mirror(harness):
    harness.engine.live["b.weight"][7] ^= 1
    assert harness.observe(harness.next()) == [(REFUSED, 1, 0), (ANCHORED, 1, 1)]
    assert harness.engine.holds(harness.view)


def test_missing_chunks_time_out_and_are_fetched_later(harness):
    manifest = harness.next()
    (offset,) = manifest.shards[0].offsets
    late, harness.fetcher._timeout_s = harness.log.located.pop(offset), 0.5
    assert harness.observe(manifest) == [(REFUSED, 1, 0)]
    harness.log.located.append(late)
    deadline = time.monotonic() + 180
    while harness.acks[-1].serving_version != 1:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
        asyncio.run(harness.subscriber.advance())


@pytest.mark.parametrize("fetch", ["anchor", "chunk"])
def test_a_stop_ends_a_running_fetch_without_a_refusal(harness, monkeypatch, fetch):
    """Neither fetch would end by itself before the deadlines of the test."""
    deadline = time.monotonic() + FETCH_S
    polled, poll = threading.Event(), harness.log.poll
    monkeypatch.setattr(harness.log, "poll", lambda *limits: polled.set() or poll(*limits))

    def slow_copy(_store, _path, _local, callback):
        while time.monotonic() < deadline:
            callback.relative_update(1)
            polled.set()
            threading.Event().wait(0.01)
        raise AssertionError("the copy was not interrupted")

    monkeypatch.setattr(MemoryFileSystem, "get_file", slow_copy)
    if fetch == "anchor":
        harness.next()
        manifest = harness.next(anchor=True)
        fsspec.filesystem("memory").put(manifest.anchor.uri, "/slow/v2", recursive=True)
        manifest = replace(manifest, anchor=replace(manifest.anchor, uri="memory://slow/v2"))
    else:
        manifest = harness.next()
        harness.log.located.pop(manifest.shards[0].offsets[0])

    async def stopped_while_it_fetches():
        stop = asyncio.Event()
        following = asyncio.create_task(
            follow(harness.subscriber, PolledLog([located(manifest)]), lambda *_: None, stop, poll_interval_s=0.01)
        )
        assert await asyncio.to_thread(polled.wait, FETCH_S / 4)
        stop.set()
        harness.stopped.set()
        await asyncio.wait_for(following, FETCH_S / 4)

    asyncio.run(stopped_while_it_fetches())
    assert [ack.version for ack in harness.acks] == [0] and harness.engine.holds(harness.views[0])
    assert list(harness.directory.glob("staging/*")) == []


def test_each_update_of_a_replica_that_is_behind_begins_with_a_heartbeat(harness):
    begun = []

    def begins():
        begun.append(harness.state.serving)
        if len(begun) < 3:
            harness.subscriber.receive(harness.next())

    harness.subscriber.receive(harness.next())
    asyncio.run(harness.subscriber.advance(begins))
    assert begun == [0, 1, 2]


def test_a_roll_back_goes_to_an_older_version_by_its_changed_elements(harness):
    for _ in range(4):
        harness.observe(harness.next())
    assert harness.observe(decision("roll_back", 2)) == [(ANCHORED, 2, 2)]
    assert harness.acks[-1].reason == "rolled back to version 2 by ada: reward fell"
    assert harness.engine.holds(harness.views[2]) and harness.engine.loads == 0
    assert harness.observe(harness.next()) == [(REFUSED, 5, 2)]
    assert "rolled back" in harness.acks[-1].reason
    assert harness.observe(decision("release")) == [(PROVED, 5, 5)]
    assert harness.engine.holds(harness.view)


def test_every_acknowledgement_comes_with_the_lag(harness):
    harness.observe(harness.next())
    harness.next()
    harness.observe(harness.next())
    said = [(lag.version, [(count.lag, count.tokens) for count in lag.lag]) for lag in harness.lags]
    assert said == [(0, [(0, 0)]), (1, [(0, 3)]), (1, [(2, 0)])]
    assert {(lag.stage, lag.region, lag.replica_id) for lag in harness.lags} == {("serve", "here", "replica-t")}


def read_shard(fetcher, manifest):
    return b"".join(fetcher.pieces(manifest, manifest.shards[0]))


def test_the_fetcher_distinguishes_a_lost_chunk_from_a_late_one(harness):
    manifest = harness.next()
    fetcher = ChunkFetcher(harness.log, timeout_s=0.2)
    shard = manifest.shards[0]
    moved = replace(manifest, shards=[replace(shard, offsets=[9])])
    with pytest.raises(TimeoutError):
        read_shard(fetcher, moved)
    harness.log.located[shard.offsets[0]] = replace(harness.log.located[shard.offsets[0]], offset=5)
    with pytest.raises(DeltaError, match="no longer keeps"):
        read_shard(ChunkFetcher(harness.log, FETCH_S), manifest)


SKIP = build(SkipDelta, run_id="r", version=1)


def located(record, error=""):
    return ConsumedRecord(Topic.MANIFESTS, 0, 0, 0, None, b"", record, error)


class PolledLog:
    """A log that returns one batch of records per poll, then empty polls."""

    def __init__(self, *batches):
        self.batches = list(batches)

    def poll(self, timeout_s, max_records):
        if self.batches:
            return self.batches.pop(0)
        threading.Event().wait(timeout_s)
        return []


class NotedSubscriber:
    """Stores the records that it receives; its updates wait for `gate`."""

    def __init__(self, stop, enough):
        self.stop, self.enough, self.received, self.advances = stop, enough, [], 0
        self.gate = asyncio.Event()

    def receive(self, record):
        self.received.append(record)
        if len(self.received) == self.enough:
            self.gate.set()

    async def advance(self, begins):
        self.advances += 1
        await asyncio.wait_for(self.gate.wait(), FETCH_S)
        if len(self.received) >= self.enough:
            self.stop.set()


def test_records_are_read_during_an_update():
    async def run():
        stop = asyncio.Event()
        subscriber = NotedSubscriber(stop, enough=3)
        log = PolledLog([located(SKIP)], [located(SKIP), located(SKIP)])
        await asyncio.wait_for(follow(subscriber, log, lambda *_: None, stop, poll_interval_s=0.01), FETCH_S)
        return subscriber

    subscriber = asyncio.run(run())
    assert subscriber.received == [SKIP] * 3 and subscriber.advances == 1


def test_unusable_records_are_set_aside_and_the_others_are_followed():
    buried = []

    async def run():
        stop = asyncio.Event()
        subscriber = NotedSubscriber(stop, enough=1)
        log = PolledLog([located(None, "no record"), located(Tick("s", 0)), located(SKIP)])
        following = follow(subscriber, log, lambda _, reason: buried.append(reason), stop, poll_interval_s=0.01)
        await asyncio.wait_for(following, FETCH_S)

    asyncio.run(run())
    assert buried == ["no record", "a Tick is not followed by a replica"]


@pytest.mark.parametrize("which", ["acting", "checking"])
def test_a_failure_ends_the_follower_with_its_reason(which):
    class Failing(NotedSubscriber):
        async def advance(self, begins):
            if which == "acting":
                raise RuntimeError("the engine is gone")

    def check():
        if which == "checking":
            raise RuntimeError("the engine is gone")

    async def run():
        stop = asyncio.Event()
        following = follow(Failing(stop, 1), PolledLog(), lambda *_: None, stop, check=check, poll_interval_s=0.01)
        await asyncio.wait_for(following, FETCH_S)

    with pytest.raises(RuntimeError, match="the engine is gone"):
        asyncio.run(run())


class JoinedLog(PolledLog):
    """The log that a starting replica reads: one manifest, then nothing for a number of polls."""

    def __init__(self, manifest, polls):
        super().__init__()
        self.manifest, self.left = manifest, polls

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read_to_end(self):
        return [located(self.manifest)]

    def poll(self, timeout_s):
        self.left -= 1
        return []


def test_a_start_from_a_store_that_does_not_answer_is_tried_again_after_a_backoff(harness, monkeypatch, tmp_path):
    manifest = harness.next(anchor=True)
    log, tried = JoinedLog(manifest, 200), []

    def prepare(*_):
        tried.append(log.left)
        raise TimeoutError("the store does not answer")

    monkeypatch.setattr(staging, "LogReader", lambda *_, **__: log)
    monkeypatch.setattr(staging, "open_fetcher", lambda *_: nullcontext())
    monkeypatch.setattr(staging.UpdateStaging, "prepare", prepare)
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: (200 - log.left) / 20))
    state = ReplicaState(manifest.run_id, manifest.branch)
    assert staging.join(None, ReplicaSettings(), state, tmp_path, lambda: log.left == 0) is None
    assert [200 - left for left in tried] == [0, 10, 30, 70, 150]


def test_a_stop_ends_the_fetch_of_a_replica_that_starts(harness, monkeypatch, tmp_path):
    manifest, stopped = harness.next(anchor=True), threading.Event()
    log, begun = JoinedLog(manifest, 200), []

    def prepare(of_join, *_):
        stopped.set()
        begun.append(of_join)
        of_join._rebuilder._interrupt()

    monkeypatch.setattr(staging, "LogReader", lambda *_, **__: log)
    monkeypatch.setattr(staging, "open_fetcher", lambda *_: nullcontext())
    monkeypatch.setattr(staging.UpdateStaging, "prepare", prepare)
    state = ReplicaState(manifest.run_id, manifest.branch)
    assert staging.join(None, ReplicaSettings(), state, tmp_path, stopped.is_set) is None
    assert len(begun) == 1


def test_replicas_with_one_staging_directory_use_separate_directories_in_it(tmp_path):
    parent = tmp_path / "not" / "yet"
    with staging.private_directory(parent) as one, staging.private_directory(parent) as other:
        assert one != other and one.parent == other.parent == parent
    assert list(parent.iterdir()) == []


def test_the_staging_directory_of_a_killed_replica_is_removed_and_that_of_a_running_one_is_not(tmp_path):
    code = f"""if True:
        from pathlib import Path
        from tidemill.consumers.replica.staging import private_directory
        with private_directory(Path({str(tmp_path)!r})) as one:
            (one / "whole").mkdir()
            print(one, flush=True)
            input()
    """
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as replica:
        theirs = Path(replica.stdout.readline().strip())
        for is_running in (True, False):
            with staging.private_directory(tmp_path) as own:
                assert (theirs.exists(), own.exists()) == (is_running, True)
            replica.kill()
            replica.wait()
    assert list(tmp_path.iterdir()) == []


def test_backoff_doubles_up_to_a_limit_and_starts_again():
    patience, now, waits = Backoff(), 0.0, []
    assert patience.may_try(now)
    for _ in range(9):
        patience.failed(now)
        assert not patience.may_try(now)
        begun = now
        while not patience.may_try(now):
            now += 0.25
        waits.append(now - begun)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0] and waits[-1] == LONGEST_S
    patience.succeeded()
    assert patience.may_try(now)
    patience.failed(now)
    assert patience.may_try(now + 0.5)
