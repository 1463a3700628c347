"""The view Users: satisfaction, the gate, endings, and one interaction from the thumb to the version."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.consumers.sink_support import PREFIX
from tests.consumers.view.run_records import ONLINE_STEP, STEPS, SimulatedLoop, page_rows
from tidemill.consumers.operate.trace.interaction import InteractionTrace
from tidemill.consumers.operate.trace.versions import VersionHistory
from tidemill.consumers.sink.query import ask
from tidemill.consumers.sink.rows import DeadLetter, DeletedKey, Row
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.consumed import ConsumedRecord, Position

if TYPE_CHECKING:
    from tests.consumers.view.conftest import View


@cache
def rows_of_the_run() -> list[Row]:
    """Return the rows of the page's run."""
    return page_rows(SimulatedLoop())


def traced(interaction: str) -> dict[str, Any]:
    """Return the output of `tidemill trace` for an interaction of the page's run."""
    history, trace = VersionHistory("run"), InteractionTrace(interaction)
    reached: Counter[str] = Counter()
    for row in rows_of_the_run():
        if isinstance(row.record, DeadLetter | DeletedKey):
            continue
        topic = Topic(row.topic.removeprefix(PREFIX))
        located = ConsumedRecord(topic, 0, reached[topic], row.timestamp_ms, row.key, b"value", row.record)
        reached[topic] += 1
        history.observe(located)
        trace.observe(located)
    return trace.path(history)


@pytest.mark.parametrize("interaction", [f"i{n}" for n in range(7)])
def test_the_path_names_the_offsets_that_trace_names(view: View, interaction: str):
    told = traced(interaction)
    expected = {
        "served": [told["served"]["place"]],
        "feedback": [event["place"] for event in told["feedback"]],
        "outcome": [end["place"] for end in told["outcomes"]],
        "batch": [batch["place"] for batch in told["batches"]],
        "step": [batch["ended"].step for batch in told["batches"]],
        "version": [made.manifest_place for made in told["versions"]],
        "decision": [decision["place"] for made in told["versions"] for decision in made.decisions],
    }
    answer = ask(view.sink, "interaction_path", {"interaction": interaction, "run": "run"})
    found: dict[str, list[Position | None]] = {}
    for row in answer.rows:
        stage, _at, _event, _run, _version, topic, partition, offset = row
        found.setdefault(stage, []).append(Position(topic.removeprefix(PREFIX), partition, offset))
    replicas = found.pop("replica", [])
    assert found == {stage: places for stage, places in expected.items() if places}
    assert len(replicas) == sum(len(made.proved_by) for made in told["versions"])


def test_the_path_says_how_each_signal_and_each_batch_ended(view: View):
    def events(interaction: str, stage: str) -> list[str]:
        return [
            row[2] for row in ask(view.sink, "interaction_path", {"interaction": interaction}).rows if row[0] == stage
        ]

    assert events("i0", "feedback") == ["thumb 1 from sdk: counted 1 in the reward"]
    assert events("i0", "step") == [f"step {ONLINE_STEP} trained on it, from version {STEPS}"]
    assert events("i1", "step") == [f"step {ONLINE_STEP} left it out: stale"]
    assert events("i3", "outcome") == ["excluded: bot"]
    assert [events("i5", stage) for stage in ("served", "outcome")] == [["by replica-0, arm canary, stop"], []]
    assert ask(view.sink, "interaction_path", {"interaction": "nobody"}).rows == []


def test_satisfaction_is_the_mean_reward_with_its_interval(view: View):
    answer = view.query("reward_by_arm")
    rows = {row[answer.columns.index("arm")]: dict(zip(answer.columns, row, strict=True)) for row in answer.rows}
    assert {arm: (row["version"], row["interactions"], row["reward"]) for arm, row in rows.items()} == {
        "canary": (STEPS, 2, 1.0),
        "stable": (STEPS, 4, 0.0),
    }
    # Two rewards, +1 and -1: their deviation is √2, and the mean's is 1.
    assert (rows["stable"]["low"], rows["stable"]["high"]) == (-1.96, 1.96)


def test_the_list_is_filtered_by_every_parameter(view: View):
    def listed(**values: str) -> list[str]:
        answer = ask(view.sink, "interaction_list", values)
        return [row[answer.columns.index("interaction_id")] for row in answer.rows]

    assert listed() == [f"i{n}" for n in reversed(range(7))]
    assert listed(arm="canary") == ["i6", "i5", "i4"]
    assert listed(ending="reward", arm="stable") == ["i1", "i0"]
    assert (listed(ending="open"), listed(ending="excluded: bot")) == (["i5"], ["i3"])
    assert listed(user="user2") == ["i2"]
    assert (listed(version=str(STEPS), run="run")[0], listed(version="1"), listed(run="other")) == ("i6", [], [])
    assert listed(before="2023-11-14 22:14:33") == ["i2", "i1", "i0"]


def test_users_appear_by_pseudonym_and_their_text_is_data(view: View):
    page = view.get("/users/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert page.status_code == 200 and "&lt;script&gt;alert(1)" in page.text and "<script>alert" not in page.text
    panel = view.get("/panel/interaction_path", params={"interaction": "' OR 1 --"})
    assert "No rows yet" in panel.text
