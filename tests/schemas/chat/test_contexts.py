import itertools
import json
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schemas.chat.families import FAMILIES, TOOLS
from tidemill.schemas.chat.contexts import Context, Contexts, Origin, PendingTurn
from tidemill.schemas.chat.messages import NO_TOOLS, Message, Tools, identity

CHAT = FAMILIES["qwen3"].chat()
USER: Message = {"role": "user", "content": "How much is it?"}
MORE: Message = {"role": "user", "content": "And then?"}
END = CHAT.stop_token_ids[0]


def sample(contexts: Contexts[list[int]], asked: PendingTurn[list[int]], text: str, *, ended: bool = True) -> Message:
    """Answer a request with a text."""
    ids = [*CHAT.encode(text), *([END] if ended else [])]
    message = CHAT.read(ids, asked.context.tools, asked.context.count).message
    contexts.add_turn(asked, ids, message, ids)
    return message


def turn(contexts: Contexts[list[int]], messages: list[Message], text: str, tools: Tools = NO_TOOLS) -> list[Message]:
    """A conversation with one more turn, and the question that follows it."""
    return [*messages, sample(contexts, contexts.begin(messages, tools), text), MORE]


# How a request is handled


def test_a_request_that_continues_appends():
    contexts = Contexts[list[int]](CHAT)
    once = turn(contexts, [USER], "One.")
    asked = contexts.begin(once)
    assert asked.origin is Origin.APPEND and [asked.context] == contexts.all
    first = contexts.all[0].turns[0]
    assert asked.ids[: first.end] == contexts.all[0].ids
    assert asked.ids == CHAT.open(once)  # this tokenizer's own ids were sampled
    sample(contexts, asked, "Two.")
    assert [each.made for each in contexts.all[0].turns] == [[*CHAT.encode("One."), END], [*CHAT.encode("Two."), END]]


def test_a_request_that_begins_with_a_part_forks():
    contexts = Contexts[list[int]](CHAT)
    once = turn(contexts, [USER], "One.")
    turn(contexts, once, "Two.")
    shared = contexts.all[0].ids[: contexts.all[0].turns[0].end]
    other: list[Message] = [*once[:-1], {"role": "user", "content": "Another question."}]
    asked = contexts.begin(other)
    assert asked.origin is Origin.FORK and asked.ids[: len(shared)] == shared
    assert asked.ids == CHAT.open(other)
    sample(contexts, asked, "Three.")
    assert len(contexts.all) == 2
    assert [len(context.turns) for context in contexts.all] == [2, 1]  # only the first contains the shared turn
    assert contexts.all[1].count == 2


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([MORE], NO_TOOLS),
        ([{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "One."}, MORE], NO_TOOLS),
        ([USER, {"role": "assistant", "content": "1."}, MORE], NO_TOOLS),
        ([USER, {"role": "assistant", "content": "One."}, MORE], TOOLS),
        ([USER, {"role": "assistant", "content": "One."}, MORE, {"role": "assistant", "content": "2"}, USER], NO_TOOLS),
        ([USER, {"role": "assistant", "content": "One."}], NO_TOOLS),
        ([{**USER, "name": "ada"}, {"role": "assistant", "content": "One."}, MORE], NO_TOOLS),
    ],
    ids=["another", "a system message", "an altered turn", "tools", "an unknown turn", "no question", "a name"],
)
def test_any_other_request_is_fresh_and_rendered_anew(messages: list[Message], tools: Tools):
    contexts = Contexts[list[int]](CHAT)
    turn(contexts, [USER], "One.")
    asked = contexts.begin(messages, tools)
    assert asked.origin is Origin.FRESH and asked.ids == CHAT.open(messages, tools)
    assert asked.context.count == sum(message["role"] == "assistant" for message in messages)


def test_a_turn_that_comes_back_in_another_json_style_is_known():
    contexts = Contexts[list[int]](CHAT)
    said = sample(contexts, contexts.begin([USER], TOOLS), FAMILIES["qwen3"].call)
    call = said["tool_calls"][0]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    sent_back = {**said, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}
    result = {"role": "tool", "content": "3", "tool_call_id": call["id"]}
    assert contexts.begin([USER, sent_back, result], TOOLS).origin is Origin.APPEND


def test_parallel_calls_are_an_append_and_a_fork():
    contexts = Contexts[list[int]](CHAT)
    once = turn(contexts, [USER], "One.")
    first, second = contexts.begin(once), contexts.begin(once)
    assert (first.origin, second.origin) == (Origin.APPEND, Origin.FORK)
    assert first.ids == second.ids
    sample(contexts, second, "B.")
    sample(contexts, first, "A.")
    assert [len(context.turns) for context in contexts.all] == [2, 1]


def test_a_turn_that_was_not_sampled_leaves_its_context_to_the_next_request():
    contexts = Contexts[list[int]](CHAT)
    once = turn(contexts, [USER], "One.")
    before = list(contexts.all[0].ids)
    contexts.release(contexts.begin(once))
    assert contexts.all[0].ids == before
    assert contexts.begin(once).origin is Origin.APPEND


def test_of_two_equal_turns_the_later_one_is_continued():
    contexts = Contexts[list[int]](CHAT)
    first, second = contexts.begin([USER]), contexts.begin([USER])
    said = sample(contexts, first, "One.")
    sample(contexts, second, "One.", ended=False)
    asked = contexts.begin([USER, said, MORE])
    assert asked.origin is Origin.APPEND and asked.context is second.context


# Any rollout


@dataclass
class Rollout:
    """A rollout of random requests, and its invariants."""

    draw: random.Random
    contexts: Contexts[list[int]]
    most: int | None = None
    ends: dict[str, tuple[Context[list[int]], int]] = field(default_factory=dict)
    """Expected: the context and its length at the end of each sampled turn, by tools and messages."""
    tails: dict[int, int] = field(default_factory=dict)
    """Expected: requests in progress behind the end of a context, by its identity."""
    under_way: list[tuple[PendingTurn[list[int]], list[Message], Tools]] = field(default_factory=list)
    known: list[tuple[list[Message], Tools]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    lengths: dict[int, list[int]] = field(default_factory=dict)

    def key(self, messages: list[Message], tools: Tools) -> str:
        return json.dumps([tools.identity, [identity(message) for message in messages]])

    def ask(self, messages: list[Message], tools: Tools) -> None:
        last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        end = self.ends.get(self.key(messages[: last + 1], tools)) if 0 <= last < len(messages) - 1 else None
        before = {id(context): list(context.ids) for context in self.contexts.all}
        asked = self.contexts.begin(messages, tools)
        assert all(context.ids == before[id(context)] for context in self.contexts.all)
        if self.most is None:
            if end is None:
                assert asked.origin is Origin.FRESH
            else:
                context, length = end
                at_end = len(context.ids) == length and not self.tails.get(id(context))
                assert asked.origin is (Origin.APPEND if at_end else Origin.FORK)
                assert (asked.context is context) is at_end
                first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
                more = CHAT.extend(
                    context.ids[length - 1], messages[:first], messages[last], messages[last + 1 :], tools
                )
                assert asked.ids == [*context.ids[:length], *more]
        if asked.origin is Origin.FRESH:
            assert asked.ids == CHAT.open(messages, tools)
        assert asked.ids[: len(asked.context.ids)] == asked.context.ids
        assert len(asked.ids) > len(asked.context.ids) or asked.origin is not Origin.APPEND
        self.tails[id(asked.context)] = 1
        self.under_way.append((asked, messages, tools))

    def end(self, number: int, *, fails: bool) -> None:
        asked, messages, tools = self.under_way.pop(number)
        self.tails[id(asked.context)] = 0
        if fails:
            self.contexts.release(asked)
            return
        before = list(asked.ids)
        ids = self.draw.choices(range(300), k=self.draw.randrange(1, 6))
        if self.draw.random() < 0.3:
            ids = CHAT.encode(FAMILIES["qwen3"].call)
        if self.draw.random() < 0.7:
            ids = [*ids, END]
        message = CHAT.read(ids, tools, asked.context.count).message
        self.contexts.add_turn(asked, ids, message, ids)
        assert asked.context.ids == [*before, *ids]
        self.sampled.append(ids)
        self.lengths.setdefault(id(asked.context), []).append(len(asked.context.ids))
        whole = [*messages, message]
        self.ends[self.key(whole, tools)] = (asked.context, len(asked.context.ids))
        self.known.append((whole, tools))

    def step(self) -> None:
        draw = self.draw
        what = draw.random()
        if self.under_way and what < 0.45:
            self.end(draw.randrange(len(self.under_way)), fails=draw.random() < 0.2)
        elif self.known and what < 0.9:
            messages, tools = draw.choice(self.known[-3:] if draw.random() < 0.7 else self.known)
            if draw.random() < 0.1:
                tools = TOOLS if tools is NO_TOOLS else NO_TOOLS
            if draw.random() < 0.1:
                messages = [{**messages[0], "content": "altered"}, *messages[1:]]
            calls = messages[-1].get("tool_calls", ())
            results = [{"role": "tool", "content": draw.choice("12"), "tool_call_id": call["id"]} for call in calls]
            self.ask([*messages, *results, *([] if results else [draw.choice((USER, MORE))])], tools)
        else:
            self.ask([draw.choice((USER, MORE))], draw.choice((TOOLS, NO_TOOLS)))


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_in_any_rollout_each_turn_is_in_one_context_with_its_ids(draw: random.Random, steps: int):
    rollout = Rollout(draw, Contexts(CHAT))
    for _ in range(steps):
        rollout.step()
    kept = list(itertools.chain.from_iterable(
        [context.ids[turn.start : turn.end] for turn in context.turns] for context in rollout.contexts.all
    ))  # fmt: skip
    assert sorted(kept) == sorted(rollout.sampled)
    for context in rollout.contexts.all:
        assert rollout.lengths[id(context)] == sorted(rollout.lengths[id(context)])
        assert all(context.ids[turn.start : turn.end] == turn.made for turn in context.turns)
        places = [place for turn in context.turns for place in (turn.start, turn.end)]
        assert places == sorted(places) and places[-1] == len(context.ids)


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 4))
def test_a_server_remembers_the_most_recent_turns_alone(draw: random.Random, steps: int, most: int):
    rollout = Rollout(draw, Contexts(CHAT, most), most)
    for _ in range(steps):
        rollout.step()
    assert not rollout.contexts.all
    remembered = 0
    for messages, tools in {rollout.key(*each): each for each in rollout.known}.values():
        calls = messages[-1].get("tool_calls", ())
        results = [{"role": "tool", "content": "9", "tool_call_id": call["id"]} for call in calls]
        remembered += rollout.contexts.begin([*messages, *results, USER], tools).origin is not Origin.FRESH
    assert remembered == min(most, len(rollout.ends))


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 400))
def test_a_server_remembers_no_more_tokens_than_its_limit(draw: random.Random, steps: int, most_tokens: int):
    rollout = Rollout(draw, Contexts(CHAT, 10, most_tokens), 10)
    for _ in range(steps):
        rollout.step()
        ends = list(rollout.contexts._ends.values())
        kept = {id(end.context): len(end.context.ids) for end in ends}
        assert rollout.contexts._tokens == sum(kept.values())
        assert sum(kept.values()) <= most_tokens or len(ends) == 1
        assert bool(ends) is bool(rollout.ends)


def test_a_turn_that_is_asked_for_again_is_kept_longer():
    contexts = Contexts[list[int]](CHAT, 2)
    first, second = turn(contexts, [USER], "One."), turn(contexts, [MORE], "Two.")
    assert contexts.begin(first).origin is Origin.APPEND
    turn(contexts, [{"role": "user", "content": "A third."}], "Three.")
    assert contexts.begin(second).origin is Origin.FRESH
    assert contexts.begin(first).origin is Origin.FORK  # its first request is still in progress
