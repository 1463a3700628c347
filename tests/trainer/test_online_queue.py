"""The choice of online batches: every reason to exclude a batch or an interaction; stops do not change the result."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import build
from tests.trainer.conftest import make_trainable_batch, queue_of
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.log.client_settings import MAX_RECORD_BYTES
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.records import (
    MOST_REWARD,
    Exclusion,
    GateDecision,
    GateVerdict,
    SamplingParameters,
    StepInput,
    TrainStep,
    UserRequest,
    UserWish,
)
from tidemill.trainer.choices import BaselineKind
from tidemill.trainer.online_queue import OnlineQueue, WeightLine, repeated
from tidemill.trainer.trainable import MOST_EXCLUSIONS, Reference, TopicProgress, TrainableBatch


def line_to(version: int) -> WeightLine:
    """Make a line of versions 0 to `version`, each made from the previous one."""
    line = WeightLine("run", "main")
    for number in range(1, version + 1):
        line.made(number, number - 1, 0)
    return line


def decide(line: WeightLine, verdict: GateVerdict, version: int) -> None:
    line.observe(build(GateDecision, verdict=verdict, version=version, decided_by="test"))


def place(name: str, offset: int) -> StepInput:
    return StepInput(name, Topic.ONLINE_BATCHES.value, 0, offset)


def at(offset):
    return Position("interactions", 0, offset)


def found_of(made: TrainableBatch):
    """Return the batch's interactions by position, as the log returns them."""
    return {Position.of(m): i for m, i in zip(made.members, made.interactions, strict=True)}


def settled(queue: OnlineQueue, made: TrainableBatch, current: int = 0, **changes):
    """Let the queue read and settle a batch; return the rest of the batch, or the reason for its exclusion."""
    queue.read(Reference(made.place, replace(made.batch, members=list(made.members))))
    waiting = queue.next(current)
    assert waiting is not None
    return queue.settle(waiting, {**found_of(made), **changes.get("found", {})}, current)


def reasons(left: TrainableBatch) -> dict[str, str]:
    return {entry.group_id: entry.reason for entry in left.excluded}


@pytest.fixture
def made() -> TrainableBatch:
    return make_trainable_batch("b", (1.0, 0.0, 0.5, 1.0))


def erase(user_id: str, at: int, wish: UserWish = UserWish.ERASE) -> UserRequest:
    return UserRequest("request", user_id, wish, "", at)


def test_a_whole_batch_is_trained(made) -> None:
    queue = queue_of(line_to(0))
    left = settled(queue, made)
    assert isinstance(left, TrainableBatch)
    assert (left.members, left.interactions, left.excluded) == (made.members, made.interactions, ())
    assert queue.take(left) == []
    assert queue.next(0) is None


@pytest.mark.parametrize("reason", [Exclusion.MISSING_INTERACTION, Exclusion.INVALID_INTERACTION])
def test_an_unreadable_interaction_is_excluded_with_its_reason(made, reason) -> None:
    left = settled(queue_of(line_to(0)), made, found={at(1): reason})
    assert reasons(left) == {"b-1": reason.value}
    assert [m.interaction_id for m in left.members] == ["b-0", "b-2", "b-3"]
    (entry,) = left.excluded
    assert (entry.topic, entry.partition, entry.offset, entry.rollouts) == ("interactions", 0, 1, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"consent": False},
        {"user_id": "somebody else"},
        {"run_id": "other"},
        {"branch": "other"},
        {"version_min": 1, "version_max": 1},
        {"version_max": 1},
    ],
)
def test_an_interaction_that_contradicts_its_batch_or_has_no_consent_is_excluded(made, changes) -> None:
    wrong = replace(made.interactions[0], **changes)
    assert reasons(settled(queue_of(line_to(1)), made, found={at(0): wrong})) == {"b-0": "invalid_interaction"}


def test_an_interaction_of_other_versions_has_no_lag_and_is_excluded(made) -> None:
    """An answer of another incarnation, or a correction of an answer of a version that was not made."""
    queue = queue_of(line_to(0), incarnation="mine")
    mine, theirs = (replace(made.interactions[0], incarnation=name) for name in ("mine", "theirs"))
    assert reasons(settled(queue, made, found={at(0): mine, at(1): replace(theirs, **ids_of(made, 1))})) == {
        "b-1": "undefined_lag"
    }
    members = (replace(made.members[0], correction=True), *made.members[1:])
    ahead = replace(made.interactions[0], version_min=4, version_max=5)
    left = settled(queue_of(line_to(3)), of_version(replace(made, members=members), 3),
                   current=3, found={at(0): ahead})  # fmt: skip
    assert reasons(left) == {"b-0": "undefined_lag"}


def test_an_answer_of_another_distribution_is_excluded_unless_accepted(made) -> None:
    greedy = replace(made.interactions[1], sampling=SamplingParameters(temperature=0.0))
    own = replace(made.interactions[2], sampling=SamplingParameters())
    for accepted, expected in ((False, {"b-1": "other_sampling"}), (True, {})):
        queue = queue_of(line_to(0), accept_other_sampling=accepted)
        assert reasons(settled(queue, made, found={at(1): greedy, at(2): own})) == expected


def ids_of(made: TrainableBatch, index: int) -> dict[str, str]:
    own = made.interactions[index]
    return {"interaction_id": own.interaction_id, "user_id": own.user_id}


def of_version(made: TrainableBatch, version: int) -> TrainableBatch:
    served = tuple(replace(i, version_min=version, version_max=version) for i in made.interactions)
    return replace(made, batch=replace(made.batch, version=version), interactions=served)


def test_batches_of_a_replay_are_excluded_unless_accepted(made) -> None:
    """A refused copy does not end the batch: the original is trained when it arrives."""
    queue = queue_of(line_to(0))
    queue.read(Reference(replace(made.place, offset=0), made.batch, "replay"))
    left = settled(queue, made, found={at(0): Exclusion.REPLAYED})
    assert reasons(left) == {"b-0": "replayed"}
    assert [(e.offset, e.reason) for e in queue.take(left)] == [(0, "replayed"), (0, "replayed")]
    told = queue_of(line_to(0), accept_replays=frozenset({"replay"}))
    told.read(Reference(made.place, made.batch, "replay"))
    assert told.next(0) is not None


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -2 * MOST_REWARD, 1e300])
def test_a_reward_without_a_finite_gradient_is_excluded(made, reward) -> None:
    """A trainer that took such a step would end, and take the planned step again at each start."""
    members = (replace(made.members[0], reward=reward), *made.members[1:])
    left = settled(queue_of(line_to(0)), replace(made, members=members))
    assert reasons(left) == {"b-0": "invalid_interaction"}
    greatest = (replace(made.members[0], reward=MOST_REWARD), *made.members[1:])
    assert reasons(settled(queue_of(line_to(0)), replace(made, members=greatest))) == {}


def test_interactions_older_than_the_users_erasure_are_excluded(made) -> None:
    served = made.interactions[0].served_at
    queue = queue_of(line_to(0))
    queue.observe_request(erase("user-b-0", served))
    queue.observe_request(erase("user-b-1", served - 1))
    queue.observe_request(erase("user-b-2", served + 1, UserWish.OPT_OUT))
    queue.observe_request(erase("user-b-3", served + 1))
    left = settled(queue, made, found={at(3): Exclusion.MISSING_INTERACTION})
    assert reasons(left) == {"b-0": "erased", "b-3": "erased"}, "what came before the request, gone or not"


def test_an_erasure_while_a_batch_waits_counts(made) -> None:
    queue = queue_of(line_to(0))
    assert isinstance(settled(queue, made), TrainableBatch)
    queue.observe_request(erase("user-b-0", made.interactions[0].served_at))
    waiting = queue.next(0)
    assert waiting is not None
    assert reasons(queue.settle(waiting, found_of(made), 0)) == {"b-0": "erased"}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({at(i): Exclusion.MISSING_INTERACTION for i in range(4)}, Exclusion.MISSING_INTERACTION),
        ({at(i): Exclusion.MISSING_INTERACTION for i in range(3)}, Exclusion.TOO_FEW),
    ],
)
def test_a_batch_with_too_few_interactions_left_is_excluded(made, found, reason) -> None:
    queue = queue_of(line_to(0))
    assert settled(queue, made, found=found) is reason
    (waiting,) = queue._waiting.values()
    queue.drop(waiting, reason)
    (entry,) = ended(queue)
    assert (entry.topic, entry.reason, entry.rollouts) == ("online-batches", reason.value, 4)


def ended(queue: OnlineQueue):
    """Return the exclusions that no step has recorded yet."""
    return list(queue._excluded)


def test_equal_rewards_have_no_signal_unless_there_is_no_baseline() -> None:
    equal = make_trainable_batch("b", (0.5, 0.5))
    assert settled(queue_of(line_to(0)), equal) is Exclusion.NO_SIGNAL
    for changes in ({"baseline": BaselineKind.NONE}, {"skip_no_signal": False}):
        assert isinstance(settled(queue_of(line_to(0), **changes), equal), TrainableBatch)


@pytest.mark.parametrize(
    ("version", "current", "lag", "reason"),
    [(3, 3, 0, None), (2, 3, 0, "stale"), (2, 3, 1, None), (1, 3, 1, "stale")],
)
def test_a_batch_is_trained_within_its_lag(made, version, current, lag, reason) -> None:
    queue = queue_of(line_to(3), max_policy_lag=lag)
    queue.read(Reference(made.place, replace(made.batch, version=version)))
    assert (queue.next(current) is None) is (reason is not None)
    assert [entry.reason for entry in ended(queue)] == ([reason] if reason else [])


def test_a_batch_of_a_future_version_waits_for_it(made) -> None:
    line = line_to(2)
    queue = queue_of(line)
    queue.read(Reference(made.place, replace(made.batch, version=3)))
    assert queue.next(2) is None
    assert ended(queue) == []
    line.made(3, 2, 0)
    assert queue.next(3) is not None


def test_a_batch_of_an_abandoned_version_is_excluded(made) -> None:
    line = line_to(3)
    queue = queue_of(line, max_policy_lag=9)
    queue.read(Reference(made.place, replace(made.batch, version=3)))
    decide(line, GateVerdict.ROLL_BACK, 2)
    assert queue.next(line.start()) is None
    assert [entry.reason for entry in ended(queue)] == ["rejected_version"]


def test_a_batch_below_the_floor_is_excluded(made) -> None:
    line = line_to(2)
    queue = queue_of(line, require_admission=True)
    queue.read(Reference(made.place, replace(made.batch, version=2)))
    assert queue.next(2) is None
    assert [entry.reason for entry in ended(queue)] == ["below_floor"]
    decide(line, GateVerdict.ADMIT, 1)
    queue.read(Reference(place("c", 7), replace(made.batch, batch_id="c", version=2)))
    assert queue.next(2) is not None


def test_a_stop_does_not_change_which_batch_is_forgotten_first(made) -> None:
    queue, again = (queue_of(line_to(3), remembered_groups=1) for _ in range(2))
    queue.read(Reference(place("stale", 0), replace(made.batch, batch_id="stale", version=1)))
    left = settled(queue, replace(of_version(made, 3), place=place("b", 1)), 3)
    again.observe_step(recorded(left.place, queue.take(left)))
    assert queue.progress().remembered == again.progress().remembered == ["stale"]


def test_batches_of_other_runs_and_branches_are_ignored(made) -> None:
    queue = queue_of(line_to(0))
    queue.read(Reference(place("b", 0), replace(made.batch, run_id="other")))
    queue.read(Reference(place("b", 1), replace(made.batch, branch="other")))
    assert queue.next(0) is None
    assert ended(queue) == []


def test_the_oldest_batch_is_trained_first(made) -> None:
    queue = queue_of(line_to(0))
    for offset, closed_at in enumerate((30, 10, 20)):
        queue.read(
            Reference(place(f"b{offset}", offset), replace(made.batch, batch_id=f"b{offset}", closed_at=closed_at))
        )
    waiting = queue.next(0)
    assert waiting is not None
    assert waiting.record.batch_id == "b1"


def test_a_correction_may_be_older_within_its_bound() -> None:
    """The trainer and the batch's rewards are at version 3; corrections may be up to 2 versions older."""
    fresh = make_trainable_batch("b", (1.0, 0.0), version=3)
    for version, reason in [(3, None), (1, None), (0, "stale")]:
        late = make_trainable_batch("old", (-2.0,), version=version)
        member = replace(late.members[0], correction=True, offset=9)
        both = replace(
            fresh,
            batch=replace(fresh.batch, version=3),
            members=(*fresh.members, member),
            interactions=(*fresh.interactions, *late.interactions),
        )
        left = settled(queue_of(line_to(3)), both, current=3)
        assert reasons(left) == ({"old-0": reason} if reason else {})


def test_a_member_named_twice_is_trained_once_together_with_its_correction(made) -> None:
    members = (*made.members, made.members[0], replace(made.members[0], correction=True, reward=-1.0))
    left = settled(queue_of(line_to(0)), replace(made, members=members, interactions=(
        *made.interactions, made.interactions[0], made.interactions[0])))  # fmt: skip
    assert [(m.interaction_id, m.correction) for m in left.members] == [
        ("b-0", False), ("b-1", False), ("b-2", False), ("b-3", False), ("b-0", True),
    ]  # fmt: skip


@given(dropped=st.sets(st.integers(0, 5)), twice=st.integers(0, 5), corrected=st.integers(0, 5))
def test_a_repeated_step_trains_the_same_members(dropped, twice, corrected) -> None:
    made = made_once("b", (1.0, 0.0, 0.5, 1.0, 0.25, 0.75), 0)
    extra = (made.members[twice], replace(made.members[corrected], correction=True))
    whole = replace(made, members=(*made.members, *extra), interactions=(
        *made.interactions, made.interactions[twice], made.interactions[corrected]))  # fmt: skip
    queue = queue_of(line_to(0), min_members=1, baseline=BaselineKind.NONE)
    left = settled(queue, whole, found={at(i): Exclusion.MISSING_INTERACTION for i in dropped})
    if isinstance(left, TrainableBatch):
        step = recorded(left.place, queue.take(left))
        assert tuple(repeated(replace(made.batch, members=list(whole.members)), step)) == left.members


def test_exclusions_of_many_useless_batches_are_spread_over_several_step_records(made) -> None:
    """Exclusions of a step's own interactions cannot wait and are in its record too."""
    queue, useless = queue_of(line_to(3)), replace(made.batch, members=[])
    long, out = 2 * MOST_EXCLUSIONS + 5, {at(1): Exclusion.MISSING_INTERACTION}
    for offset in range(long):
        name = f"{offset:0100d}"
        queue.read(Reference(place(name, offset), replace(useless, batch_id=name), "again"))
    named = []
    for step in range(4):
        of_step = replace(of_version(made, 3), place=place(f"b{step}", long + step))
        left = settled(queue, replace(of_step, batch=replace(of_step.batch, batch_id=f"b{step}")), 3, found=out)
        exclusions = queue.take(left)
        assert len(Codec().encode(recorded(left.place, exclusions))) < MAX_RECORD_BYTES
        named.append([entry.offset for entry in exclusions if entry.topic == "online-batches"])
        assert [entry.group_id for entry in exclusions if entry.topic == "interactions"] == ["b-1"]
    assert [len(offsets) for offsets in named] == [MOST_EXCLUSIONS - 1, MOST_EXCLUSIONS - 1, 7, 0]
    assert [offset for offsets in named for offset in offsets] == list(range(long))


def test_a_batch_with_more_exclusions_than_a_record_can_name_is_excluded_as_a_whole(made) -> None:
    gone = [replace(made.members[0], interaction_id=f"gone-{n}", offset=100 + n) for n in range(MOST_EXCLUSIONS + 1)]
    found = {at(member.offset): Exclusion.MISSING_INTERACTION for member in gone}
    for too_many in (False, True):
        queue, members = queue_of(line_to(0)), (*made.members, *gone[: MOST_EXCLUSIONS + too_many])
        queue.read(Reference(made.place, replace(made.batch, members=list(members))))
        waiting = queue.next(0)
        assert waiting is not None
        left = queue.settle(waiting, {**found, **found_of(made)}, 0)
        if too_many:
            assert left is Exclusion.MISSING_INTERACTION
        else:
            assert isinstance(left, TrainableBatch) and len(queue.take(left)) == MOST_EXCLUSIONS


class WatchedReference:
    """A reference that counts how often its position is read."""

    replay_id = ""

    def __init__(self, place: StepInput, record) -> None:
        self._place, self.record, self.reads = place, record, 0

    @property
    def place(self) -> StepInput:
        self.reads += 1
        return self._place


def test_the_queue_reads_a_batch_without_a_search_of_those_that_wait(made) -> None:
    queue = queue_of(line_to(0))
    batches = [WatchedReference(place(f"b{n}", n), replace(made.batch, batch_id=f"b{n}")) for n in range(100)]
    for one in batches:
        queue.read(one)
    assert sum(one.reads for one in batches) <= 3 * len(batches)
    queue.read(Reference(place("b7", 100), replace(made.batch, batch_id="b7")))
    (entry,) = ended(queue)
    assert (entry.offset, entry.reason) == (100, Exclusion.DUPLICATE.value)


def recorded(trained: StepInput | None, exclusions, step: int = 1) -> TrainStep:
    """Return the record of a train step on an online batch."""
    return build(TrainStep, step=step, inputs=[trained] if trained else [], exclusions=exclusions)


KINDS = st.sampled_from(["good", "good", "good", "stale", "equal", "foreign", "duplicate", "gone", "rejected"])
ACTIONS = st.lists(st.sampled_from(["read", "read", "train", "train", "checkpoint", "stop"]), max_size=60)


@given(kinds=st.lists(KINDS, max_size=25), actions=ACTIONS, most=st.sampled_from([1, 2, MOST_EXCLUSIONS]))
@settings(max_examples=200)
def test_every_batch_ends_exactly_once_with_any_stops(kinds, actions, most) -> None:
    """A trainer that continues from the last checkpoint and the later steps repeats nothing and skips nothing."""
    log = synthetic_log(kinds)
    line = line_to(3)
    decide(line, GateVerdict.ROLL_BACK, 2)
    endings: dict[int, str] = {}
    queue, saved, since_saved = queue_of(line), TopicProgress(), []
    for action in [*actions, *(["read"] * len(kinds)), *(["train"] * len(kinds))]:
        if action == "checkpoint":
            saved, since_saved = queue.progress(), []
        elif action == "stop":
            queue = queue_of(line, saved)
            for step in since_saved:
                queue.observe_step(step)
        elif action == "read":
            offset = queue._read.get(0, 0)
            if offset < len(log):
                queue.read(Reference(place(log[offset].batch.batch_id, offset), log[offset].batch))
        else:
            step = train(queue, log, endings, most)
            since_saved.extend([step] if step else [])
    open_offsets = {w.place.offset for w in queue._waiting.values()} | {e.offset for e in ended(queue)}
    own = {offset for offset, made in enumerate(log) if made.batch.run_id == "run"}
    assert endings.keys() | open_offsets == own
    assert not endings.keys() & open_offsets
    trained = [log[offset].batch.batch_id for offset, ending in endings.items() if ending == "trained"]
    assert len(trained) == len(set(trained))
    wanted = {"stale": "stale", "equal": "no_signal", "gone": "missing_interaction", "rejected": "rejected_version"}
    for offset, ending in endings.items():
        assert ending in (wanted.get(kinds[offset], "trained"), "duplicate")


def train(queue: OnlineQueue, log: list[TrainableBatch], endings: dict[int, str], most: int) -> TrainStep | None:
    """Take one step on the next batch, as the loop does; None if there is no batch."""
    while (waiting := queue.next(2)) is not None:
        made = log[waiting.place.offset]
        found = found_of(made) if made.interactions else {at(i): Exclusion.MISSING_INTERACTION for i in range(2)}
        left = queue.settle(waiting, found, 2)
        if isinstance(left, Exclusion):
            queue.drop(waiting, left)
            continue
        step = recorded(left.place, queue.take(left, most))
        assert len(step.exclusions) <= most
        for entry in (*step.inputs, *step.exclusions):
            assert entry.offset not in endings, f"{entry.offset} ended twice"
            endings[entry.offset] = getattr(entry, "reason", "trained")
        return step
    return None


@cache
def made_once(name: str, rewards: tuple[float, ...], version: int) -> TrainableBatch:
    """Make a batch, cached for all examples of a property: making interactions takes most of the time."""
    return make_trainable_batch(name, rewards, version=version)


def synthetic_log(kinds: list[str]) -> list[TrainableBatch]:
    log: list[TrainableBatch] = []
    versions = {"stale": 1, "rejected": 3}
    for number, kind in enumerate(kinds):
        version = versions.get(kind, 2)
        made = made_once(f"b{number}", (1.0, 1.0) if kind == "equal" else (1.0, 0.0), version)
        same = [old for old in log if old.batch.run_id == "run"]
        name = same[0].batch.batch_id if kind == "duplicate" and same else f"b{number}"
        run_id = "other" if kind == "foreign" else "run"
        batch = replace(made.batch, batch_id=name, run_id=run_id, version=version, closed_at=number)
        log.append(replace(made, batch=batch, interactions=() if kind == "gone" else made.interactions))
    return log
