"""The named queries and who answers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.consumers.product_support import SECOND, outcome, product_run, request
from tests.consumers.product_support import interaction as served
from tests.consumers.sink_support import START_US, rows_of, small_run
from tests.records import build
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.query import QueryFailed, QueryResult, ask, named_queries, sql_of
from tidemill.consumers.sink.server import QueryServer
from tidemill.consumers.sink.state_file import SinkState, read_state, write_state
from tidemill.consumers.sink.writer import Writer
from tidemill.schemas.address import bind
from tidemill.schemas.records import LagCount, Staleness, TrainStep, Turn, UserWish

ROOT = Path(__file__).parents[2]
HOLDS_ENGINE = """
import sys
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
client = connect(SinkSettings(path=sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def filled(path: Path, records: list[Any]) -> SinkSettings:
    sink = SinkSettings(path=str(path), http_port=0)
    client = connect(sink)
    Writer(client, sink.database, sink.table_engine).write(rows_of(records), {})
    client.close()
    return sink


def answers_over(path: Path, records: list[Any]) -> dict[str, list[dict[str, Any]]]:
    sink = filled(path, records)
    # While a client is open, the engine is not started again for each query.
    with closing(connect(sink)):
        return {name: table(ask(sink, name)) for name in named_queries()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return answers_over(tmp_path_factory.mktemp("run"), small_run())


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return answers_over(tmp_path_factory.mktemp("product"), product_run())


def table(answer: QueryResult) -> list[dict[str, Any]]:
    return [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]


def test_there_are_ten_queries_and_more_each_with_its_question():
    questions = named_queries()
    assert len(questions) >= 10
    assert all(question.endswith(("?", ".")) for question in questions.values())


def test_every_named_query_answers_on_empty_tables(tmp_path: Path):
    sink = filled(tmp_path / "empty", [])
    for name in named_queries():
        assert ask(sink, name).rows == [], name


def test_held_out_by_version(answers):
    (row,) = answers["held_out_by_version"]
    assert (row["version"], row["step"], row["finished"], row["failed"], row["success"]) == (1, 1, 1, 0, 1.0)


def test_reward_by_step(answers):
    (row,) = answers["reward_by_step"]
    assert (row["step"], row["groups"], row["rollouts"], row["reward"], row["success"]) == (1, 1, 2, 0.5, 0.5)


def test_policy_lag(answers):
    assert [(row["policy_lag"], row["share"]) for row in answers["policy_lag_histogram"]] == [(0, 0.75), (2, 0.25)]
    (row,) = answers["max_policy_lag"]
    assert (row["max_policy_lag"], row["bound"], row["mean_policy_lag"]) == (2, 4, 0.5)
    assert row["groups_excluded_as_stale"] == 1


def test_groups_and_spans(answers):
    assert {(r["mode"], r["closed_by"]): (r["groups"], r["filled"]) for r in answers["groups_by_close_reason"]} == {
        ("train", "size"): (2, 1.0),
        ("eval", "size"): (1, 0.5),
    }
    spans = {
        (r["mode"], r["versions"]): (r["rollouts"], r["in_trained_groups"])
        for r in answers["rollouts_spanning_versions"]
    }
    assert spans == {("train", 0): (1, 0), ("train", 1): (3, 1), ("train", 2): (1, 1), ("eval", 1): (1, 0)}


def test_versions_and_replicas(answers):
    (version,) = answers["weight_versions"]
    assert (version["version"], version["density"], version["bytes_per_change"]) == (1, 0.1, 3.0)
    assert (version["pause_ms_p50"], version["step_to_served_s_p95"], version["learning_rate"]) == (4.0, 2.0, 0.001)
    (replica,) = answers["replicas"]
    assert (replica["serving"], replica["last_status"], replica["proved"], replica["refused"]) == (1, "refused", 1, 1)
    assert replica["fingerprints_equal"] is True or replica["fingerprints_equal"] == 1


def test_serving_lag_is_told_by_region_and_the_trainers_records_are_left_out(tmp_path: Path):
    def lag(region: str, stage: str, version: int, behind: int) -> Staleness:
        return Staleness("run", f"replica-{region}", region, stage, version, version, [LagCount(behind, 0)], 7)

    records = [
        lag("east", "train", 1, 9),
        lag("east", "serve", 4, 2),
        lag("east", "serve", 6, 0),
        lag("w", "serve", 5, 1),
    ]
    found = table(ask(filled(tmp_path / "lags", records), "serving_lag_by_region"))
    told = [(row["region"], row["last_serving"], row["last_lag"], row["mean_lag"], row["max_lag"]) for row in found]
    assert told == [("east", 6, 0, 1.0, 2), ("w", 5, 1, 1.0, 1)]


def test_overlap_is_half_of_a_step_that_outlasts_the_rollouts_by_half(answers):
    (row,) = answers["overlap"]
    assert (row["trainer_busy_s"], row["both_busy_s"], row["overlap"]) == (1.0, 0.5, 0.5)


def test_every_rollout_has_one_ending(answers):
    endings = {(r["mode"], r["ending"]): r["rollouts"] for r in answers["accounting"]}
    assert endings == {
        ("train", "trained"): 2,
        ("train", "excluded: stale"): 2,
        ("train", "open: in no group"): 1,
        ("eval", "excluded: eval"): 1,
    }
    assert all(r["trained_twice"] == r["held_out_trained"] == 0 for r in answers["accounting"])


def test_the_work_of_a_step_is_what_is_computed_by_hand(tmp_path: Path):
    """A parameter costs 2 FLOPs a token, a pair 0.1 T. Every rollout has 3 other tokens before its sampled ones."""
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
    rows = table(ask(filled(tmp_path / "work", [*records, *turns]), "compute"))
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


def test_steps_from_before_the_sizes_were_recorded_have_no_work(answers):
    assert answers["compute"] == []


def test_failures(answers):
    assert [(r["what"], r["reason"], r["times"]) for r in answers["failures"]] == [
        ("failed rollout", "replica gone", 1),
        ("refused version", "digest", 1),
    ]


def test_feedback_to_served_counts_what_was_trained_up_to_the_first_version_that_contains_it(product):
    (row,) = product["feedback_to_served"]
    assert (row["version"], row["signals"], row["seconds_p50"], row["seconds_p95"]) == (2, 1, 30.0, 30.0)


def test_signal_coverage(product):
    rows = {(r["arm"], r["signal"]): (r["interactions"], r["share"], r["events"]) for r in product["signal_coverage"]}
    assert rows == {
        ("stable", "thumb"): (2, 0.5, 3),
        ("stable", "edit_made"): (1, 0.25, 1),
        ("stable", "none"): (2, 0.5, 0),
        ("canary", "thumb"): (1, 0.3333, 1),
        ("canary", "none"): (2, 0.6667, 0),
    }


def test_every_interaction_has_one_ending(product):
    rows = {(r["arm"], r["ending"]): (r["interactions"], r["corrected"]) for r in product["outcomes_by_reason"]}
    assert rows == {
        ("stable", "reward"): (2, 1),
        ("stable", "excluded: no_signal"): (1, 0),
        ("stable", "excluded: bot"): (1, 0),
        ("canary", "reward"): (2, 0),
        ("canary", "open"): (1, 0),
    }
    assert all(row["ended_twice"] == 0 for row in product["outcomes_by_reason"])


def test_two_endings_and_an_outcome_without_interaction_are_seen(tmp_path: Path):
    one, gone = served("i0", "ann"), served("i1", "bob")
    records = [one, outcome(one, 1.0), outcome(one, None, "bot"), outcome(gone, 1.0)]
    rows = {r["ending"]: r["ended_twice"] for r in table(ask(filled(tmp_path, records), "outcomes_by_reason"))}
    assert rows == {"reward": 1, "outcome of an interaction that is gone": 0}


def test_arms(product):
    rows = {row["arm"]: row for row in product["arms"]}
    assert [(arm, r["interactions"], r["rewards"], r["reward"]) for arm, r in sorted(rows.items())] == [
        ("canary", 2, 2, 1.0),
        ("stable", 4, 2, 1.0),
    ]
    assert (rows["canary"]["edit_rate"], rows["canary"]["question_rate"]) == (0.5, None)
    assert rows["canary"]["latency_ms_p95"] == 100.0


def test_gate_decisions_come_with_their_numbers(product):
    told = [(row["verdict"], row["version"], row["reason"], row["numbers"]) for row in product["gate"]]
    assert told == [("canary", 2, "on trial", {"share": 0.1}), ("promote", 2, "better", {})]


def test_selection_is_served_beside_trained(product):
    rows = [(r["sequence"], r["measure"], r["served"], r["trained"], r["difference"]) for r in product["selection"]]
    assert rows == [(0, "reward", 0.25, 0.5, 0.25), (1, "reward", 0.25, 0.5, 0.25)]


def test_the_account_of_product_traffic_closes(product):
    (row,) = product["online_accounting"]
    assert (row["served"], row["rewards"], row["excluded"], row["open"]) == (7, 4, 2, 1)
    assert (row["corrections"], row["carried_a_reward"]) == (1, 5)
    assert (row["batched"], row["batched_twice"], row["batched_and_erased"]) == (3, 0, 0)
    assert (row["dropped"], row["waiting"]) == (1, 1)
    assert (row["trained"], row["left_out"]) == (1, 1)


def test_the_account_closes_after_an_erasure_too(tmp_path: Path):
    erasure = request("user0", UserWish.ERASE, START_US + 60 * SECOND)
    (row,) = table(ask(filled(tmp_path, [*product_run(), erasure]), "online_accounting"))
    assert (row["served"], row["carried_a_reward"]) == (6, 4)
    assert (row["batched"], row["batched_and_erased"], row["dropped"], row["waiting"]) == (3, 1, 1, 1)


def test_the_page_lists_every_query_with_its_question():
    page = (ROOT / "docs/research.md").read_text("utf-8")
    for name, question in named_queries().items():
        assert f"| `{name}` | {question} |" in page


@pytest.mark.parametrize(
    "name",
    ["feedback_to_served", "signal_coverage", "gate", "online_accounting", "selection", "arms", "outcomes_by_reason"],
)
def test_the_dashboard_shows_the_named_query(name: str):
    panels = json.loads((ROOT / "compose" / "dashboards" / "tidemill.json").read_text("utf-8"))["panels"]
    body = sql_of(name).split("\n", 1)[1].strip()
    assert any(body in target["rawSql"] for panel in panels for target in panel["targets"])


def test_a_running_sink_is_asked_over_http_and_a_dead_ones_state_is_not_believed(tmp_path: Path):
    sink = filled(tmp_path / "run", small_run())
    client = connect(sink)
    try:
        with QueryServer(sink) as server:
            write_state(sink.directory, SinkState(os.getpid(), server.url, sink.database))
            assert ask(sink, "SELECT count() FROM rollouts").rows == [[6]]
            assert ask(sink, "SELECT 1 AS a FORMAT CSVWithNames") == QueryResult(["CSVWithNames"], [['"a"\n1\n']])
            with pytest.raises(QueryFailed, match="READONLY"):
                ask(sink, "DROP TABLE rollouts")
    finally:
        client.close()
    assert read_state(sink.directory) is not None
    assert ask(sink, "SELECT count() FROM rollouts").rows == [[6]]


def test_a_stranger_at_the_sinks_port_is_not_asked(tmp_path: Path):
    sink = filled(tmp_path / "run", small_run())
    client = connect(sink)
    try:
        with QueryServer(sink) as server:
            write_state(sink.directory, SinkState(1, server.url, sink.database))
            assert ask(sink, "SELECT count() FROM tasks").rows == [[3]]
    finally:
        client.close()


def test_a_server_out_of_reach_is_a_clear_error():
    with bind("127.0.0.1", 0, "sink.http_port") as listener:
        port = listener.getsockname()[1]
    with pytest.raises(QueryFailed, match="did not answer"):
        ask(SinkSettings(host="127.0.0.1", port=port), "SELECT 1")


def test_a_directory_that_another_process_owns_is_a_clear_error(tmp_path: Path):
    sink = filled(tmp_path / "run", [])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_ENGINE, sink.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(QueryFailed, match="another process has them open"):
            ask(sink, "SELECT 1")
        holder.communicate("")


def test_missing_tables_and_unknown_names_say_what_to_do(tmp_path: Path):
    with pytest.raises(QueryFailed, match="start `tidemill sink`"):
        ask(SinkSettings(path=str(tmp_path / "absent")), "SELECT 1")
    assert not (tmp_path / "absent").exists()
    with pytest.raises(QueryFailed, match="did you mean accounting"):
        sql_of("acounting")
