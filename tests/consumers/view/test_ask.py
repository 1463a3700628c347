"""The view Ask: named queries and SQL with parameters, as tables, CSV and JSON, within bounds."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import pytest

from tests.consumers.view.run_records import HOSTILE
from tidemill.consumers.sink.query import ask, named_queries

if TYPE_CHECKING:
    from tests.consumers.view.conftest import View


@pytest.mark.parametrize("name", ["gate", "arms", "log_topics", "weight_versions"])
def test_the_rows_of_a_named_query_are_those_that_tidemill_query_prints(view: View, name: str):
    answer = view.query(name)
    assert answer.rows
    told = view.get(f"/ask/rows.json?name={name}").json()
    assert told == [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    text = list(csv.reader(io.StringIO(view.get(f"/ask/rows.csv?name={name}").text)))
    assert text[0] == answer.columns and len(text) == len(answer.rows) + 1
    page = view.get(f"/ask?name={name}").text
    assert named_queries()[name].replace("'", "&#39;") in page


def test_parameters_are_values_and_never_sql(view: View):
    sql = "SELECT {text:String} AS text, count() AS n FROM rollouts WHERE rollout_id = {id:String}"
    values = {"q": sql, "param_text": HOSTILE, "param_id": "g5-0-1"}
    expected = ask(view.sink, sql, {"text": HOSTILE, "id": "g5-0-1"}).rows
    assert expected == [[HOSTILE, 1]]
    (row,) = view.get("/ask/rows.json", params=values).json()
    assert [row["text"], row["n"]] == expected[0]
    shown = view.get("/ask/rows", params=values).text
    assert "&lt;img" in shown and "<img" not in shown
    page = view.get("/ask", params=values).text
    assert "&lt;img" in page and "<img" not in page


def test_a_question_longer_than_an_address_is_posted(view: View):
    sql = f"SELECT 1 AS one /* {'x' * 100_000} */"
    reply = view.post("/ask/rows.json", data={"q": sql})
    assert reply.json() == [{"one": 1}]
    too_long = view.post("/ask/rows", data={"q": "x" * 2**19})
    assert (too_long.status_code, "longer than" in too_long.text) == (413, True)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DROP TABLE rollouts", "read-only"),
        ("SELECT * FROM file('/etc/passwd')", "no files, hosts or processes"),
        ("SELECT 1 SETTINGS max_execution_time = 0", "READONLY"),
        ("SELECT 1 FORMAT CSV", "leave the FORMAT clause out"),
        ("SELECT", "Syntax error"),
        ("SELECT {n:Int64}", "n"),
        ("", "there is no question"),
    ],
)
def test_a_refusal_is_a_text_with_its_reason(view: View, sql: str, said: str):
    shown = view.get("/ask/rows", params={"q": sql})
    assert shown.status_code == 200 and 'role="alert"' in shown.text and said in shown.text
    file = view.get("/ask/rows.csv", params={"q": sql})
    assert file.status_code == 400 and said in file.text


def test_rows_past_the_bound_are_cut_and_the_cut_is_reported(view: View):
    shown = view.get("/ask/rows", params={"q": "SELECT number FROM numbers(1000000)"}).text
    assert "5,000 rows" in shown and "cut at view.result_rows" in shown
    whole = view.get("/ask/rows", params={"q": "SELECT number FROM numbers(5000)"}).text
    assert "5,000 rows" in whole and "cut at" not in whole


def test_an_unknown_name_is_reported(view: View):
    reply = view.get("/ask?name=%3Cb%3Eno")
    assert reply.status_code == 404 and "no named query &lt;b&gt;no" in reply.text


def test_a_form_from_another_site_reads_nothing(view: View):
    reply = view.get("/ask/rows?q=SELECT+1", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in reply.headers
