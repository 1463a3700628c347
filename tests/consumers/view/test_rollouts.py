"""The view Rollouts: the search, one rollout as a conversation, its colours, and hostile ones."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.consumers.view.conftest import View
from tests.consumers.view.run_records import HOSTILE, LONG, TOKENIZER, conversation
from tidemill.consumers.sink.query import ask
from tidemill.consumers.view.app import application
from tidemill.consumers.view.config import ViewSettings
from tidemill.consumers.view.conversation import (
    TokenTexts,
    by_mismatch,
    by_version,
    message_parts,
    message_tokens,
    token_texts,
)
from tidemill.consumers.view.drawn import clipped, visible
from tidemill.consumers.view.tables import TableRows, Tables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TEXTS = TokenTexts(TOKENIZER)
ENDINGS = ("trained", "excluded: stale", "evaluated", "failed", "open: in a group", "open: in no group")


def listed(view: View, **values: object) -> list[str]:
    """Return the ids of the rollouts that the page lists, in order."""
    answer = view.get("/part/rollouts", params=values)
    assert answer.status_code == 200
    return re.findall(r'<td><a href="/rollouts/[^"]*">([^<]*)</a>', answer.text)


def every_page(view: View, **values: object) -> list[str]:
    """Return the ids of all pages, one after the other."""
    ids: list[str] = []
    before = ""
    while True:
        answer = view.get("/part/rollouts", params={**values, **({"before": before} if before else {})}).text
        ids += re.findall(r'<td><a href="/rollouts/[^"]*">([^<]*)</a>', answer)
        further = re.search(r'href="/rollouts\?([^"]*)" rel="next"', answer)
        if further is None:
            return ids
        before = dict(re.findall(r"(\w+)=([^&]*)", html.unescape(further[1])))["before"].replace("+", " ")


def words(page: str) -> str:
    """Return the text of a part of the page, without its markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def test_the_pages_of_the_list_hold_every_rollout_once(view: View):
    (in_tables,) = view.query("SELECT groupUniqArray(rollout_id) FROM rollouts").rows[0]
    ids = every_page(view)
    assert sorted(ids) == sorted(in_tables)
    assert len(ids) > 50, "one page is no test of pages"


def test_the_endings_are_those_of_accounting(view: View):
    told: dict[str, int] = {}
    for _run, _mode, ending, rollouts, *_ in view.query("accounting").rows:
        told[ending] = told.get(ending, 0) + rollouts
    assert len(told) > 2
    assert {ending: len(every_page(view, ending=ending)) for ending in {*ENDINGS, *told}} == {
        **dict.fromkeys(ENDINGS, 0),
        **told,
    }
    excluded = sum(n for ending, n in told.items() if ending.startswith("excluded"))
    assert len(every_page(view, ending="excluded")) == excluded


def test_the_search_finds_what_sql_finds(view: View):
    def ids(where: str) -> list[str]:
        return sorted(row[0] for row in view.query(f"SELECT rollout_id FROM rollouts WHERE {where}").rows)

    assert sorted(listed(view, version=5, reward_min=0.5)) == ids("version_max = 5 AND reward >= 0.5") + ids(
        "version_min = 5 AND version_max > 5 AND reward >= 0.5"
    )
    assert sorted(listed(view, group="g2-1")) == ids("group_id = 'g2-1'")
    assert sorted(listed(view, reward_max=0.2, group="g2-0")) == ids("reward <= 0.2 AND group_id = 'g2-0'")
    assert sorted(listed(view, step=3)) == ids("group_id IN ('g2-0', 'g2-1')")
    assert sorted(listed(view, text="replica GONE", group="g4-1")) == ["g4-1-3"]
    assert listed(view, environment="no such") == listed(view, run="no such") == []


def test_text_is_found_in_tokens(view: View):
    assert listed(view, text="5 + 7? (g3-2)") == [f"g3-2-{n}" for n in reversed(range(4))]
    assert listed(view, text="<script>document") == ["g5-0-1"]
    assert listed(view, text=LONG[:1000]) == ["g5-0-2"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", "x"), ("step", "1_000"), ("version", "1.5"), ("version", "9" * 19), ("reward_min", "high")],
)
def test_a_value_of_another_kind_is_reported(view: View, name: str, value: str):
    assert f"{name.replace('_', ' ')} must be a" in view.get("/part/rollouts", params={name: value}).text


def test_the_address_keeps_the_search_without_empty_fields(view: View):
    answer = view.get("/rollouts?run=&step=3&text=")
    assert (answer.status_code, answer.headers["location"]) == (303, "/rollouts?step=3")
    assert 'name="step" value="3"' in view.get("/rollouts?step=3").text
    assert view.get("/groups/g2-1").headers["location"] == "/rollouts?group=g2-1"


def test_a_rollout_reads_as_a_conversation(view: View):
    page = view.get("/part/conversation?rollout_id=g2-0-1").text
    assert re.findall(r"<h3>([^<]*)<", page) == ["system", "user", "assistant", "tool output", "assistant"]
    (call,) = re.findall(r'<div class="call"[^>]*>(.*?)</div>', page, re.DOTALL)
    assert words(call).startswith('<tool_call>{"name": "calculator"')
    assert "You add numbers." in words(page)


def test_a_rollouts_page_shows_what_the_query_prints(view: View):
    answer = ask(view.sink, "rollout", {"rollout_id": "g2-0-1"})
    of = dict(zip(answer.columns, answer.rows[0], strict=True))
    (member,) = view.query(
        "SELECT members.advantage, members.reward FROM `groups` ARRAY JOIN members WHERE members.rollout_id = 'g2-0-1'"
    ).rows
    assert (of["ending"], of["step"], [of["advantage"], of["reward"]]) == ("trained", 3, member)
    told = words(view.get("/part/rollout?rollout_id=g2-0-1").text)
    assert "trained, by step 3" in told
    assert f"{of['reward']:.6g}" in told
    assert f"advantage {of['advantage']:+.4g}" in told
    assert "correct" in told
    assert "tidemill.rollouts 0 " in told


def test_the_group_has_the_best_and_the_worst_first(view: View):
    answer = ask(view.sink, "rollout_group", {"rollout_id": "g3-0-0"})
    rewards = [row[answer.columns.index("reward")] for row in answer.rows]
    assert rewards[0] == max(rewards)
    assert rewards[1] == min(rewards)
    shown = view.get("/panel/rollout_group?rollout_id=g3-0-0").text
    assert re.findall(r"<td>this one</td>\s*<td><a[^>]*>([^<]*)", shown) == ["g3-0-0"]


@pytest.mark.parametrize(
    ("colour", "look", "says"),
    [
        ("mask", "hue0", "sampled, in the loss"),
        ("version", "hue1", "version 2"),
        ("logprob", "odds2", "probability 0.1 to 0.5"),
        ("mismatch", "odds1", "0 of its tokens are among the worst"),
        ("advantage", "down", "made less probable"),
    ],
)
def test_tokens_are_coloured_and_the_colours_are_explained(view: View, colour: str, look: str, says: str):
    plain = words(view.get("/part/conversation?rollout_id=g2-0-3").text)
    page = view.get(f"/part/conversation?rollout_id=g2-0-3&colour={colour}").text
    assert f'class="{look}"' in page
    assert says in words(page)
    assert "You add numbers." in words(page)
    assert words(page).count("12") >= plain.count("12")


def test_a_hostile_rollout_is_text(view: View):
    page = view.get("/part/conversation?rollout_id=g5-0-1").text
    assert "<script>document" not in page
    assert "<img" not in page
    assert html.unescape(page).count("⟨U+202E⟩evil⟨U+202C⟩") == 1
    assert "␛[31m" in page
    assert not re.search("[\x00\x1b\u202e\u2066]", page)


def test_a_megabyte_without_a_space_comes_in_parts(view: View):
    first = view.get("/part/conversation?rollout_id=g5-0-2")
    assert len(first.content) < 100_000
    total = int(re.search(r"of ([\d,]+)", words(first.text))[1].replace(",", ""))  # type: ignore[index]
    assert total > len(LONG)
    last = view.get(f"/part/conversation?rollout_id=g5-0-2&from={(total - 1) // 2000 * 2000}&colour=logprob")
    assert len(last.content) < 400_000
    assert "assistant, continued" in words(last.text)
    assert "unbroken" in words(last.text)


@pytest.mark.parametrize("path", ["/part/rollout", "/part/conversation"])
def test_a_missing_rollout_is_reported(view: View, path: str):
    page = view.get(path, params={"rollout_id": "<b>none</b>'; DROP"}).text
    assert "not played, or not read yet" in page
    assert "<b>" not in page


def test_a_rollout_without_tokens_says_why(view: View):
    assert "it failed" in view.get("/part/conversation?rollout_id=g2-1-3").text


@dataclass
class OneRow(Tables):
    """Tables that answer every query with one row."""

    of: dict[str, Any]

    async def ask(self, sql: str, parameters: Mapping[str, str] | None = None) -> TableRows:
        """The row."""
        return TableRows(tuple(self.of), ("String",) * len(self.of), [list(self.of.values())], False, 0.0)


def conversation_of(colour: str = "", **of: Any) -> str:
    """Return the conversation of a row of `rollout_tokens`, on a page without a tokenizer."""
    names = ("lengths", "token_ids", "loss_mask", "logprobs")
    spans = [f"span_{part}" for part in ("segments", "versions", "starts", "ends")]
    row = {**{name: [] for name in (*names, *spans)}, "failure": "", "claim_uri": None, "claim_bytes": None, **of}
    client = TestClient(application(OneRow(row), ViewSettings()), base_url="http://127.0.0.1")
    return words(client.get(f"/part/conversation?rollout_id=r&colour={colour}").text)


def test_a_rollout_whose_tokens_are_in_the_store_says_where():
    told = conversation_of(claim_uri="s3://store/claims/r", claim_bytes=1_234_567)
    assert "1,234,567 bytes at s3://store/claims/r" in told


def test_without_a_tokenizer_ids_are_numbers_and_the_setting_is_named():
    told = conversation_of(lengths=[3], token_ids=[7, 8, 9], loss_mask=[0, 1, 1], logprobs=[0, -1, -2])
    assert "tidemill view --set view.model=DIRECTORY" in told
    assert "8 9" in told
    assert "not sampled" in told


@pytest.mark.parametrize("colour", ["", "mask", "version", "logprob", "advantage"])
def test_arrays_of_unequal_lengths_are_shown_as_far_as_they_go(colour: str):
    told = conversation_of(colour, lengths=[3], token_ids=[701, 802, 903], loss_mask=[0, 1], logprobs=[-1], advantage=1)
    assert [number in told for number in ("701", "802", "903")] == [True, True, False]


def test_messages_begin_at_marks_and_where_the_mask_changes():
    segment = conversation("2 + 2?", "{}", "4", "It is 4.", (0, 1))
    ids, mask = segment.ids().tolist(), segment.mask().tolist()
    said = message_tokens(ids, mask, [segment.n_tokens], TEXTS)
    assert [one.role for one in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert (said[0].start, said[-1].end) == (0, segment.n_tokens)
    assert all(one.end == after.start for one, after in pairwise(said))
    bare = message_tokens(ids, mask, [segment.n_tokens], None)
    assert [one.role for one in bare] == ["not sampled", "assistant", "not sampled", "assistant"]
    assert message_tokens([], [], [], TEXTS) == message_tokens([], [], [0], None) == []
    # A mark that the policy sampled begins no message.
    assert [one.role for one in message_tokens(ids, [1] * len(ids), [len(ids)], TEXTS)] == ["assistant"]


def test_texts_of_tokens_join_to_the_text_and_no_bytes_take_long():
    text = "naïve 日本 🙂 <|im_start|>user"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert "".join(TEXTS.texts(ids)) == text
    assert TEXTS.texts([10**9]) == ["⟨1000000000⟩"]
    broken = [ids[2]] * 40_000  # the first byte of a character, again and again
    assert len(TEXTS.texts(broken)) == len(broken)


def test_calls_are_distinguished_token_by_token():
    texts = ["say ", "<tool_call>", "{}", "</tool_call>", " done"]
    shown = message_parts(texts, [("", "")] * len(texts), calls=True)
    assert [(is_call, text) for is_call, runs in shown for _, text in runs] == [
        (False, "say "),
        (True, "<tool_call>{}</tool_call>"),
        (False, " done"),
    ]


def test_a_difference_is_shown_where_the_log_says_it():
    paints, _ = by_mismatch(4, 10, [10, 10], [[1, 2, -0.1, -3.0], [0, 2, -0.1, -0.2], [7, 0, 0.0, 0.0]])
    assert paints == [("", ""), ("", ""), ("odds4", "sampler -0.1000, trainer -3.0000"), ("", "")]


def test_a_version_is_shown_on_the_tokens_of_its_spans_that_were_sampled():
    mask = [1] * 12 + [0]
    paints, legend = by_version(mask, 4, [10, 10], [(1, 3, 2, 9), (0, 7, 3, 6), (9, 5, 0, 1)])
    assert [look for look, _ in paints] == ["hue1"] * 2 + [""] * 6 + ["hue0"] * 4 + [""]
    assert legend == [("hue0", "version 3"), ("hue1", "version 7")], "no segment 9 has tokens"


def test_without_a_tokenizer_there_is_none(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    assert token_texts("") is token_texts(str(tmp_path / "nowhere")) is token_texts(str(tmp_path)) is None


def test_hidden_characters_are_seen_and_ordinary_text_is_left():
    assert visible("a\tb\nnaïve 日本 🙂") == "a\tb\nnaïve 日本 🙂"
    shown = visible(HOSTILE + "\u200b\ufeff\x7f\x9b\ud800")
    assert shown.isprintable()
    assert clipped("abc", 3) == "abc"
    assert clipped("abcdef", 3) == "abc … (3 characters more)"
    assert np.unique(list(visible("".join(map(chr, range(32)))))).size == 32
