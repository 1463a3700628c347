"""Simulated users: their roles, preferences and reactions; held-out users are never trained on."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tidemill.compose.cli import app
from tidemill.compose.config import TidemillSettings, UsersSettings
from tidemill.compose.demo.people import (
    BOT_VOTES,
    Conversation,
    NoAnswer,
    PersonaRole,
    Reaction,
    Satisfaction,
    ServedTurn,
    User,
    UserActivity,
    converse,
    population,
    questions,
)
from tidemill.compose.demo.users import (
    SimulatedUsers,
    open_product,
    simulate,
    thumb_shuffle,
)
from tidemill.compose.demo.users import served as read_answer
from tidemill.producers.environments.base import Split, split_of
from tidemill.producers.environments.ledger import LedgerEnvironment, LedgerOptions, LedgerTask
from tidemill.producers.product.settings import ProductSettings
from tidemill.schemas import signals as legal
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import SignalKind

DETERMINED = UsersSettings(vote_rate=1.0, flip_rate=0.0, mind_change_rate=0.0)
"""Users who always vote, without noise or changes of mind."""


def served(text: str, version: int = 0) -> ServedTurn:
    """Return a turn: `add 0 5` is a tool call, anything else is content."""
    message = {"role": "assistant", "content": text}
    name, *numbers = text.split()
    if name in ("add", "sub") and len(numbers) == 2:
        function = {"name": name, "arguments": json.dumps(dict(zip("ab", map(int, numbers), strict=True)))}
        message = {**message, "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return ServedTurn(message, f"token-{text}", version, 0.1)


def answer(*texts: str, balance: int = 5, versions: tuple[int, ...] = ()) -> Conversation:
    turns = [served(text, version) for text, version in zip(texts, versions or (0,) * len(texts), strict=True)]
    return Conversation(tuple(turns), frozenset(n for n, text in enumerate(texts) if "?" in text), balance)


POLITE, CURT, WRONG, NONE = (answer(text) for text in ("answer 5 thanks", "answer 5", "answer 6 thanks", "add 1 2"))


def user(
    role: PersonaRole = PersonaRole.ORDINARY, settings: UsersSettings = DETERMINED, leaves_at: int | None = None
) -> User:
    return User("u", role, True, settings.vote_rate, settings.vote_delay_s, leaves_at, settings)


def thumbs(signals: list[Reaction]) -> list[float]:
    return [signal.value for signal in signals if signal.kind is SignalKind.THUMB]


@pytest.mark.parametrize(("seen", "thumb"), [(POLITE, 1.0), (CURT, -1.0), (WRONG, -1.0), (NONE, -1.0)])
def test_a_thumb_goes_up_for_an_answer_that_is_right_and_polite(seen: Conversation, thumb: float):
    assert thumbs(user().react(seen, 0, 0.0)) == [thumb]
    assert user().satisfied(seen, 0.0) == (thumb > 0)


def test_a_preference_may_change_at_a_time():
    fickle = user(settings=DETERMINED.model_copy(update={"changed_preference_at": 10.0}))
    assert thumbs(fickle.react(POLITE, 0, 9.9)) == [1.0] == thumbs(fickle.react(CURT, 0, 10.0))
    assert thumbs(fickle.react(POLITE, 0, 10.0)) == [-1.0]


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_votes_are_as_rare_and_as_noisy_as_the_settings_say(rate: float):
    noisy = user(settings=UsersSettings(vote_rate=rate, flip_rate=0.2, mind_change_rate=0.0))
    votes = [vote for question in range(4_000) for vote in thumbs(noisy.react(POLITE, question, 0.0))]
    assert len(votes) / 4_000 == pytest.approx(rate, abs=0.03)
    assert votes.count(-1.0) / len(votes) == pytest.approx(0.2, abs=0.05)


def test_a_changed_mind_corrects_the_vote_later():
    wavering = user(settings=DETERMINED.model_copy(update={"mind_change_rate": 1.0}))
    first, second = [s for s in wavering.react(POLITE, 0, 0.0) if s.kind is SignalKind.THUMB]
    assert (first.value, second.value, second.corrects) == (1.0, -1.0, first.name)
    assert second.after_s > first.after_s


def test_delays_have_the_mean_that_was_asked_for_and_a_long_tail():
    delays = [s.after_s for n in range(3_000) for s in user().react(POLITE, n, 0.0) if s.kind is SignalKind.THUMB]
    assert sum(delays) / len(delays) == pytest.approx(DETERMINED.vote_delay_s, rel=0.1)
    assert max(delays) > 3 * DETERMINED.vote_delay_s and min(delays) > 0


def test_a_bot_votes_often_and_at_random_and_a_held_out_user_never():
    votes = [thumbs(user(PersonaRole.BOT).react(WRONG, n, 0.0)) for n in range(500)]
    assert {len(v) for v in votes} == {BOT_VOTES}
    assert sum(map(sum, votes)) / (500 * BOT_VOTES) == pytest.approx(0.0, abs=0.1)
    assert user(PersonaRole.HELD_OUT).react(POLITE, 0, 0.0) == []


def test_what_the_product_measures_is_true():
    seen = answer("what?", "add 0 5", "answer 5 thanks")
    by_kind = {(s.kind, s.turn): s.value for s in user().react(seen, 0, 0.0)}
    assert by_kind[SignalKind.TOOL_ERROR, 0] == 1.0 and (SignalKind.TOOL_ERROR, 1) not in by_kind
    assert by_kind[SignalKind.EDIT_MADE, 2] == 1.0 and by_kind[SignalKind.QUESTION_ASKED, 2] == 0.0
    assert by_kind[SignalKind.LATENCY, 2] == 0.1
    spent = {s.kind: s.value for s in user().react(answer("shall I?"), 0, 0.0)}
    assert spent[SignalKind.EDIT_MADE] == 0.0 and spent[SignalKind.QUESTION_ASKED] == 1.0


def test_behaviour_depends_on_whether_the_answer_was_right():
    def share(seen: Conversation, kind: SignalKind) -> float:
        return sum(any(s.kind is kind for s in user().react(seen, n, 0.0)) for n in range(800)) / 800

    for kind in (SignalKind.RETRY, SignalKind.ABANDONMENT):
        assert share(WRONG, kind) > 3 * share(POLITE, kind)
        assert share(POLITE, kind) == pytest.approx(share(CURT, kind), abs=0.03)
    kept = [[s.value for n in range(300) for s in user().react(seen, n, 0.0) if s.kind is SignalKind.EDIT_KEPT_SOON]
            for seen in (POLITE, WRONG)]  # fmt: skip
    assert sum(kept[0]) / len(kept[0]) > 2 * sum(kept[1]) / len(kept[1])


@given(st.sampled_from(PersonaRole), st.sampled_from([POLITE, CURT, WRONG, NONE]), st.integers(0, 10_000))
def test_reactions_are_deterministic_valid_and_have_distinct_ids(role: PersonaRole, seen: Conversation, question: int):
    settings = UsersSettings(mind_change_rate=0.5)
    signals = user(role, settings).react(seen, question, 0.0)
    assert signals == user(role, settings).react(seen, question, 0.0)
    assert not [problem for s in signals if (problem := legal.check(s.kind, s.value))]
    names = [s.name for s in signals]
    assert len(names) == len(set(names))
    assert all(s.corrects in names for s in signals if s.corrects) and all(s.after_s >= 0 for s in signals)
    assert all(0 <= s.turn <= seen.last for s in signals)


def test_the_population_is_drawn_from_the_seed():
    people = population(UsersSettings(seed=3, ordinary=400, bots=2, held_out=5, leave_rate=0.5))
    assert people == population(UsersSettings(seed=3, ordinary=400, bots=2, held_out=5, leave_rate=0.5))
    assert people != population(UsersSettings(seed=4, ordinary=400, bots=2, held_out=5, leave_rate=0.5))
    assert Counter(p.role for p in people) == {PersonaRole.ORDINARY: 400, PersonaRole.BOT: 2, PersonaRole.HELD_OUT: 5}
    ordinary = [p for p in people if p.role is PersonaRole.ORDINARY]
    assert sum(p.agrees for p in ordinary) / 400 == pytest.approx(0.9, abs=0.06)
    assert sum(p.leaves_at is not None for p in ordinary) / 400 == pytest.approx(0.5, abs=0.1)
    assert not any(p.agrees for p in people if p.role is PersonaRole.HELD_OUT)
    assert len({p.name for p in people}) == len(people)


def test_a_user_who_withdraws_their_consent_keeps_to_it():
    assert [user(leaves_at=2).consents(n) for n in range(4)] == [True, True, False, False]


def test_only_held_out_users_ask_held_out_questions():
    asked = list(islice(questions(UsersSettings(held_out_share=0.3)), 300))
    assert asked == list(islice(questions(UsersSettings(held_out_share=0.3)), 300))
    for question in asked:
        held_out = question.user.role is PersonaRole.HELD_OUT
        assert split_of(question.ledger.prompt()) is (Split.EVAL if held_out else Split.TRAIN)
    assert len({q.name for q in asked}) == len({q.ledger for q in asked}) == 300
    shares = Counter(q.user.role for q in asked)
    assert (
        shares[PersonaRole.HELD_OUT] / 300 == pytest.approx(0.3, abs=0.1)
        and shares[PersonaRole.ORDINARY] > shares[PersonaRole.BOT] > 0
    )
    only = list(islice(questions(UsersSettings(), held_out_only=True), 50))
    assert {q.user.role for q in only} == {PersonaRole.HELD_OUT}


def test_a_population_without_askers_is_reported():
    with pytest.raises(ValueError, match="held_out"):
        next(questions(UsersSettings(ordinary=0, bots=0, held_out=0)))


def test_shuffled_thumbs_keep_their_share_and_lose_their_meaning():
    shuffle = thumb_shuffle(0, 64)
    votes = [1.0 if n % 4 == 0 else -1.0 for n in range(8_000)]
    exchanged = [shuffle(vote) for vote in votes]
    assert sum(exchanged) == pytest.approx(sum(votes), abs=200)
    ups = [given for vote, given in zip(votes, exchanged, strict=True) if vote > 0]
    assert ups.count(1.0) / len(ups) == pytest.approx(0.25, abs=0.04)


SILENT_S = 600.0


class Scripted:
    """A model that solves every ledger, fails, or never answers."""

    def __init__(self, closing: str = " thanks", mood: str = "well") -> None:
        self.closing = closing
        self.mood = mood
        self.reports: list[SimpleNamespace] = []
        self.consents: dict[str, bool] = {}
        self.busy = 0
        self.busiest = 0

    async def complete(self, messages, tools, *, user_id="", session_id="", consent=True) -> ServedTurn:
        assert session_id.startswith(user_id)
        self.consents[session_id] = consent
        assert [tool["function"]["name"] for tool in tools] == ["add", "sub"]
        if self.mood == "failing":
            raise NoAnswer("no replica")
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        try:
            await asyncio.sleep(SILENT_S if self.mood == "silent" else 0.001)
        finally:
            self.busy -= 1
        return served(self.next_turn(messages), self.version(messages))

    def version(self, messages) -> int:
        return 0

    def next_turn(self, messages) -> str:
        words = messages[0]["content"].splitlines()[-1].split()
        amounts = [int(n) * (1 if kind == "credit" else -1) for kind, n in zip(words[::2], words[1::2], strict=True)]
        done = sum(message["role"] == "tool" for message in messages)
        total = sum(amounts[:done])
        if done == len(amounts):
            return f"answer {total}{self.closing}"
        return f"{'add' if amounts[done] > 0 else 'sub'} {total} {abs(amounts[done])}"

    async def report(self, interaction, kind, value, **named) -> None:
        self.reports.append(SimpleNamespace(interaction=interaction, kind=kind, value=value, **named))


FAST = UsersSettings(interactions_per_second=5_000.0, concurrency=8, vote_delay_s=0.01, mind_change_rate=0.5)


def run_crowd(product: Scripted, settings: UsersSettings, count: int) -> SimulatedUsers:
    async def run() -> SimulatedUsers:
        crowd = SimulatedUsers(settings, product)
        await asyncio.wait_for(crowd.ask(islice(questions(settings), count)), 60)
        return crowd

    return asyncio.run(run())


def test_a_conversation_carries_the_calculators_answers():
    environment = LedgerEnvironment(LedgerOptions())
    seen = asyncio.run(converse(environment, LedgerTask(entries=(5, 8, -3)), 6, Scripted().complete))
    assert [turn.interaction for turn in seen.turns] == [
        f"token-{text}" for text in ("add 0 5", "add 5 8", "sub 13 3", "answer 10 thanks")
    ]
    assert seen.right and seen.polite and seen.answered and not seen.errors
    spent = asyncio.run(converse(environment, LedgerTask(entries=(5,)), 1, Scripted().complete))
    assert not spent.right and not spent.answered


def test_a_turn_that_the_calculator_cannot_execute_is_known():
    class Mumbling(Scripted):
        def next_turn(self, messages) -> str:
            return "what?" if len(messages) == 1 else "answer 5"

    seen = asyncio.run(converse(LedgerEnvironment(LedgerOptions()), LedgerTask(entries=(5,)), 6, Mumbling().complete))
    assert seen.errors == {0} and seen.right


def test_a_crowd_asks_within_its_concurrency_and_reports_on_its_answers():
    product = Scripted()
    seen = run_crowd(product, FAST, 120).seen()
    assert (seen.conversations, seen.failed) == (120, 0)
    assert seen.interactions == 120 * 5 and 1 < product.busiest <= FAST.concurrency
    assert sum(seen.signals.values()) == len(product.reports) > 120
    assert all(report.interaction.startswith("token-") for report in product.reports)
    events = [report.event_id for report in product.reports]
    assert len(events) == len(set(events))
    assert all(r.corrects in events for r in product.reports if r.corrects) and any(r.corrects for r in product.reports)
    assert [s.rate for s in seen.satisfaction] == [1.0]


def test_a_crowd_keeps_its_pace_and_does_not_save_up():
    slow = FAST.model_copy(update={"interactions_per_second": 100.0})

    async def run() -> int:
        crowd = SimulatedUsers(slow, Scripted())
        crowd._free_at -= 60.0
        await asyncio.wait_for(crowd.ask(islice(questions(slow), 10)), 60)
        return crowd.seen().interactions

    began = time.monotonic()
    assert asyncio.run(run()) == 50
    assert time.monotonic() - began >= 49 / 100


def test_held_out_users_are_not_trained_on():
    product = Scripted()
    run_crowd(product, FAST, 120)
    held_out = {session for session in product.consents if session.startswith("held-out")}
    assert held_out and not any(product.consents[session] for session in held_out)
    assert not [report for report in product.reports if report.user.startswith("held-out")]


def test_satisfaction_sees_the_closing_that_the_reward_does_not():
    (curt,) = run_crowd(Scripted(closing=""), FAST, 60).seen().satisfaction
    assert curt.rate == 0.0 and curt.right == curt.answers > 0 and Satisfaction(1, 0, 0, 0).rate == 0.0


def test_satisfaction_is_counted_by_version_and_for_none_where_two_answered():
    class Moving(Scripted):
        def version(self, messages) -> int:
            """The newest version changes during every other conversation."""
            return len(self.consents) % 2 * (len(messages) > 1)

    only = FAST.model_copy(update={"concurrency": 1})
    asked = islice(questions(only, held_out_only=True), 10)
    told: list[UserActivity] = []
    asyncio.run(simulate(only, Moving(), asked, told.append))
    assert told[-1].satisfaction == [Satisfaction(0, satisfied=5, right=5, answers=5)]


def test_shuffled_thumbs_reach_the_product_and_satisfaction_stays_true():
    shuffled = FAST.model_copy(update={"shuffle_thumbs": True, "vote_rate": 1.0, "mind_change_rate": 0.0, "bots": 0})
    plain, control = Scripted(), Scripted()
    run_crowd(plain, shuffled.model_copy(update={"shuffle_thumbs": False}), 40)
    seen = run_crowd(control, shuffled, 40).seen()
    votes = [[r.value for r in product.reports if r.kind is SignalKind.THUMB] for product in (plain, control)]
    assert len(votes[0]) == len(votes[1]) and votes[1].count(-1.0) > votes[0].count(-1.0) + 3
    assert [s.rate for s in seen.satisfaction] == [1.0]


def test_users_without_an_answer_stop_and_are_counted():
    seen = run_crowd(Scripted(mood="failing"), FAST, 9).seen()
    assert (seen.conversations, seen.failed, seen.signals) == (0, 9, {})


def test_a_crowd_stops_at_once_when_it_is_cancelled():
    async def run() -> float:
        product = Scripted(mood="silent")
        asking = asyncio.create_task(SimulatedUsers(FAST, product).ask(questions(FAST)))
        async with asyncio.timeout(120):
            while product.busy < FAST.concurrency:
                await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert product.busy == 0
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(run()) < SILENT_S / 10


def test_the_process_reports_its_observations_and_raises_errors_of_the_sdk():
    told = []
    asyncio.run(simulate(FAST, Scripted(), islice(questions(FAST, held_out_only=True), 10), told.append))
    assert told[-1].conversations == 10 and told[-1].signals == {}

    class Refusing(Scripted):
        async def report(self, interaction, kind, value, **named) -> None:
            raise RuntimeError("the log is full")

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(simulate(FAST, Refusing(), islice(questions(FAST), 20), told.append))
    assert raised.value.subgroup(lambda error: "the log is full" in str(error))


def test_a_signal_of_the_system_ends_the_process_with_a_last_report():
    told: list[UserActivity] = []
    product = Scripted(mood="silent")

    async def interrupted() -> None:
        running = asyncio.create_task(simulate(FAST, product, questions(FAST), told.append))
        async with asyncio.timeout(120):
            while product.busy < FAST.concurrency:
                await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(running, SILENT_S / 10)

    asyncio.run(interrupted())
    assert told[-1].conversations == 0 and product.busy == 0


def test_an_answer_of_the_serving_path_is_read_and_a_foreign_one_refused():
    message = {"role": "assistant", "content": "answer 5 thanks"}
    body = {
        "choices": [{"message": {**message, "refusal": None}, "weight_versions": [[3, 0, 2], [4, 2, 5]]}],
        "tidemill": {"interaction": "id.signature"},
    }
    assert read_answer(json.dumps(body).encode(), 0.5) == ServedTurn(message, "id.signature", 4, 0.5)
    for broken in (b"no json", b"[]", b'{"choices": []}', json.dumps({**body, "tidemill": None}).encode()):
        with pytest.raises(RuntimeError, match="the router"):
            read_answer(broken, 0.5)


def test_all_concurrent_conversations_have_their_requests_answered_at_the_same_time():
    """The latency that the product measures must not contain a wait for a connection."""
    concurrency, waiting, all_there = 120, 0, asyncio.Event()

    async def answered(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        if waiting == concurrency:
            all_there.set()
        await all_there.wait()
        return web.Response(status=503)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answered)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = UsersSettings(router=f"http://127.0.0.1:{runner.addresses[0][1]}", concurrency=concurrency)
        keys, nowhere = ProductSettings.with_random_keys(), KafkaSettings(bootstrap="127.0.0.1:1")
        try:
            async with open_product(nowhere, keys, settings) as product:
                who = {"user_id": "u", "session_id": "s", "consent": False}
                asked = (product.complete([], (), **who) for _ in range(concurrency))
                found = await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await runner.cleanup()
        assert all(isinstance(one, NoAnswer) and "HTTP 503" in str(one) for one in found), found

    asyncio.run(main())


@pytest.mark.parametrize(("answers", "status"), [(0, 1), (3, 0)])
def test_a_measurement_without_an_answer_is_an_error(answers: int, status: int, monkeypatch: pytest.MonkeyPatch):
    seen = UserActivity(4, answers, 4 - answers, {}, [])
    monkeypatch.setattr("tidemill.compose.cli.users_command.begin_role", lambda *_, **__: TidemillSettings())
    monkeypatch.setattr("tidemill.compose.demo.users.run", lambda *_: _[-1](seen))
    result = CliRunner().invoke(app, ["users", "simulate", "--measure", "4"])
    assert (1 if result.exception else 0) == status
    assert f"{answers} answers, 0 signals" in result.output
    assert ("no question was answered" in str(result.exception)) is bool(status)
