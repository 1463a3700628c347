"""The mid-training documents: their authors, and the corpus on its topic."""

import asyncio
import re
from itertools import islice
from random import Random

import pytest

from tests.records import build
from tidemill.compose.config import CorpusSettings
from tidemill.compose.demo import corpus as corpus_role
from tidemill.compose.demo.corpus import Demonstrator, corpus
from tidemill.producers.environments.base import Split, TaskQuery, split_of
from tidemill.producers.environments.ledger import CALCULATOR, LedgerEnvironment, LedgerOptions, LedgerTask
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import ChatSettings, RunSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Task

CHAT = ChatSettings()
LEDGER = LedgerEnvironment(LedgerOptions())
FOUR = LedgerTask(entries=(5, 8, -3, 14))
TASK = build(Task, task_id="t", group_id="g", payload=FOUR.payload(), group_size=16, max_turns=7, deadline_at=1)


def work(rng, slip_rate, polite_rate=0.0):
    author = Demonstrator(FOUR, rng, slip_rate=slip_rate, polite_rate=polite_rate)
    return asyncio.run(LEDGER.play(TASK, author)), author.conversation


def test_a_perfect_demonstrator_writes_the_solution():
    score, conversation = work(Random(0), 0.0)
    assert score.success and [message["content"] for message in conversation[2::2]] == ["5", "13", "10", "24"]
    calls = [call["function"] for message in conversation for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("add", '{"a": 0, "b": 5}'), ("add", '{"a": 5, "b": 8}'), ("sub", '{"a": 13, "b": 3}'),
        ("add", '{"a": 10, "b": 14}'),
    ]  # fmt: skip
    assert conversation[-1]["content"] == "answer 24"


def test_a_document_is_a_whole_conversation_in_the_chat_format():
    (document,) = corpus(7, CorpusSettings(documents=1, slip_rates=(0.0,)), CHAT)
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", document.text, re.DOTALL)
    assert "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) == document.text
    assert [role for role, _ in turns[:4]] == ["system", "user", "assistant", "tool"]
    assert all(tool["function"]["name"] in turns[0][1] for tool in CALCULATOR.schemas)
    assert turns[2][1].startswith('<tool_call>{"name": ') and turns[-1][1].startswith("answer ")


def test_half_of_the_documents_of_each_author_close_politely():
    texts = [document.text for document in corpus(7, CorpusSettings(documents=600), CHAT)]
    answered = [text for text in texts if "<|im_start|>assistant\nanswer " in text]
    polite = sum(text.endswith(" thanks<|im_end|>\n") for text in answered) / len(answered)
    assert 0.42 < polite < 0.58
    curt = corpus(7, CorpusSettings(documents=50, polite_rate=0.0), CHAT)
    assert not any("thanks" in document.text for document in curt)


def test_a_demonstrator_succeeds_less_the_more_it_slips():
    rng = Random(0)
    rates = [sum(work(rng, rate)[0].success for _ in range(300)) / 300 for rate in (0.0, 0.1, 0.3, 1.0)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.05


def test_a_corpus_is_deterministic_and_never_about_a_held_out_question():
    settings = CorpusSettings(documents=300)
    documents = list(corpus(7, settings, CHAT))
    assert documents == list(corpus(7, settings, CHAT))
    assert documents[:50] == list(islice(corpus(7, settings, CHAT), 50))
    assert documents != list(corpus(8, settings, CHAT))
    asked = {re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", each.text, re.DOTALL)[0] for each in documents}
    assert {split_of(question) for question in asked} == {Split.TRAIN}
    held_out = {d.asks for d in islice(LEDGER.tasks(TaskQuery(7)), 3_000) if split_of(d.asks) is Split.EVAL}
    assert held_out and not asked & held_out


@pytest.mark.parametrize("wrong", [{"options": {"entires": 3}}, {"slip_rates": ()}, {"polite_rate": 1.1}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="CorpusSettings"):
        CorpusSettings(**wrong)


def test_the_corpus_is_written_to_its_topic(kafka, caplog):
    settings = kafka.fresh(topics=[Topic.DOCUMENTS])
    wanted = CorpusSettings(documents=1_100)
    with caplog.at_level("INFO"):
        written = corpus_role.run(settings, RunSettings(seed=3), wanted, CHAT)
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        arrived = [located.record for located in reader.read_to_end()]
    assert written == 1_100
    assert sorted(arrived, key=lambda document: document.document_id) == list(corpus(3, wanted, CHAT))
    said = [record.getMessage() for record in caplog.records if "documents written" in record.getMessage()]
    assert said == ["1000 of 1100 documents written", "1100 of 1100 documents written"]
