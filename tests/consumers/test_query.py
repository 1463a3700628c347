"""The results of the named queries."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.consumers.operate import audit_support as loop
from tests.consumers.product_support import SECOND, outcome, product_run, request
from tests.consumers.product_support import interaction as served
from tests.consumers.sink_support import START_US, fill, group, manifest, rollout, rows_of, small_run, step
from tests.records import build
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.query import QueryFailed, ask, named_queries
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.consumers.sink.tables import tables
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.records import (
    Group,
    LagCount,
    Mismatch,
    MismatchSlice,
    Mode,
    Rollout,
    Staleness,
    StepExclusion,
    StepInput,
    TrainStep,
    Turn,
    UserWish,
    WorstToken,
)

DATABASES = count()


class Tables:
    """The tables of a separate database, with the rows of some records."""

    def __init__(self, engine: SinkSettings, records: list[Any]) -> None:
        self.sink = engine.model_copy(update={"database": f"run{next(DATABASES)}"})
        fill(self.sink, records)

    def rows(self, name: str, **values: str) -> list[dict[str, Any]]:
        """Return the result of a named query."""
        answer = ask(self.sink, name, values)
        return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[list[Any]], Tables]]:
    """Make tables of records. A client stays open, so that the engine is not started again for each query."""
    engine = SinkSettings(path=str(tmp_path_factory.mktemp("engine")), http_port=0)
    with closing(connect(engine)):
        yield lambda records: Tables(engine, records)


@pytest.fixture(scope="module")
def small(over) -> Tables:
    return over(small_run())


@pytest.fixture(scope="module")
def product(over) -> Tables:
    return over(product_run())


def test_there_are_ten_queries_and_more_each_with_its_question():
    questions = named_queries()
    assert len(questions) >= 10
    assert all(question.endswith(("?", ".")) for question in questions.values())


def test_every_named_query_answers_on_empty_tables(over):
    empty = over([])
    for name in named_queries().keys() - {"table_columns"}:
        assert empty.rows(name) == [], name
    described = dict(ask(empty.sink, "table_columns").rows)
    assert described.keys() >= {table.name for table in tables().values()}
    assert "_offset Int64" in described["rollouts"]


def test_held_out_by_version(small):
    (row,) = small.rows("held_out_by_version")
    assert (row["version"], row["step"], row["finished"], row["failed"], row["success"]) == (1, 1, 1, 0, 1.0)


def test_the_interval_of_held_out_success_is_wilsons_and_shuffled_runs_are_the_control(over):
    """Newcombe 1998, table I: 81 of 263 solved gives 0.2553 to 0.3662; 15 of 148 gives 0.0624 to 0.1605."""

    def solved(run: str, n: int, of: int, version: int) -> list[Any]:
        made = [rollout(f"{run}/{version}/{i}", "g", Mode.EVAL, (version,), success=i < n) for i in range(of)]
        return [replace(each, run_id=run) for each in made]

    control = replace(group("g", solved("control", 1, 1, 1)), run_id="control", rewards_shuffled=True)
    twice = solved("run", 1, 1, 1)
    records = [
        *solved("run", 81, 263, 1),
        *twice,
        *solved("control", 10, 100, 1),
        *solved("control", 5, 48, 7),
        control,
    ]
    one, first, second = over(records).rows("held_out_by_version")[2::-1]
    assert [(r["run_id"], r["version"]) for r in (second, first, one)] == [("control", 1), ("control", 7), ("run", 1)]
    assert (one["finished"], one["success_low"], one["success_high"]) == (263, 0.2553, 0.3662)
    assert (one["control"], one["control_low"], one["control_high"]) == (0.1014, 0.0624, 0.1605)
    assert first["control_low"] is None and second["control"] is None


def test_each_step_is_reported_by_environment_lag_and_overlap(small):
    (reward,) = small.rows("reward_by_environment")
    assert (reward["environment"], reward["groups"], reward["rollouts"], reward["reward"]) == ("ledger", 1, 2, 0.5)
    # 1.96 standard errors of the rewards 1 and 0.
    assert (reward["reward_low"], reward["reward_high"], reward["success"]) == (-0.48, 1.48, 0.5)
    lags = [(r["step"], r["policy_lag"], r["tokens"], r["share"]) for r in small.rows("lag_by_step")]
    assert lags == [(1, 2, 10, 0.25), (1, 1, 0, 0.0), (1, 0, 30, 0.75)]
    (overlap,) = small.rows("overlap_by_step")
    assert (overlap["step"], overlap["trainer_busy_s"], overlap["overlap"]) == (1, 1.0, 0.5)


def test_served_and_refused_versions_are_reported_with_their_records(small):
    acks = [(r["version"], r["serving_version"], r["pause_ms"], r["offset"]) for r in small.rows("served_by_replica")]
    assert acks == [(1, 1, 4.0, 0), (2, 1, None, 1)]
    (refused,) = small.rows("refusals")
    assert (refused["reason"], refused["topic"], refused["offset"]) == ("digest", "tidemill.weights.acks", 1)
    (delta,) = small.rows("delta_by_version")
    assert (delta["version"], delta["delta_bytes"], delta["density"], delta["learning_rate"]) == (1, 300, 0.1, 0.001)
    (run,) = small.rows("runs")
    assert (run["run_id"], run["version"], run["step"]) == ("run", 1, 1)


def test_one_step_and_one_version_are_selected_by_number(small):
    told = small.rows
    (step,) = told("step", step="1")
    assert (step["version"], step["inputs_trained"], step["inputs_excluded"], step["offset"]) == (1, 1, 2, 0)
    (used,) = told("step_inputs", step="1", run="run")
    assert (used["group_id"], used["rewards"], used["topic"], used["offset"]) == ("g0", [1.0, 0.0], "groups", 0)
    assert [r["reason"] for r in told("step_exclusions", step="1")] == ["eval", "stale"]
    assert [(r["policy_lag"], r["tokens"]) for r in told("step_lag", step="1")] == [(0, 30), (2, 10)]
    (metric,) = told("step_metrics", step="1")
    assert (metric["metric"], metric["in_step"], metric["in_step_before"]) == ("policy_lag_bound", 4.0, None)
    (version,) = told("version", version="1", branch="main")
    assert (version["parent"], version["delta_bytes"], version["step"]) == (0, 300, 1)
    (delta,) = told("version_deltas", version="1")
    assert (delta["kind"], delta["base"], delta["chunks"], delta["offset"]) == ("delta", 0, 2, 0)
    assert [r["status"] for r in told("version_proofs", version="1")] == ["proved"]
    (size,) = told("delta_sizes")
    # 1000 elements of which 100 change: 1000 h(0.1) bits.
    assert (size["positions_bytes"], size["plain_bytes"], size["whole_bytes"]) == (59, 600, 2000)
    for absent in ("", "2"):
        assert told("step", step=absent) == told("version", version=absent) == []
    for wrong in ("one", "99999999999999999999", "1'"):
        for name in ("step", "version"):
            with pytest.raises(QueryFailed, match=f"parameter '{name}' of {name} is a number"):
                told(name, **{name: wrong})
    assert told("step", step="1", run="another") == []


def test_the_first_record_of_a_version_that_was_published_twice_counts(over):
    """As for replicas, which refuse the second one."""
    first, other = manifest(1), replace(manifest(1), run_id="newer")
    fork = replace(first, fingerprint="fork", delta_bytes=7, tensors=[replace(first.tensors[0], name="fork")])
    told = over([first, fork, other]).rows
    assert [row["fingerprint"] for row in told("version", version="1", run="run")] == [first.fingerprint]
    assert [row["run_id"] for row in told("version", version="1")] == ["newer"]
    assert [row["tensor"] for row in told("version_tensors", version="1", run="run")] == ["w"]
    assert [row["fingerprint"] for row in told("weight_graph", run="run")] == [first.fingerprint]
    for name in ("delta_by_version", "delta_sizes", "weight_versions"):
        assert [row["delta_bytes"] for row in told(name, run="run")] == [first.delta_bytes], name


def test_reward_by_step(small):
    (row,) = small.rows("reward_by_step")
    assert (row["step"], row["groups"], row["rollouts"], row["reward"], row["success"]) == (1, 1, 2, 0.5, 0.5)


def test_policy_lag(small):
    assert [(row["policy_lag"], row["share"]) for row in small.rows("policy_lag_histogram")] == [(0, 0.75), (2, 0.25)]
    (row,) = small.rows("max_policy_lag")
    assert (row["max_policy_lag"], row["bound"], row["mean_policy_lag"]) == (2, 4, 0.5)
    assert row["groups_excluded_as_stale"] == 1


def test_groups_and_spans(small):
    assert {(r["mode"], r["closed_by"]): (r["groups"], r["filled"]) for r in small.rows("groups_by_close_reason")} == {
        ("train", "size"): (2, 1.0),
        ("eval", "size"): (1, 0.5),
    }
    spans = {
        (r["mode"], r["versions"]): (r["rollouts"], r["in_trained_groups"])
        for r in small.rows("rollouts_spanning_versions")
    }
    assert spans == {("train", 0): (1, 0), ("train", 1): (3, 1), ("train", 2): (1, 1), ("eval", 1): (1, 0)}


def test_rollouts_and_groups_that_were_written_twice_count_once(small, over):
    records = small_run()
    twice = over([*records, *(one for one in records if isinstance(one, Group | Rollout))])
    for name in ("failures", "groups_by_close_reason", "rollouts_spanning_versions"):
        assert twice.rows(name) == small.rows(name), name


def test_versions_and_replicas(small):
    (version,) = small.rows("weight_versions")
    assert (version["version"], version["density"], version["bytes_per_change"]) == (1, 0.1, 3.0)
    assert (version["pause_ms_p50"], version["step_to_served_s_p95"], version["learning_rate"]) == (4.0, 2.0, 0.001)
    (replica,) = small.rows("replicas")
    assert (replica["serving"], replica["last_status"], replica["proved"], replica["refused"]) == (1, "refused", 1, 1)
    assert replica["fingerprints_equal"] is True or replica["fingerprints_equal"] == 1


def test_serving_lag_is_reported_by_region_without_the_trainers_records(over):
    def lag(region: str, stage: str, version: int, behind: int) -> Staleness:
        return Staleness("run", f"replica-{region}", region, stage, version, version, [LagCount(behind, 0)], 7)

    records = [
        lag("east", "train", 1, 9),
        lag("east", "serve", 4, 2),
        lag("east", "serve", 6, 0),
        lag("w", "serve", 5, 1),
    ]
    found = over(records).rows("serving_lag_by_region")
    told = [(row["region"], row["last_serving"], row["last_lag"], row["mean_lag"], row["max_lag"]) for row in found]
    assert told == [("east", 6, 0, 1.0, 2), ("w", 5, 1, 1.0, 1)]


def mismatch(step: int, engines: bool, k3: float) -> Mismatch:
    """A mismatch over 20 tokens of older weights and, with `engines`, over 10 of the step's own weights."""

    def part(name: str, tokens: int, k3: float, dimension: str = "all", value: str = "all") -> MismatchSlice:
        return build(MismatchSlice, part=name, dimension=dimension, value=value, tokens=tokens, k3=k3, cut=tokens // 10,
                     p99=k3, max=10 * k3)  # fmt: skip

    own = [part("engines", 10, 0.001), part("engines", 10, 0.001, "lag", "0")] if engines else []
    lagged = [part("lagged", 20, k3), part("lagged", 20, k3, "lag", "1")]
    worst = [build(WorstToken, record_id=f"g-{step}-{n}", segment=1, position=9, version=step - 2, lag=1,
                   sampler_logprob=-1.0, trainer_logprob=-1.0 - n * k3, sampler_experts=f"0,{n} 2,3")
             for n in (2, 1)]  # fmt: skip
    return build(Mismatch, step=step, version=step - 1, tokens=30, slices=[part("all", 30, k3), *own, *lagged],
                 worst=worst, alarms=["lagged/k3"] if k3 > 0.01 else [], seconds=0.1, at=START_US)  # fmt: skip


def test_a_mismatch_is_reported_by_step_and_part_and_by_kind_of_token(over):
    # The second step's mismatch is written twice, as after a restart: it counts once.
    found = over([mismatch(1, True, 0.004), *[mismatch(2, False, 0.02)] * 2])
    parts, kinds, worst = (found.rows(f"mismatch{name}") for name in ("", "_where", "_worst"))
    told = [(row["step"], row["part"], row["tokens"], row["k3"], row["cut"], row["alarms"]) for row in parts]
    assert told == [
        (1, "all", 30, 0.004, 0.1, []),
        (1, "engines", 10, 0.001, 0.1, []),
        (1, "lagged", 20, 0.004, 0.1, []),
        (2, "all", 30, 0.02, 0.1, []),
        (2, "lagged", 20, 0.02, 0.1, ["lagged/k3"]),
    ]
    assert [row["k3_of_staleness"] for row in parts] == [None, None, pytest.approx(0.003), None, None]
    by_lag = [row for row in kinds if row["dimension"] == "lag"]
    told = [(row["part"], row["value"], row["tokens"], row["mean_k3"], row["max_abs_dlogp"]) for row in by_lag]
    assert told == [("engines", "0", 10, 0.001, 0.01), ("lagged", "1", 40, pytest.approx(0.012), 0.2)]
    assert [(row["record_id"], row["abs_dlogp"]) for row in worst] == [
        ("g-2-2", pytest.approx(0.04)),
        ("g-2-1", pytest.approx(0.02)),
        ("g-1-2", pytest.approx(0.008)),
        ("g-1-1", pytest.approx(0.004)),
    ]
    assert (worst[0]["segment"], worst[0]["position"], worst[0]["version"], worst[0]["policy_lag"]) == (1, 9, 0, 1)
    assert (worst[0]["sampler_experts"], worst[0]["trainer_experts"]) == ("0,2 2,3", "")


def test_slow_rollouts_that_timed_out_are_missing_from_the_trained_ones(over):
    log = loop.RunLog()
    quick, slow = (log.issue(loop.task(name)) for name in ("quick", "slow"))
    for index in (0, 1):
        for number in (1, 2):
            log.put(replace(loop.turn(slow, index, 0), turn=number), at=slow.issued_at)
    for index in (0, 1):
        log.roll(loop.rollout(quick, index, float(index)), at=quick.issued_at)
    log.roll(loop.rollout(slow, 0, 1.0, turns=3, sampled_tokens=12), at=slow.issued_at)
    log.roll(replace(loop.rollout(slow, 1, None), failure="timeout: no result within 60 s"), at=slow.issued_at)
    log.train([0, 1])
    found = over([one.record for one in log.all()]).rows("fairness")
    told = [(r["turns"], r["dispatched"], r["finished"], r["out_of_time"], r["trained"]) for r in found]
    assert told == [(1, 2, 2, 0, 2), (3, 2, 1, 1, 1)]
    shares = [(r["share_dispatched"], r["share_trained"], r["difference"]) for r in found]
    assert shares == [(0.5, 0.6667, 0.1667), (0.5, 0.3333, -0.1667)]
    assert [row["sampled_tokens"] for row in found] == [4.0, 12.0]


def test_overlap_is_half_of_a_step_that_outlasts_the_rollouts_by_half(small):
    (row,) = small.rows("overlap")
    assert (row["trainer_busy_s"], row["both_busy_s"], row["overlap"]) == (1.0, 0.5, 0.5)


def test_every_rollout_has_one_ending(small):
    rows = small.rows("accounting")
    endings = {(r["mode"], r["ending"]): r["rollouts"] for r in rows}
    assert endings == {
        ("train", "trained"): 2,
        ("train", "excluded: stale"): 2,
        ("train", "open: in no group"): 1,
        ("eval", "evaluated"): 1,
    }
    assert all(r["trained_twice"] == r["held_out_trained"] == 0 for r in rows)
    totals = {r["mode"]: r["total"] for r in rows}
    assert totals == {mode: sum(n for (of, _), n in endings.items() if of == mode) for mode in ("train", "eval")}


def test_a_held_out_rollout_in_a_group_is_evaluated_as_in_an_audit(over):
    names = {"g0": "ab", "g1": "cd"}
    played = {g: [rollout(name, g, Mode.EVAL, success=name != "d" or None) for name in of] for g, of in names.items()}
    alone = rollout("e", "g2", Mode.EVAL)
    excluded = StepExclusion("g0", "groups", 0, 0, "eval", 2)
    groups = [group(name, members) for name, members in played.items()]
    told = over([*played["g0"], *played["g1"], alone, *groups, step(1, [], [excluded])])
    assert {row["ending"]: row["rollouts"] for row in told.rows("accounting")} == {
        "evaluated": 3,
        "failed": 1,
        "open: in no group": 1,
    }


def test_a_group_with_contradicting_records_is_counted_one_rollout_at_a_time(over):
    played = [
        rollout(name, of) for of, names in {"g0": "ab", "g1": "cd", "g2": "ef", "g3": "h"}.items() for name in names
    ]
    a, b, c, _late, e, f, h = played
    records = [
        *[*played, a],  # The first is written twice.
        *[group("g0", [a, b]), group("g1", [c]), group("g2", [e, f]), group("g2", [e, f])],
        group("g3", [h, rollout("never read", "g3")]),
        step(
            1, [StepInput(f"g{n}", "groups", 0, n) for n in range(3)], [StepExclusion("g3", "groups", 0, 4, "stale", 2)]
        ),
        step(2, [StepInput("g2", "groups", 0, 3)], []),
    ]
    told = over(records).rows("accounting")
    assert {row["ending"]: (row["rollouts"], row["trained_twice"]) for row in told} == {
        "excluded: stale": (1, 0),
        "more than one ending": (2, 2),
        "open: in no group": (1, 0),
        "trained": (3, 0),
    }
    assert {row["total"] for row in told} == {7}


def test_overlap_is_computed_from_the_union_of_all_spans(over):
    draw = random.Random(7)
    spans = []
    for _ in range(60):
        began = draw.randrange(0, 20_000_000, 250_000)
        spans.append((began, began + draw.choice([0, 1, 250_000, 900_000, 1_000_000, 3_100_000])))
    rollouts = [
        replace(rollout(f"r{n}", "g"), started_at=START_US + began, finished_at=START_US + ended)
        for n, (began, ended) in enumerate(spans)
    ]
    times = {1: (100_000, 2_750_000), 2: (2_750_001, 9_000_000), 3: (18_000_000, 40_000_000)}
    steps = [
        replace(step(n, [], []), started_at=START_US + began, finished_at=START_US + ended)
        for n, (began, ended) in times.items()
    ]
    told = over([*rollouts, *steps]).rows("overlap_by_step")
    busy = {}
    for n, (began, ended) in times.items():
        busy[n], reached = 0, began
        for first, last in sorted(spans):
            busy[n] += max(0, min(last, ended) - max(first, reached))
            reached = max(reached, min(last, ended))
    assert {row["step"]: row["both_busy_s"] for row in told} == {n: round(us / 1e6, 3) for n, us in busy.items()}


def test_the_work_of_a_step_equals_a_computation_by_hand(over):
    """A parameter costs 2 FLOPs per token, a pair 0.1 TFLOP. Every rollout has 3 tokens before its sampled ones."""
    sizes = {"flops/body": 1e12, "flops/head": 0.5e12, "flops/pair": 0.1e12}
    spent = {"flops/forward": 10e12, "flops/backward": 20e12, "flops/frozen": 2e12}
    beside = {"flops/recomputed": 3e12, "flops/saved": 4e12}
    records = [
        replace(record, metrics={**record.metrics, **sizes, **spent, **beside})
        if isinstance(record, TrainStep)
        else record
        for record in small_run()
    ]
    # Rollout "a" has a turn that was sampled twice; "g" has no result yet.
    sampled = [("a", 2), ("a", 2), ("g", 4)]
    turns = [build(Turn, rollout_id=name, task_id="task-g0", n_tokens=n) for name, n in sampled]
    rows = over([*records, *turns]).rows("compute")
    two, four = 2 * 1.5 * 2 + 0.1 * (4 + 5), 2 * 1.5 * 4 + 0.1 * (4 + 5 + 6 + 7)
    before = 2 * 1.0 * 3 + 0.1 * (1 + 2 + 3)
    again = 2 * 1.5 * 2
    assert rows == [
        {
            "run_id": "run",
            "step": 1,
            "sampling_tflop": pytest.approx(two + four),
            "prefilling_tflop": pytest.approx(2 * before),
            "training_tflop": 32.0,
            "evaluating_tflop": pytest.approx(two + before),
            "wasted_tflop": pytest.approx(2 * (two + before) + again + 3),
            "excluded_or_failed_tflop": pytest.approx(2 * (two + before)),
            "sampled_again_tflop": pytest.approx(again),
            "recomputed_tflop": 3.0,
            "saved_tflop": 4.0,
            "inference_to_training": pytest.approx((two + four + 2 * before) / 32, abs=1e-4),
        },
        {
            "run_id": "run",
            "step": None,
            "sampling_tflop": pytest.approx(two + 2 * 1.5 * 4 + 0.1 * (1 + 2 + 3 + 4)),
            "prefilling_tflop": pytest.approx(before),
            **dict.fromkeys(
                (
                    "training_tflop",
                    "evaluating_tflop",
                    "wasted_tflop",
                    "excluded_or_failed_tflop",
                    "sampled_again_tflop",
                    "recomputed_tflop",
                    "saved_tflop",
                ),
                0.0,
            ),
            "inference_to_training": None,
        },
    ]


def test_steps_from_before_the_sizes_were_recorded_have_no_work(small):
    assert small.rows("compute") == []


def test_failures(small):
    assert [(r["what"], r["reason"], r["times"]) for r in small.rows("failures")] == [
        ("failed rollout", "replica gone", 1),
        ("refused version", "digest", 1),
    ]


def test_a_failed_rollout_and_a_dead_letter_that_are_repeated_are_listed_once(over):
    failed = rollout("a", "g0", success=None)
    letters = [
        Row(
            "tidemill.groups.dlq",
            0,
            at,
            1_700_000_000_123,
            b"g",
            DeadLetter("tidemill.groups", 0, 7, 0, why, by, b""),
            0,
        )
        for at, (why, by) in enumerate([("torn", "trainer"), ("torn", "sink"), ("other", "sink")])
    ]
    made = over([])
    with closing(connect(made.sink)) as client:
        rows = [*rows_of([failed, failed, rollout("b", "g0", success=None)]), *letters]
        Writer(client, made.sink.database, made.sink.table_engine).write(rows, {})
    for what, ids in (("failed rollout", ["a", "b"]), ("dead letter", ["0 7", "0 7"])):
        found = made.rows("failure_records", what=what)
        assert sorted(row["id"] for row in found) == ids
        lines = [row for row in made.rows("failures") if row["what"] == what]
        assert sum(line["times"] for line in lines) == len(found)


def test_feedback_to_served_counts_what_was_trained_up_to_the_first_version_that_contains_it(product):
    (row,) = product.rows("feedback_to_served")
    assert (row["version"], row["signals"], row["seconds_p50"], row["seconds_p95"]) == (2, 1, 30.0, 30.0)


def test_signal_coverage(product):
    rows = {
        (r["arm"], r["signal"]): (r["interactions"], r["share"], r["events"]) for r in product.rows("signal_coverage")
    }
    assert rows == {
        ("stable", "thumb"): (2, 0.5, 3),
        ("stable", "edit_made"): (1, 0.25, 1),
        ("stable", "none"): (2, 0.5, 0),
        ("canary", "thumb"): (1, 0.3333, 1),
        ("canary", "none"): (2, 0.6667, 0),
    }


def test_every_interaction_has_one_ending(product):
    rows = {(r["arm"], r["ending"]): (r["interactions"], r["corrected"]) for r in product.rows("outcomes_by_reason")}
    assert rows == {
        ("stable", "reward"): (2, 1),
        ("stable", "excluded: no_signal"): (1, 0),
        ("stable", "excluded: bot"): (1, 0),
        ("canary", "reward"): (2, 0),
        ("canary", "open"): (1, 0),
    }
    assert all(row["ended_twice"] == 0 for row in product.rows("outcomes_by_reason"))


def test_two_endings_and_an_outcome_without_interaction_are_reported(over):
    one, gone = served("i0", "ann"), served("i1", "bob")
    records = [one, outcome(one, 1.0), outcome(one, None, "bot"), outcome(gone, 1.0)]
    rows = {r["ending"]: r["ended_twice"] for r in over(records).rows("outcomes_by_reason")}
    assert rows == {"reward": 1, "outcome of an interaction that is gone": 0}


def test_arms(product):
    rows = {row["arm"]: row for row in product.rows("arms")}
    assert [(arm, r["interactions"], r["rewards"], r["reward"]) for arm, r in sorted(rows.items())] == [
        ("canary", 2, 2, 1.0),
        ("stable", 4, 2, 1.0),
    ]
    assert (rows["canary"]["edit_rate"], rows["canary"]["question_rate"]) == (0.5, None)
    assert rows["canary"]["latency_ms_p95"] == 100.0


def test_gate_decisions_come_with_their_numbers(product):
    told = [(row["verdict"], row["version"], row["reason"], row["numbers"]) for row in product.rows("gate")]
    assert told == [("canary", 2, "on trial", {"share": 0.1}), ("promote", 2, "better", {})]


def test_selection_compares_served_with_trained(product):
    rows = [
        (r["sequence"], r["measure"], r["served"], r["trained"], r["difference"]) for r in product.rows("selection")
    ]
    assert rows == [(0, "reward", 0.25, 0.5, 0.25), (1, "reward", 0.25, 0.5, 0.25)]


def test_the_account_of_product_traffic_closes(product):
    (row,) = product.rows("online_accounting")
    assert (row["served"], row["rewards"], row["excluded"], row["open"]) == (7, 4, 2, 1)
    assert (row["corrections"], row["carried_a_reward"]) == (1, 5)
    assert (row["batched"], row["batched_twice"], row["batched_and_erased"]) == (3, 0, 0)
    assert (row["dropped"], row["waiting"]) == (1, 1)
    assert (row["trained"], row["left_out"]) == (1, 1)


def test_the_account_closes_after_an_erasure_too(over):
    erasure = request("user0", UserWish.ERASE, START_US + 60 * SECOND)
    (row,) = over([*product_run(), erasure]).rows("online_accounting")
    assert (row["served"], row["carried_a_reward"]) == (6, 4)
    assert (row["batched"], row["batched_and_erased"], row["dropped"], row["waiting"]) == (3, 1, 1, 1)
