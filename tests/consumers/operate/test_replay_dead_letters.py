"""Dead letters: listing, redrive, and the guarantee that no letter is sent back twice."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.consumers.operate.replay_support import rollout
from tests.consumers.operate.test_replay_log import records_of
from tests.consumers.product_support import ProductLog, feedback, interaction
from tidemill.compose.cli import app
from tidemill.compose.cli.dead_letters_command import transformation
from tidemill.consumers.operate.replay.dead_letters import (
    HEADER_ATTEMPTS,
    HEADER_REDRIVE_OF,
    DeadLetters,
    RedriveHistory,
    judge,
    letter_of,
)
from tidemill.consumers.operate.replay.records import RawRecord
from tidemill.consumers.operate.rights.records import new_request
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.producer import (
    HEADER_OFFSET,
    HEADER_PARTITION,
    HEADER_REASON,
    HEADER_TOPIC,
    RecordProducer,
    send_dead_letter,
)
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Group, Tick, UserWish

GOOD = Codec().encode(rollout("r1", "g"))
START_MS = int(time.time() - 3_600) * 1_000


def a_letter(value=GOOD, *, topic="rollouts", partition=1, offset=7, at=3, **headers):
    said = {
        HEADER_TOPIC: f"live.{topic}", HEADER_PARTITION: str(partition), HEADER_OFFSET: str(offset),
        HEADER_REASON: "unknown framing", **headers,
    }  # fmt: skip
    raw = RawRecord(f"{topic}.dlq", 0, at, 1_000, b"g", value, tuple((k, v.encode()) for k, v in said.items() if v))
    return letter_of(raw, "live.")


def sequel_of(*records, kept_from=0, lane=("rollouts", 1)):
    sequel = RedriveHistory({lane: kept_from})
    for record in records:
        sequel.observe(record, "live.")
    return sequel


def sent_back(offset, of=7, attempts=1, key=b"g", topic="rollouts"):
    headers = (
        (HEADER_REDRIVE_OF, f"live.{topic}/1/{of}".encode()),
        (HEADER_ATTEMPTS, str(attempts).encode()),
    )
    return RawRecord(topic, 1, offset, 1_000, key, GOOD, headers)


def why_not(letter, sequel, limit=3, transform=None):
    return judge(letter, sequel, Codec(), limit, transform).why_not


def test_a_letter_that_can_be_read_now_is_sent_back():
    verdict = judge(a_letter(), sequel_of(), Codec(), 3, None)
    assert (verdict.why_not, verdict.value, verdict.attempts) == ("", GOOD, 1)
    assert "cannot be read" in why_not(a_letter(b"junk"), sequel_of())
    assert why_not(a_letter(b"junk"), sequel_of(), transform=lambda letter: GOOD) == ""
    assert "returned None" in why_not(a_letter(b"junk"), sequel_of(), transform=lambda letter: None)
    assert "no value" in why_not(a_letter(None), sequel_of())


def test_a_record_of_another_topic_is_not_sent_back():
    assert why_not(a_letter(Codec().encode(Tick("s", 1))), sequel_of()) == "", "ticks lie in rollouts"
    lane = ("groups", 1)
    assert "Rollout is no record of groups" in why_not(a_letter(topic="groups"), sequel_of(lane=lane))


def test_no_record_is_sent_back_twice_from_any_of_its_letters():
    sequel = sequel_of(sent_back(20))
    for at in (3, 4):
        assert why_not(a_letter(at=at), sequel) == "it was sent back already"
    assert why_not(a_letter(offset=8), sequel) == ""


def test_each_new_failure_counts_one_attempt_until_the_limit():
    sequel = sequel_of(sent_back(20, attempts=2))
    again = a_letter(offset=20)
    assert judge(again, sequel, Codec(), 3, None).attempts == 3
    assert "failed after 2 attempts; the limit is 2" in why_not(again, sequel, limit=2)


@pytest.mark.parametrize("written", ["", "many", "-1", "9" * 5000])
def test_a_number_of_attempts_that_cannot_be_used_counts_as_one(written):
    sequel = sequel_of(sent_back(20, attempts=written))
    assert judge(a_letter(offset=20), sequel, Codec(), 3, None).attempts == 2


def test_a_letter_whose_sequel_is_past_retention_is_not_sent_back():
    assert "retention" in why_not(a_letter(), sequel_of(kept_from=8))
    assert why_not(a_letter(), sequel_of(kept_from=7)) == ""


def test_an_erased_key_is_not_sent_back():
    lane = ("feedback", 1)
    letter = a_letter(topic="feedback")
    tombstone = RawRecord("feedback", 1, 9, 2_000, b"g", None)
    assert "erasure" in why_not(letter, sequel_of(tombstone, lane=lane))
    original = RawRecord("feedback", 1, 7, 2_000, b"g", b"junk")
    assert "cannot be" not in why_not(letter, sequel_of(original, lane=lane))


def test_a_record_of_a_user_who_was_erased_later_is_not_sent_back():
    letter = a_letter(b"junk", topic="feedback")
    sequel = sequel_of(lane=letter.source)
    sequel.erasures.before["ann"] = letter.source_timestamp_ms * 1_000
    given = {user: Codec().encode(feedback("e0", "i0", user)) for user in ("ann", "bob")}
    assert why_not(letter, sequel, transform=lambda _: given["ann"]) == "its user was erased"
    assert why_not(letter, sequel, transform=lambda _: given["bob"]) == ""
    sequel.erasures.before["ann"] -= 1
    assert why_not(letter, sequel, transform=lambda _: given["ann"]) == "", "a record of the time after the erasure"
    served = interaction("i0", "ann")
    sequel.erasures.before["ann"] = served.served_at
    late = replace(letter, source_timestamp_ms=served.served_at // 1_000 + 60_000)
    assert why_not(late, sequel, transform=lambda _: Codec().encode(served)) == "its user was erased"


@pytest.mark.parametrize("lacking", [HEADER_TOPIC, HEADER_PARTITION, HEADER_OFFSET])
def test_a_letter_without_its_origin_is_not_sent_back(lacking):
    for said in ("", "foreign", "--5", "²", "9" * 19):
        assert "do not name its origin" in why_not(a_letter(**{lacking: said}), sequel_of())


def test_a_letter_of_a_partition_that_does_not_exist_is_not_sent_back():
    """The log would refuse it, and the letters after it would not be sent."""
    assert "does not exist" in why_not(a_letter(partition=9), sequel_of())


def test_a_transformation_that_cannot_be_used_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_mend.py").write_text("def fails(letter):\n    return 1 / 0\ndef text(letter):\n    return 'x'\n")
    for text, why in (
        ("x", "expected MODULE:FUNCTION"),
        ("absent_module:f", "No module"),
        ("bad_mend:g", "no attribute"),
    ):
        with pytest.raises(ValueError, match=why):
            transformation(text)
    for name, why in (("fails", r"failed on rollouts\.dlq/0/3"), ("text", "returned str")):
        with pytest.raises(ValueError, match=why):
            transformation(f"bad_mend:{name}")(a_letter())


def test_letters_are_given_as_they_are_read(monkeypatch):
    letters, read = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:9", topic_prefix="live.")), []
    letters.close()

    def scan(_ranges):
        for at in (5, 6):
            read.append(at)
            yield a_letter(at=at).raw

    monkeypatch.setattr(letters, "_source", SimpleNamespace(whole=lambda _topics: {}, scan=scan))
    assert next(letters.read(["rollouts"])).name == "rollouts.dlq/0/5"
    assert read == [5]


@pytest.fixture(scope="module")
def live(kafka):
    """A log in which each test uses its own topics."""
    return kafka.fresh()


def give_up_on(settings, topic, kind, applications):
    """Read a topic and write a letter of each record that is not of a kind, once for each application."""
    names, given_up = Names(settings.topic_prefix), 0
    with RecordProducer(settings, "test") as producer, LogReader(settings, [topic]) as reader:
        for located in reader.read_to_end():
            if not isinstance(located.record, kind):
                given_up += 1
                for application in applications:
                    send_dead_letter(producer, names, located, located.error or "of no use", application)
    return given_up


def dead_letters(settings, *arguments):
    where = ["--bootstrap", settings.bootstrap, "--topic-prefix", settings.topic_prefix]
    return CliRunner().invoke(app, ["dead-letters", arguments[0], *where, *arguments[1:]])


def answered(settings, *arguments):
    result = dead_letters(settings, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_letters_are_listed_shown_transformed_and_sent_back_once(live, tmp_path, monkeypatch):
    with RecordProducer(live, "test") as producer:
        producer.send(Topic.ROLLOUTS, rollout("r0", "g"), key="g", partition=1, timestamp_ms=START_MS)
        producer.send_bytes(
            Names(live.topic_prefix).of(Topic.ROLLOUTS), b"??" + GOOD, key=b"g", partition=1, timestamp_ms=START_MS + 1
        )
    assert give_up_on(live, Topic.ROLLOUTS, type(rollout("r", "g")), ["trainer", "sink"]) == 1
    (row,) = answered(live, "list", "--topic", "rollouts", "--json")
    assert (row["topic"], row["letters"], row["found_by"]) == ("rollouts", 2, ["sink", "trainer"])
    shown = answered(live, "show", row["example"])
    assert shown["source"] == "rollouts/1/1"
    assert shown["hex"].startswith("3f 3f c3 01")
    assert "unknown framing" in shown["why_it_cannot_go_back"]
    assert answered(live, "redrive", "--topic", "rollouts", "--yes", "--json")["sent_back"] == 0

    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mend_rollouts.py").write_text("def value(letter):\n    return letter.value.removeprefix(b'??')\n")
    tried = answered(live, "transform", "mend_rollouts:value", row["example"])
    assert tried[0]["record"]["rollout_id"] == "r1"
    redrive = ("redrive", "--topic", "rollouts", "--transform", "mend_rollouts:value", "--json")
    dry = answered(live, *redrive)
    assert (dry["dry_run"], dry["sent_back"]) == (True, 0)
    assert [letter["goes_back"] for letter in dry["letters"]] == [True, False], "two letters of one record"
    assert answered(live, *redrive, "--yes")["sent_back"] == 1
    assert answered(live, *redrive, "--yes")["sent_back"] == 0, "nothing goes back twice"

    *_, back = records_of(live, "rollouts")[1]
    assert (back.key, back.value, back.timestamp_ms, back.offset) == (b"g", GOOD, START_MS + 1, 2)
    assert dict(back.headers)[HEADER_ATTEMPTS] == b"1"

    give_up_on(live, Topic.ROLLOUTS, Group, ["stage"])
    useless = ("redrive", "--topic", "rollouts", "--reason", "of no use", "--json")
    again = answered(live, *useless)["letters"]
    assert {letter["source"]: letter["attempts"] for letter in again} == {"rollouts/1/0": 1, "rollouts/1/2": 2}
    limited = answered(live, *useless, "--limit", "1")["letters"]
    assert "limit is 1" in {letter["source"]: letter["why_not"] for letter in limited}["rollouts/1/2"]


def test_the_erasures_of_the_log_are_read(live):
    with RecordProducer(live, "test") as producer:
        producer.send(Topic.FEEDBACK, feedback("e0", "i0", "ann"), key="i0/e0", timestamp_ms=START_MS)
        erasure = new_request("ann", UserWish.ERASE, "a person", (START_MS + 1) * 1_000)
        producer.send(Topic.USER_REQUESTS, erasure, key="ann")
    give_up_on(live, Topic.FEEDBACK, Tick, ["join"])
    (letter,) = answered(live, "redrive", "--topic", "feedback", "--yes", "--json")["letters"]
    assert (letter["goes_back"], letter["why_not"]) == (False, "its user was erased")
    assert answered(live, "show", letter["letter"])["why_it_cannot_go_back"] == "its user was erased"


def test_the_interactions_of_feedback_letters_are_read(kafka):
    live = kafka.fresh()
    log, now = ProductLog(live, 2), now_us()
    log.write(*(interaction(name, user, served_at=now) for name, user in (("i0", "ann"), ("i1", "bob"), ("i2", "ann"))))
    log.write(*(feedback(f"e{n}", f"i{n}", "judge", observed_at=now) for n in range(4)))
    give_up_on(live, Topic.FEEDBACK, Tick, ["join"])
    with RecordProducer(live, "test") as producer:
        producer.send(Topic.USER_REQUESTS, new_request("ann", UserWish.ERASE, "a person", now_us()), key="ann")
        producer.send_bytes(Names(live.topic_prefix).of(Topic.INTERACTIONS), None, key=b"i2")
    letters = answered(live, "redrive", "--topic", "feedback", "--json")["letters"]
    assert {letter["record"]["event_id"]: letter["why_not"] for letter in letters} == {
        **dict.fromkeys(
            ("e0", "e2", "e3"), "its interaction was erased, or the log no longer holds it after an erasure"
        ),
        "e1": "",
    }


def test_missing_letters_are_reported(live):
    for arguments, why in (
        (("show", "groups.dlq/0/5"), "there is no dead letter at"),
        (("show", "groups.dlq/9/5"), "there is no dead letter at"),
        (("show", "groups/0/5"), "not the position of a dead letter"),
        (("list", "--topic", "nothing"), "no topic 'nothing'"),
    ):
        assert why in str(dead_letters(live, *arguments).exception)
    assert dead_letters(live, "redrive").exit_code == 2
    assert dead_letters(live, "list", "--topic", "groups").stdout == "no dead letters\n"
