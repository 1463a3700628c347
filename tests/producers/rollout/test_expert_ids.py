"""Expert ids in a rollout: all tokens of a segment have those of their first computation, or none has any."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from aiohttp import web

from tests.producers.conftest import completion_body
from tests.producers.rollout.test_player import Environments
from tests.producers.rollout.test_player import play as played
from tests.producers.rollout.test_policy import END, LEDGER, TASK, USER, Script
from tests.producers.rollout.test_policy import policy_of as any_policy
from tests.producers.rollout.test_worker import settings_for, task
from tidemill.producers.outbox import SegmentClaims
from tidemill.producers.rollout.endpoint import AgentEndpoint
from tidemill.producers.rollout.player import Player
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import (
    BadResponse,
    Sampling,
    build_expert_ids,
    build_segment,
    parse_completion,
)
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.codec import Codec
from tidemill.schemas.expert_ids import packed_ids, unpacked_ids
from tidemill.schemas.records import RolloutStatus, Turn
from tidemill.schemas.stored_object import read_object

pytestmark = pytest.mark.anyio

LAYERS, TOP_K = 3, 2


def experts(tokens: list[int]) -> np.ndarray:
    """Return the experts of the first tokens of a context; they depend on the token and its position."""
    whole = np.array(tokens)[:, None, None] + np.arange(len(tokens))[:, None, None]
    return ((whole + 7 * np.arange(LAYERS)[:, None] + np.arange(TOP_K)) % 200).astype(np.uint8)


class RoutedScript(Script):
    """A session whose answers contain expert ids from the requested position; `later` shifts those of later answers."""

    later = 0

    async def complete(self, prompt, sampling):
        made = await super().complete(prompt, sampling)
        self.starts = [*getattr(self, "starts", []), sampling.expert_ids_from]
        if sampling.expert_ids_from is None:
            return made
        ids = experts([*prompt, *made.token_ids][:-1]) + self.later * (len(self.starts) - 1)
        return replace(made, expert_ids=packed_ids(ids[sampling.expert_ids_from :].astype(np.uint8)))


policy_of = partial(any_policy, expert_ids=True)


def expected(policy: RolloutPolicy) -> list[list[int]]:
    """Return the experts of each token before a segment's last sampled one, over all segments in order."""
    found = []
    for context in policy.contexts.all:
        segment = build_segment(context.ids, context.turns)
        found += experts(context.ids)[: np.flatnonzero(segment.mask())[-1]].tolist()
    return found


async def converse(policy: RolloutPolicy) -> None:
    first = (await policy.chat([USER])).message
    second = (await policy.chat([USER, first, {"role": "user", "content": "left"}])).message
    await policy.chat([{"role": "user", "content": "aside"}], trained=False)
    await policy.chat([USER, first, {"role": "user", "content": "right"}])
    await policy.chat([USER, first, {"role": "user", "content": "left"}, second, {"role": "user", "content": "more"}])


def test_each_token_has_its_ids_over_turns_and_forks(texts):
    session = RoutedScript(texts, "one", "two", "aside", "three", "four")
    policy = policy_of(session)
    asyncio.run(converse(policy))
    ids = unpacked_ids(build_expert_ids(policy.contexts.all))
    assert ids.shape[1:] == (LAYERS, TOP_K) and ids.tolist() == expected(policy)
    prompts, said = [len(prompt) for prompt in session.prompts], [len(texts.encode(t + END)) for t in ("one", "two")]
    assert session.starts == [0, prompts[0] + said[0] - 1, prompts[2], 0, prompts[1] + said[1] - 1]


async def test_a_token_keeps_the_ids_of_its_first_computation(texts):
    session = RoutedScript(texts, "one", "two", "three")
    session.later = 50
    policy = policy_of(session)

    first = (await policy.chat([USER])).message
    await policy.chat([USER, first, {"role": "user", "content": "again"}])
    whole = unpacked_ids(build_expert_ids(policy.contexts.all))
    first = len(session.prompts[0]) + len(texts.encode(f"one{END}")) - 1
    (context,) = policy.contexts.all
    assert (whole[:first] == experts(context.ids)[:first]).all()
    assert (whole[first:] == experts(context.ids)[first:-1] + 50).all()


def test_no_ids_are_requested_or_kept_if_the_setting_is_off(texts):
    session = RoutedScript(texts, "one")
    policy = policy_of(session, expert_ids=False)
    asyncio.run(policy.chat([USER]))
    assert session.starts == [None] and build_expert_ids(policy.contexts.all) == b""
    assert b"routed" not in Sampling(1, 1.0).request_body([1], None)


def test_recorded_turns_with_ids_are_used_and_others_are_sampled_again(texts):
    written: list[Turn] = []
    first = RoutedScript(texts)
    asyncio.run(LEDGER.play(TASK, before := policy_of(first, written=written)))
    codec = Codec()
    read = [codec.decode(codec.encode(turn)) for turn in written]
    assert read == written and all(turn.expert_ids for turn in read)
    resumed = policy_of(RoutedScript(texts, skip=2), read[:2])
    asyncio.run(LEDGER.play(TASK, resumed))
    assert resumed.resumed == 2
    assert build_expert_ids(resumed.contexts.all) == build_expert_ids(before.contexts.all)
    late = unpacked_ids(read[1].expert_ids)
    for spoiled in (b"", packed_ids(late[1:]), b"junk"):
        again = policy_of(RoutedScript(texts), [read[0], replace(read[1], expert_ids=spoiled), read[2]])
        asyncio.run(LEDGER.play(TASK, again))
        assert again.resumed == 2, "what lacks ids is sampled again"
        assert unpacked_ids(build_expert_ids(again.contexts.all)).tolist() == expected(again)


def test_inconsistent_answers_leave_a_rollout_without_ids(texts):
    policy = policy_of(RoutedScript(texts, "one", "two", "aside", "three", "four"))
    asyncio.run(converse(policy))
    context = policy.contexts.all[0]
    turn = context.turns[-1]
    ids = unpacked_ids(turn.made.expert_ids)
    for other in (ids[1:], ids[:, :1], ids.astype("<u2")):
        context.turns[-1] = turn._replace(made=replace(turn.made, expert_ids=packed_ids(other)))
        assert build_expert_ids(policy.contexts.all) == b""


ASKED = Sampling(max_tokens=8, temperature=1.0, expert_ids_from=2)


def answered(value: object) -> bytes:
    body = completion_body([5, 6, 7], versions=[[0, 0, 3]])
    body["choices"][0]["routed_experts"] = value
    return json.dumps(body).encode()


def in_base64(ids: np.ndarray) -> str:
    return base64.b64encode(packed_ids(ids)).decode()


def test_an_answers_ids_are_read_for_the_requested_tokens():
    ids = experts([1, 2, 3, 4, 5])
    made = parse_completion(answered(in_base64(ids)), ASKED, prompt_tokens=5)
    assert np.array_equal(unpacked_ids(made.expert_ids), ids)
    assert json.loads(ASKED.request_body([1] * 5, None))["routed_experts_prompt_start"] == 2


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "set replica.expert_ids on every replica"),
        (3, "set replica.expert_ids on every replica"),
        ("?", "routed_experts"),
        (base64.b64encode(b"junk").decode(), "not an .npy array"),
        (in_base64(experts([1, 2, 3, 4])), "4 tokens, expected 5"),
        (in_base64(experts([1, 2, 3, 4, 5, 6])), "6 tokens, expected 5"),
        (in_base64(np.zeros((5, 2))), "expected u1 or u2"),
    ],
)
def test_wrong_ids_are_refused(value, why):
    with pytest.raises(BadResponse, match=why):
        parse_completion(answered(value), ASKED, prompt_tokens=5)


def test_a_rollout_names_the_claim_of_its_ids_and_fails_if_the_replica_returns_none(new_replica, chat, tmp_path):
    replica = new_replica()
    settings = settings_for(replica).model_copy(update={"expert_ids": True})
    reason = played(settings, chat, task()).failure
    assert "set replica.expert_ids on every replica, or rollout.expert_ids to false" in reason

    async def answer(request, number):
        body = json.loads((await replica.solve(request, number)).body)
        choice = body["choices"][0]
        ids = experts([*request["prompt"], *choice["token_ids"]][:-1])[request["routed_experts_prompt_start"] :]
        choice["routed_experts"] = in_base64(ids)
        return web.json_response(body)

    replica.answer = answer
    claims = SegmentClaims(str(tmp_path), "run", 10**6, Codec())

    async def play_one():
        async with open_replica_client(settings) as client, AgentEndpoint() as endpoint:
            environments = Environments({"ledger": LEDGER})
            return await Player(settings, "w", environments, chat, client, endpoint, keep=claims.keep).play(task(), 1)

    found = asyncio.run(play_one())
    assert found.status is RolloutStatus.COMPLETED and found.expert_ids is not None
    (segment,) = found.segments
    ids = unpacked_ids(read_object(found.expert_ids))
    assert np.array_equal(ids, experts(segment.ids().tolist())[: np.flatnonzero(segment.mask())[-1]])
