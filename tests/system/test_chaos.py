"""Chaos: a short storm on learning from users, with real Kafka and vLLM; and unit tests of the parts of a storm.

Long storms are run with `python -m tests.chaos.run`; their results are in `tests/chaos/FAULTS.md`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tomli_w
from aiohttp import web
from confluent_kafka import Consumer, TopicPartition
from demonstration import TIMEOUT_S
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos import keeper as keeping
from tests.chaos.campaign import Order, Verdict, endure, figures, storm_of
from tests.chaos.keeper import CrashLoop, Ended, Keeper, RoleSpec
from tests.chaos.link import MOST_LINKS, Links, own_address, readdressed
from tests.chaos.observed_users import ACKNOWLEDGED, SERVED, Noted, noted
from tests.chaos.product_tally import ProductTally
from tests.chaos.site import settings_for
from tests.chaos.storm import LASTING, FaultKind, Share, Storm, counted, draw
from tests.chaos.table import MEANT, NOTICED
from tests.chaos.tally import Recoveries, Tally
from tests.chaos.verdict import tidemill
from tests.consumers.operate.audit_support import PLANTED_FAULTS, WrittenLog
from tests.consumers.product_support import interaction, outcome, product_run, use
from tests.consumers.sink_support import START_US
from tests.producers.conftest import FakeReplica, byte_tokenizer
from tests.records import build
from tests.waiting import until
from tidemill.compose.config import Act
from tidemill.compose.processes import Supervisor
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Names, Topic, feedback_key
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.consumed import ConsumedRecord
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Rollout, Task

CHAOS = Path(keeping.__file__).parent
ROLES = ("feed", "rollout-0", "rollout-1", "stream", "train", "replica-0", "sink")
DEADLINE_S = 600.0
T = TypeVar("T")


# -- the plan -------------------------------------------------------------------------------------------------------

SHARES = st.lists(
    st.builds(
        Share,
        st.sampled_from(FaultKind),
        st.integers(0, 40),
        st.lists(st.sampled_from(ROLES), min_size=1, max_size=7, unique=True),
    ),
    max_size=4,
    unique_by=lambda share: share.kind,
)


@given(seed=st.integers(0, 2**32), shares=SHARES, last_step=st.integers(1, 60), gap_s=st.floats(0, 30))
def test_a_seed_gives_one_storm_that_hits_targets_evenly(tmp_path_factory, seed, shares, last_step, gap_s):
    storm = draw(seed, shares, last_step=last_step, gap_s=gap_s)
    assert storm == draw(seed, shares, last_step=last_step, gap_s=gap_s)
    assert Counter(fault.kind for fault in storm.faults) == Counter({s.kind: s.count for s in shares if s.count})
    for share in shares:
        times = [counted(storm).get(share.kind, {}).get(target, 0) for target in share.targets]
        assert max(times) - min(times) <= 1
    steps = [fault.after_step for fault in storm.faults]
    assert steps == sorted(steps) and all(1 <= step <= last_step for step in steps)
    assert all((fault.lasts_s > 0) == (fault.kind in LASTING) for fault in storm.faults)
    path = tmp_path_factory.getbasetemp() / "storm.json"
    storm.save(path)
    assert Storm.load(path) == storm


def test_two_seeds_give_different_storms():
    shares = [Share(FaultKind.KILL, 30, ROLES)]
    assert draw(1, shares, last_step=9, gap_s=5) != draw(2, shares, last_step=9, gap_s=5)


def test_a_storm_without_targets_is_refused():
    with pytest.raises(ValueError, match="nobody to bear them"):
        draw(1, [Share(FaultKind.DISK, 1, [])], last_step=9, gap_s=5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"seed": 1, "faults": [{"kind": "flood"}]}'])
def test_a_file_that_holds_no_storm_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "storm.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no storm"):
        Storm.load(path)


# -- what the log contains ------------------------------------------------------------------------------------------


def test_a_recovery_is_from_the_last_fault_to_the_first_progress_after_it():
    found = Recoveries()
    found.begin("train", "kill", 10.0)
    assert found.progress("train", 9.0) is None, "written before the fault, and read after it"
    found.begin("train", "kill", 11.0)
    assert found.progress("feed", 12.0) is None
    assert found.progress("train", 14.0) == 3.0
    assert found.progress("train", 15.0) is None
    assert (found.seconds, found.cut_short["kill", "train"], found.under_way()) == (
        {("kill", "train"): [3.0]},
        1,
        set(),
    )


def test_requested_rollouts_without_a_record_are_lost():
    tally = Tally()
    for offset, record in enumerate([a_task(0), a_task(1)]):
        tally.observe(ConsumedRecord(Topic.TASKS, 0, offset, 1000, b"", b"", record, ""))
    assert len(tally.lost()) == 2 * GROUP_SIZE


def told(records: Iterable[r.Record]) -> ProductTally:
    """Return the tally of a product's records, in their order."""
    log, tally = WrittenLog(), ProductTally()
    for record in records:
        key = feedback_key(record.interaction_id, record.event_id) if isinstance(record, r.Feedback) else None
        log.put(record, at=START_US, key=key)
    for located in log.all():
        tally.observe(located)
    return tally


def test_equal_copies_of_a_record_count_once():
    tally = told(product_run())
    assert tally.twice() == [] and tally.trained() == 1
    again = tally.again
    assert (again.interactions, again.feedback, again.outcomes, again.batches) == (1, 1, 1, 1)
    assert tally.endings == {"": 4, "no_signal": 1, "bot": 1} and tally.decisions == {"canary": 1, "promote": 1}


def test_what_a_user_received_and_the_log_lacks_is_lost():
    tally = told(product_run())
    assert tally.lost({"i0"}, {"i0/e0"}) == ["interaction i5 never ended"]
    assert tally.lost({"i0", "gone"}, {"i0/e0", "i0/gone"}) == [
        "answer gone was served and not recorded",
        "signal i0/gone was acknowledged and is not there",
        "interaction i5 never ended",
    ]


def _again(records: list[r.Record], kind: type[T], **changes: Any) -> list[r.Record]:
    """Return the records and a copy of the first of a kind with changed contents."""
    return [*records, replace(next(one for one in records if isinstance(one, kind)), **changes)]


FOUND_TWICE = {
    "interaction i0 stands": lambda run: _again(run, r.Interaction, latency_ms=7.0),
    "interaction i0 ended in two ways": lambda run: _again(run, r.Outcome, reward=0.5),
    "batch run/main/0 stands": lambda run: _again(run, r.OnlineBatch, tokens=7),
    "signal e9 counts twice in i5": lambda run: [
        *run, outcome(interaction("i5", "user5"), 1.0, signals=[use("e9"), use("e9")])],
    "interaction i0 was trained 2 times": lambda run: _again(run, r.TrainStep, step=3),
    "decided twice to promote 2": lambda run: _again(run, r.GateDecision, verdict=r.GateVerdict.PROMOTE, numbers={}),
}  # fmt: skip


@pytest.mark.parametrize("said", FOUND_TWICE)
def test_repeated_work_is_found(said: str):
    (found,) = told(FOUND_TWICE[said](product_run())).twice()
    assert said in found


def test_notes_are_read_except_a_line_that_a_kill_left_incomplete(tmp_path: Path):
    path = tmp_path / "notes"
    assert noted(path) == Noted(frozenset(), frozenset())
    path.write_text(f'["{SERVED}", "i"]\n["{ACKNOWLEDGED}", "i/e"]\n["{SERVED}", "bro')
    assert noted(path) == Noted(frozenset({"i"}), frozenset({"i/e"}))


# -- the network ----------------------------------------------------------------------------------------------------


@given(
    text=st.binary(max_size=60),
    port=st.integers(1024, 65535),
    other=st.integers(1024, 65535),
    number=st.integers(0, MOST_LINKS - 1),
)
def test_an_answer_keeps_its_length_and_changes_only_in_the_brokers_address(text, port, other, number):
    place = b"127.0.0.1" + port.to_bytes(4, "big")
    answer = b"a" + place + b"127.0.0.1" + (other if other != port else 1).to_bytes(4, "big")
    changed = readdressed(answer, [port], own_address(number))
    assert len(changed) == len(answer)
    assert changed == b"a" + own_address(number).encode() + answer[10:]


def test_the_number_of_links_is_that_of_addresses_of_equal_length():
    assert len({own_address(number) for number in range(MOST_LINKS)}) == MOST_LINKS
    with pytest.raises(ValueError, match=f"{MOST_LINKS} links"):
        own_address(MOST_LINKS)


@contextmanager
def echo_broker() -> Iterator[int]:
    """Run a server that answers every frame with the same bytes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    while data := connection.recv(1000):
                        connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_cut_link_delays_all_data_until_it_is_healed():
    frame = (6).to_bytes(4, "big") + b"record"
    with (
        echo_broker() as port,
        Links([port], ["a"]) as links,
        socket.create_connection((own_address(0), port), timeout=60) as client,
    ):
        client.sendall(frame)
        assert client.recv(100) == frame
        links.cut("a")
        client.settimeout(0.3)
        client.sendall(frame)
        with pytest.raises(TimeoutError):
            client.recv(100)
        links.heal("a")
        client.settimeout(60)
        assert client.recv(100) == frame


# -- the roles ------------------------------------------------------------------------------------------------------


WAITS = "import signal; signal.pause()"


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Keeper]]:
    """Make keepers of a role that runs Python code."""
    monkeypatch.setattr(keeping, "BACKOFF_S", 0.01)
    monkeypatch.setattr(keeping, "MOST_CRASHES", 1)
    with Supervisor(tmp_path / "logs") as supervisor:
        yield lambda code, later=(): Keeper(supervisor, [RoleSpec("role", (code,), program=("-c",))], ["role"], later)


def ended(keeper: Keeper) -> Ended:
    found: list[Ended] = []
    until(lambda: bool(found.extend(keeper.mend()) or found), "the role goes on", DEADLINE_S)
    return found[0]


def test_a_role_that_is_done_is_not_restarted(keep):
    keeper = keep("")
    assert (ended(keeper).status, keeper.done) == (0, {"role"})
    assert keeper.mend() == [] and len(keeper.starts_s["role"]) == 1


def test_a_killed_rank_ends_the_role_and_is_not_a_crash(keep):
    rank = [sys.executable, "-c", WAITS]
    role = f"import subprocess; own = [subprocess.Popen({rank}) for _ in range(2)]; status = own[1].wait()"
    keeper = keep(f"{role}; own[0].kill(); exit(-status)")
    assert not keeper.kill_rank("role", 1)
    keeper.mend()
    until(lambda: keeper.kill_rank("role", 1), "the role has no ranks", DEADLINE_S)
    assert ended(keeper) == Ended("role", signal.SIGKILL, by_itself=False, last_words="")


def test_ranks_are_killed_only_in_roles_with_several(tmp_path):
    with pytest.raises(ValueError, match="--ranks 2"):
        Order(tmp_path, 1, 4, None, {FaultKind.RANK_KILL: 1})
    order = Order(tmp_path, 1, 4, None, {FaultKind.RANK_KILL: 4}, ranks=2)
    settings = settings_for(tmp_path, Act.ONE, steps=4, seed=1, model=None)
    targets = counted(storm_of(order, settings))[FaultKind.RANK_KILL]
    assert targets == {"train": 2, "replica-0": 2}


def test_a_killed_role_is_started_again_and_this_is_not_a_crash(keep):
    keeper = keep(WAITS)
    for life in (1, 2, 3):
        keeper.mend()
        assert keeper.kill("role")
        found = ended(keeper)
        assert (found.status, found.by_itself, len(keeper.starts_s["role"])) == (-signal.SIGKILL, False, life + 1)


def test_a_role_that_keeps_ending_by_itself_is_a_crash_loop(keep):
    keeper = keep("exit(1)")
    with pytest.raises(CrashLoop, match="role ended 2 times by itself"):
        for _ in range(3):
            assert ended(keeper).by_itself


def test_a_role_with_a_full_disk_cannot_write(keep, tmp_path: Path):
    keeper = keep(WAITS)
    keeper.mend()
    assert largest_file(keeper) == "unlimited"
    keeper.set_disk("role", full=True)
    assert int(largest_file(keeper)) <= keeping.DISK_MARGIN + 10_000
    keeper.kill("role")
    ended(keeper)
    assert int(largest_file(keeper)) <= keeping.DISK_MARGIN + 10_000, "a kill empties no disk"
    keeper.set_disk("role", full=False)
    assert largest_file(keeper) == "unlimited"


def largest_file(keeper: Keeper) -> str:
    limits = Path(f"/proc/{keeper.pid('role')}/limits").read_text().splitlines()
    (line,) = [line for line in limits if line.startswith("Max file size")]
    return line.split()[3]


def test_a_later_role_waits_and_a_retired_role_is_not_restarted(keep):
    keeper = keep(WAITS, later=["role"])
    keeper.mend()
    assert keeper.pid("role") is None and not keeper.kill("role")
    keeper.let_begin("role")
    keeper.mend()
    assert len(keeper.starts_s["role"]) == 1
    keeper.retire("role")
    assert keeper.mend() == [] and (keeper.pid("role"), len(keeper.starts_s["role"])) == (None, 1)


# -- the whole loop -------------------------------------------------------------------------------------------------


STEPS = 2
FELL = ("train-online", "join", "batches", "gate", "rollout-online", "feed-online", "stream", "route", "gateway",
        "users", "sink")  # fmt: skip
"""All roles of a run that learns from users, except replicas: these take a minute to start; long storms kill them."""
FAULTS = {FaultKind.KILL: len(FELL), FaultKind.PAUSE: 1, FaultKind.PARTITION: 1, FaultKind.DISK: 1}


@pytest.fixture(scope="module")
def endured(finished, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    """A run in which each role of `FELL` was killed, and three were hit by other faults."""
    order = Order(
        directory=tmp_path_factory.mktemp("chaos"),
        seed=10,
        steps=STEPS,
        model=finished.newest_anchor(),
        counts=FAULTS,
        roles=FELL,
        gap_s=1.0,
        stall_s=DEADLINE_S * 2,
        act=Act.TWO,
    )
    return endure(order, lambda text: print(text, file=sys.stderr, flush=True))


@pytest.mark.timeout(TIMEOUT_S)
def test_kill_anything_at_any_time_and_nothing_is_lost_or_done_twice(endured: Verdict):
    for figure in figures(endured):
        print(json.dumps(figure))
    assert len(endured.endured.struck) == len(endured.storm.faults) == sum(FAULTS.values())
    assert endured.audit.clean, endured.audit.text
    assert (endured.lost(), endured.twice()) == ([], [])
    assert (endured.endured.tally.repeated.groups_changed, endured.sink_rows_twice) == (0, 0)


def test_the_run_served_users_and_learnt_from_them(endured: Verdict):
    product, told = endured.endured.tally.product, endured.told
    assert told.served and told.acknowledged, "nothing is lost where nobody was told anything"
    assert product.trained() >= STEPS * 2 and {"", "no_consent", "no_signal"} <= product.endings.keys()
    assert {"canary", "promote"} <= product.decisions.keys()


def test_every_role_recovered(endured: Verdict):
    """A role that wrote nothing after its fault must still run: the run may have ended before it had any work. The run
    waited until the sink had written the whole log."""
    back = {role for _, role in endured.endured.tally.recoveries.seconds}
    assert back | endured.endured.running >= set(FELL)
    assert "train-online" in back


def test_a_full_disk_ends_a_role_once(endured: Verdict):
    met = [
        struck.fault.target for struck in endured.endured.struck if struck.fault.kind is FaultKind.DISK and struck.hit
    ]
    assert len(met) == 1
    assert [ended.name for ended in endured.endured.by_itself() if ended.during == FaultKind.DISK] == met


def test_every_replayed_step_gives_the_recorded_weights(endured: Verdict):
    assert sorted(endured.endured.tally.fingerprints) == list(range(1, STEPS + 1))
    assert endured.again.clean, endured.again.text


def test_the_table_has_a_row_for_every_fault_that_can_be_tried():
    table = (CHAOS / "FAULTS.md").read_text("utf-8")
    assert MEANT.keys() == NOTICED.keys() == set(FaultKind)
    missing = [kind for kind in FaultKind if f"| {MEANT[kind]} |" not in table]
    missing += [fault.name for fault in PLANTED_FAULTS if f"| {fault.name} |" not in table]
    assert not missing


# -- the control: these tests can fail ------------------------------------------------------------------------------

GROUP_SIZE = 4
TASKS = 6


def a_task(number: int) -> Task:
    name, now = f"run/train/{number}", now_us()
    return build(Task, task_id=name, payload='{"entries":[3,4]}', group_size=GROUP_SIZE, max_turns=6, issued_at=now,
                 deadline_at=now + 3_600_000_000)  # fmt: skip


@dataclass
class Bench:
    """A log with tasks, a replica whose answers can be delayed, group assembly, and a hasty worker to kill."""

    kafka: KafkaSettings
    config: Path
    replica: FakeReplica
    supervisor: Supervisor
    worker: subprocess.Popen[bytes] | None = None

    def start_worker(self) -> None:
        command = [sys.executable, str(CHAOS / "hasty_worker.py"), "rollout", "--config", str(self.config)]
        with self.config.with_suffix(".log").open("ab") as log:
            self.worker = subprocess.Popen(command, stdout=log, stderr=log)

    def kill_worker(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait(60)

    def issue(self, numbers: range) -> None:
        with RecordProducer(self.kafka, "test") as producer:
            producer.send_acked(Topic.TASKS, [(f"run/train/{n}", a_task(n)) for n in numbers])

    def played(self) -> set[str]:
        """Return the tasks whose rollouts are all in the log."""
        with LogReader(self.kafka, [Topic.ROLLOUTS]) as reader:
            found = {r.record.rollout_id: r.record for r in reader.read_to_end() if isinstance(r.record, Rollout)}
        counts = Counter(record.task_id for record in found.values())
        return {task for task, count in counts.items() if count == GROUP_SIZE}

    def grouped(self) -> int:
        with LogReader(self.kafka, [Topic.GROUPS]) as reader:
            return len({located.key for located in reader.read_to_end()})

    def committed(self) -> int:
        names = Names(self.kafka.topic_prefix)
        group = {"bootstrap.servers": self.kafka.address(), "group.id": f"{self.kafka.topic_prefix}rollout.run"}
        consumer = Consumer(group)
        try:
            (place,) = consumer.committed([TopicPartition(names.of(Topic.TASKS), 0)], timeout=60)
            return max(0, place.offset)
        finally:
            consumer.close()


@pytest.fixture
def bench(kafka, tmp_path: Path) -> Iterator[Bench]:
    settings = kafka.fresh(1)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    replica = FakeReplica(tokenizer, "r1")
    replica.start()
    document = {
        "kafka": settings.model_dump(exclude_none=True),
        "run": {"run_id": "run"},
        "chat": {"template": "chatml"},
        "rollout": {"replicas": [replica.address], "tokenizer": str(tmp_path), "worker_id": "w"},
        "stream": {"data_dir": str(tmp_path / "stream"), "instance": "stream"},
    }
    config = tmp_path / "settings.toml"
    config.write_text(tomli_w.dumps(document), "utf-8")
    with Supervisor(tmp_path / "logs") as supervisor:
        made = Bench(settings, config, replica, supervisor)
        try:
            yield made
        finally:
            if made.worker is not None:
                made.kill_worker()
            replica.stop()


@pytest.mark.timeout(TIMEOUT_S)
def test_the_audit_finds_rollouts_that_an_early_commit_loses(bench: Bench):
    """In tests/producers/rollout/test_worker.py the real worker loses none."""
    released = threading.Event()

    async def wait(request: dict, number: int) -> web.StreamResponse:
        while not released.is_set():
            await asyncio.sleep(0.01)
        return await bench.replica.solve(request, number)

    bench.replica.answer = wait
    bench.issue(range(TASKS))
    bench.supervisor.start("stream", ["stream", "--config", str(bench.config)])
    bench.start_worker()
    until(lambda: len(bench.replica.requests) >= TASKS * GROUP_SIZE, "the worker plays nothing", DEADLINE_S)
    until(lambda: bench.committed() == TASKS, "it commits nothing early", DEADLINE_S)
    bench.kill_worker()
    released.set()
    bench.start_worker()
    bench.issue(range(TASKS, TASKS + 1))
    until(lambda: bench.played() and bench.grouped(), "what is left is not played", DEADLINE_S)
    found = tidemill("audit", "--config", str(bench.config), "--ended", "--json")
    assert found.document is not None, found.text
    failed = {check["name"]: check["first"] for check in found.document["checks"] if not check["passed"]}
    assert found.status == 1 and failed["endings"]["place"]["topic"] in (Topic.TASKS.value, Topic.PROGRESS.value)
