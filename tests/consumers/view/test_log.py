"""The view Log: topics, rates, dead letters, and the page of one record."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

import pytest

from tests.consumers.view.run_records import HOSTILE, LONG
from tidemill.consumers.sink.query import ask, named_sql
from tidemill.consumers.sink.tables import tables
from tidemill.consumers.view.log import topic_of
from tidemill.schemas.catalogue import Names, Topic

if TYPE_CHECKING:
    from tests.consumers.view.conftest import View

RECORD = "/log/record?topic={}&partition={}&offset={}"


@pytest.mark.parametrize("name", ["log_topics", "log_partitions", "log_records", "log_rates"])
def test_no_table_is_forgotten(name: str):
    sql = named_sql()[name]
    assert set(re.findall(r"FROM `?(\w+)`?", sql)) >= {table.name for table in tables().values()}


@pytest.mark.parametrize("prefix", ["", "tidemill.", "replay-1.tidemill."])
def test_every_topic_has_a_prefix_and_a_place(prefix: str, view: View):
    names = [Names(prefix).of(topic) for topic in Topic]
    assert [topic_of(name) for name in names] == [(prefix, topic) for topic in Topic]
    assert topic_of(Names(prefix).dead_letter(Topic.GROUPS)) == (prefix, Topic.GROUPS)
    # The query finds the same prefixes.
    expression = re.search(r"extract\(_topic, (concat\(.*?\))\) AS prefix", named_sql()["log_prefixes"], re.DOTALL)
    assert expression is not None
    sql = f"SELECT DISTINCT extract(arrayJoin({names}) AS name, {expression[1]}) AS prefix"
    assert ask(view.sink, sql).rows == [[prefix]]


def test_the_topics_have_the_rows_of_the_tables(view: View):
    rows = {row[0]: row for row in view.query("log_topics").rows}
    (held,) = view.query("SELECT count() FROM rollouts").rows
    (ticks,) = view.query("SELECT count() FROM ticks WHERE _topic = 'tidemill.rollouts'").rows
    columns = view.query("log_topics").columns
    assert rows["tidemill.rollouts"][columns.index("rows")] == held[0] + ticks[0]
    assert rows["tidemill.rollouts"][columns.index("read_up_to")] == held[0] + ticks[0]
    partitions = ask(view.sink, "log_partitions", {"topic": "tidemill.groups"}).rows
    assert [row[:2] for row in partitions] == [["tidemill.groups", 0]]
    listed = ask(view.sink, "log_records", {"topic": "tidemill.groups", "before": "3"}).rows
    assert [row[2] for row in listed] == [2, 1, 0]


def test_the_rates_add_up_to_the_rows_in_sixty_intervals(view: View):
    rows = view.query("log_rates").rows
    topics = view.query("log_topics")
    total = sum(row[topics.columns.index("rows")] for row in topics.rows)
    assert len({minutes for _, minutes, _ in rows}) == 60
    # All records of the page's run came within a minute, the shortest period shown: one second per interval.
    assert sum(rate for *_, rate in rows) == pytest.approx(total)


def test_results_reach_the_offsets_of_the_records_that_they_name(view: View):
    reached = {(row[0], row[1]): row[2:4] for row in view.query("log_results").rows}
    assert reached == {
        ("group assembly", "tidemill.rollouts"): [24 * 4, 0],
        ("feedback join", "tidemill.interactions"): [7, 0],
        ("trainer", "tidemill.groups"): [24, 0],
        ("trainer", "tidemill.online-batches"): [1, 0],
    }


def test_a_dead_letter_leads_from_the_list_to_its_bytes(view: View):
    panel = view.get("/panel/log_dead_letters").text
    assert "0x00FF3C736372697074" in panel and "<script>document" not in panel
    assert RECORD.format("tidemill.rollouts", 3, 17).replace("&", "&amp;") in panel
    page = view.get(RECORD.format("tidemill.rollouts.dlq", 0, 0)).text
    assert "0x" + (b"\x00\xff" + HOSTILE.encode()).hex().upper() in page
    assert "<script>document" not in page and "{{ 7 * 7 }}" in html.unescape(page)


def test_a_record_shows_every_field_and_leads_to_what_it_names(view: View):
    page = view.get(RECORD.format("tidemill.train.steps", 0, 1)).text
    (table,) = (table for table in tables().values() if table.name == "train_steps")
    names = {column.name.partition(".")[0] for column in table.all_columns}
    assert names <= set(re.findall(r"<(?:dt|h2)>([\w.]+)</", page))
    assert RECORD.format("tidemill.groups", 0, 1).replace("&", "&amp;") in page
    # A reference within a record has no prefix.
    assert view.get(RECORD.format("groups", 0, 1)).status_code == 200
    assert "next in train_steps" in page and "previous" not in page


def test_long_values_come_in_parts(view: View):
    (place,) = view.query("SELECT _offset, length(token_ids) FROM rollouts WHERE rollout_id = 'g5-0-2'").rows
    address = RECORD.format("tidemill.rollouts", 0, place[0])
    page = view.get(address)
    assert len(page.content) < 100_000
    last = -(-place[1] // 200)
    assert f"part 1 of {last}" in page.text
    ids = f"SELECT arraySlice(token_ids, {(last - 1) * 200 + 1}) FROM rollouts WHERE rollout_id = 'g5-0-2'"
    end = view.get(f"{address}&field=token_ids&part={last}").text
    assert str(view.query(ids).rows[0][0]) in end and "next part" not in end and "previous part" in end
    assert place[1] > len(LONG)


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("topic=tidemill.tasks&partition=0&offset=9999", 404, "no record here"),
        ("topic=../../etc/passwd&partition=0&offset=0", 404, "no topic of Tidemill"),
        ("topic=tidemill.tasks&partition=0&offset=1%20OR%201", 400, "whole numbers"),
        ("topic=tidemill.tasks&partition=-1&offset=0", 400, "whole numbers"),
        ("topic=tidemill.tasks&partition=0&offset=0&part=0", 400, "whole numbers"),
        ("topic=tidemill.tasks&partition=999999999&offset=999999999999999999", 404, "no record here"),
        ("", 404, "no topic of Tidemill"),
        ("topic='%20OR%20''='.tasks&partition=0&offset=0", 404, "no record here"),
    ],
)
def test_a_wrong_position_is_reported(view: View, query: str, status: int, said: str):
    reply = view.get(f"/log/record?{query}")
    assert (reply.status_code, said in reply.text) == (status, True)
