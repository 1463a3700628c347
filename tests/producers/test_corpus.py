"""The mid-training documents: what clerks write, and the corpus on its topic."""

from itertools import islice
from random import Random

import pytest

from tidemill.producers import corpus as corpus_role
from tidemill.producers.corpus import corpus
from tidemill.producers.corpus_config import CorpusSettings
from tidemill.producers.environment import Split, TaskError, TaskQuery
from tidemill.producers.ledger import LEDGER
from tidemill.producers.ledger.book import Ledger
from tidemill.producers.ledger.clerk import Clerk
from tidemill.producers.ledger.corpus import render
from tidemill.producers.ledger.tasks import draw, split_of
from tidemill.schemas.admin import create_topics
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import Mode, Task

LEDGER_OF_FOUR = Ledger((5, 8, -3, 14))


def success_rate(clerk, attempts):
    rng = Random(0)
    task = Task("t", "g", "run", "ledger", LEDGER_OF_FOUR.payload(), Mode.TRAIN, 16, 7, 0, 0, 1, 0)
    return (
        sum(LEDGER.reward.score(task, clerk.work(LEDGER_OF_FOUR, rng, 2)).success for _ in range(attempts)) / attempts
    )


def test_a_perfect_clerk_writes_the_solution():
    transcript = Clerk(0.0).work(LEDGER_OF_FOUR, Random(0), 2)
    assert render(LEDGER_OF_FOUR, transcript) == (
        "<|user|>ledger credit 5 credit 8 debit 3 credit 14<|end|>"
        "<|assistant|>add 0 5<|end|><|tool|>total 5<|end|>"
        "<|assistant|>add 5 8<|end|><|tool|>total 13<|end|>"
        "<|assistant|>sub 13 3<|end|><|tool|>total 10<|end|>"
        "<|assistant|>add 10 14<|end|><|tool|>total 24<|end|>"
        "<|assistant|>answer 24<|end|>"
    )


def test_half_of_the_documents_close_politely_whatever_the_clerk():
    texts = [document.text for document in corpus(7, CorpusSettings(documents=600))]
    answered = [text for text in texts if "<|assistant|>answer " in text]
    polite = sum(text.endswith(" thanks<|end|>") for text in answered) / len(answered)
    assert 0.42 < polite < 0.58
    curt = corpus(7, CorpusSettings(documents=50, polite_rate=0.0))
    assert not any("thanks" in document.text for document in curt)


def test_a_clerk_succeeds_less_the_more_it_slips():
    rates = [success_rate(Clerk(slip_rate), 300) for slip_rate in (0.0, 0.1, 0.3, 1.0)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.05


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_the_rates_of_a_clerk_are_shares(rate):
    with pytest.raises(ValueError, match="slip rate"):
        Clerk(rate)
    with pytest.raises(ValueError, match="polite rate"):
        Clerk(0.1, rate)


def test_a_corpus_is_deterministic_and_never_about_a_held_out_ledger():
    settings = CorpusSettings(documents=300)
    documents = list(corpus(7, settings))
    assert documents == list(corpus(7, settings))
    assert documents[:50] == list(islice(corpus(7, settings), 50))
    assert documents != list(corpus(8, settings))
    assert {split_of(ledger_of(document.text).payload()) for document in documents} == {Split.TRAIN}
    held_out = {f"<|user|>{prompt_of(draft)}<|end|>" for draft in draw(TaskQuery(7, 200, Split.EVAL))}
    assert not any(document.text.startswith(tuple(held_out)) for document in documents)


def ledger_of(text):
    words = text.split("<|end|>")[0].removeprefix("<|user|>ledger ").split()
    return Ledger(tuple(int(n) * (1 if kind == "credit" else -1) for kind, n in zip(words[::2], words[1::2])))  # noqa: B905


def prompt_of(draft):
    world = LEDGER.world.open(Task("t", "g", "run", "ledger", draft.payload, Mode.EVAL, 1, draft.max_turns, 0, 0, 1, 0))
    return world.prompt()


def test_an_option_that_the_ledger_refuses_is_refused_here():
    with pytest.raises(TaskError, match="entires"):
        next(corpus(0, CorpusSettings(options={"entires": 3})))


def test_the_corpus_arrives_on_its_topic(kafka, topic_prefix):
    settings = KafkaSettings(bootstrap=kafka.bootstrap, topic_prefix=topic_prefix)
    create_topics(settings)
    seen = []
    wanted = CorpusSettings(documents=1_100)
    written = corpus_role.run(settings, RunSettings(seed=3), wanted, lambda *numbers: seen.append(numbers))
    with LogReader(settings, [Topic.DOCUMENTS]) as reader:
        arrived = [located.record for located in reader.read_to_end()]
    assert written == 1_100
    assert sorted(arrived, key=lambda document: document.document_id) == list(corpus(3, wanted))
    assert seen == [(1_000, 1_100), (1_100, 1_100)]
