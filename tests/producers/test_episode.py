"""One episode, token in and token out, and the token record that it builds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.producers.completion import BadResponse, Completion
from tidemill.producers.episode import Episode, EpisodeFailed, EpisodeLimits
from tidemill.producers.ledger import LEDGER
from tidemill.producers.rollout import Provenance, completed_rollout, failed_rollout
from tidemill.producers.transcript import TranscriptBuilder
from tidemill.schemas.records import Mode, RolloutStatus, Task, VersionSpan

PROVENANCE = Provenance("worker", "replica", "here", 1, 2)


def task(payload='{"entries":[3,4]}', max_turns=6) -> Task:
    return Task("t", "g", "run", "ledger", payload, Mode.TRAIN, 4, max_turns, 0, 0, 10**18, 0)


def spans_of(versions: list[int]) -> tuple[VersionSpan, ...]:
    """One span a token: the least merged form that a replica may send."""
    return tuple(VersionSpan(version, place, place + 1) for place, version in enumerate(versions))


token = st.integers(0, 2**32 - 1)
read_piece = st.lists(token, max_size=6).map(lambda ids: ("read", ids, [], []))
sampled_piece = st.lists(st.tuples(token, st.floats(-50, 0, width=32), st.integers(0, 3)), min_size=1, max_size=8).map(
    lambda rows: ("sampled", [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])
)


@given(st.lists(read_piece | sampled_piece, max_size=12))
def test_a_segment_is_the_pieces_and_its_spans_cover_the_sampled_tokens(pieces):
    built = TranscriptBuilder()
    ids, mask, logprobs, versions = [], [], [], []
    for kind, piece, piece_logprobs, piece_versions in pieces:
        if kind == "read":
            built.append_tool(piece)
        else:
            built.append_sampled(Completion(piece, piece_logprobs, spans_of(piece_versions), "stop"))
        ids += piece
        mask += [int(kind == "sampled")] * len(piece)
        logprobs += piece_logprobs or [0.0] * len(piece)
        versions += piece_versions or [None] * len(piece)
    segment = built.segment()
    assert segment.n_tokens == len(ids)
    assert segment.ids().tolist() == ids == built.ids
    assert segment.mask().tolist() == mask
    assert segment.sampled_logprobs().tolist() == np.asarray(logprobs, "f4").tolist()
    covered: list[int | None] = [None] * len(ids)
    for span in segment.spans:
        covered[span.start : span.end] = [span.version] * (span.end - span.start)
    assert covered == versions
    joints = zip(segment.spans, segment.spans[1:], strict=False)
    assert all(a.end < b.start or (a.end == b.start and a.version != b.version) for a, b in joints)


class Script:
    """A sampler that says the given turns; version `place` for turn `place`."""

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns, self.prompts, self.max_tokens = tokenizer, list(turns), [], []
        self.incarnations = [""] * len(self.turns)

    async def complete(self, prompt, sampling):
        self.prompts.append(list(prompt))
        self.max_tokens.append(sampling.max_tokens)
        turn = self.turns[len(self.prompts) - 1]
        if isinstance(turn, Exception):
            raise turn
        ids = self.tokenizer.encode(turn, add_special_tokens=False).ids[: sampling.max_tokens]
        version = len(self.prompts) - 1
        spans = (VersionSpan(version, 0, len(ids)),)
        return Completion(ids, [-0.25] * len(ids), spans, "stop", self.incarnations[version])


class Inline:
    """Runs an environment's code where it is called."""

    async def call(self, function):
        return function()


def play(script: Script, a_task=None, max_context=1000):
    a_task = a_task or task()
    harness = LEDGER.harness(script.tokenizer)
    episode = Episode(a_task, LEDGER, harness, EpisodeLimits(max_context, 1.0), Inline())
    return asyncio.run(episode.play(script))


def test_an_episode_is_played_token_in_token_out(tokenizer):
    script = Script(tokenizer, "add 0 3<|end|>", "add 3 4<|end|>", "answer 7<|end|>")
    result = play(script)
    assert result.score.success and result.score.total == pytest.approx(1.1)
    assert result.turns == 3
    text = tokenizer.decode(result.segment.ids().tolist(), skip_special_tokens=False)
    assert text == (
        "<|user|>ledger credit 3 credit 4<|end|><|assistant|>add 0 3<|end|><|tool|>total 3<|end|><|assistant|>"
        "add 3 4<|end|><|tool|>total 7<|end|><|assistant|>answer 7<|end|>"
    )
    sampled = result.segment.ids()[result.segment.mask() == 1].tolist()
    assert tokenizer.decode(sampled, skip_special_tokens=False) == "add 0 3<|end|>add 3 4<|end|>answer 7<|end|>", (
        "tool output is never in the loss"
    )
    assert [span.version for span in result.spans] == [0, 1, 2]
    assert all(
        later[: len(earlier)] == earlier for earlier, later in zip(script.prompts, script.prompts[1:], strict=False)
    )


def test_the_record_of_a_completed_episode(tokenizer):
    result = play(Script(tokenizer, "add 0 3<|end|>", "answer 8<|end|>"))
    record = completed_rollout(task(), 2, result, LEDGER.reward.version, PROVENANCE)
    assert (record.rollout_id, record.status, record.failure) == ("g/2", RolloutStatus.COMPLETED, "")
    assert record.success is False and record.reward == pytest.approx(0.1)
    assert (record.version_min, record.version_max) == (0, 1)
    assert record.prompt_tokens + record.sampled_tokens == record.segments[0].n_tokens


def test_the_record_of_a_failed_episode_has_a_reason_and_no_reward():
    record = failed_rollout(task(), 1, "timeout", PROVENANCE)
    assert (record.status, record.failure, record.reward, record.success) == (
        RolloutStatus.FAILED,
        "timeout",
        None,
        None,
    )
    assert record.segments == [] and record.rewards == [] and record.version_min == -1


def test_an_overlong_episode_is_completed_with_its_reward(tokenizer):
    script = Script(tokenizer, *["add 0 3<|end|>"] * 6)
    prompt = len(LEDGER.harness(tokenizer).open("ledger credit 3 credit 4"))
    result = play(script, max_context=prompt + 15)
    assert result.turns == 1 and not result.score.success
    assert result.segment.n_tokens <= prompt + 15
    assert result.segment.mask()[-1] == 1, "tool output that no turn follows is left out"


def test_the_last_turn_gets_only_the_room_that_is_left(tokenizer):
    prompt = len(LEDGER.harness(tokenizer).open("ledger credit 3 credit 4"))
    script = Script(tokenizer, "answer 7<|end|>")
    result = play(script, max_context=prompt + 3)
    assert script.max_tokens == [3]
    assert result.segment.n_tokens == prompt + 3


def test_a_prompt_above_the_context_fails_and_has_no_score(tokenizer):
    with pytest.raises(EpisodeFailed, match="context: the prompt has"):
        play(Script(tokenizer), max_context=10)


@pytest.mark.parametrize("payload", ["", "[]", '{"entries":[]}', '{"entries":[0]}', "\x00"])
def test_a_payload_that_is_not_the_environments_fails(tokenizer, payload):
    with pytest.raises(EpisodeFailed, match=r"^task: "):
        play(Script(tokenizer), task(payload))


def test_a_bad_response_fails_the_episode(tokenizer):
    with pytest.raises(EpisodeFailed, match="bad response: no ids"):
        play(Script(tokenizer, "add 0 3<|end|>", BadResponse("no ids")))


def test_a_rollout_is_of_one_incarnation_of_version_numbers(tokenizer):
    script = Script(tokenizer, "add 0 3<|end|>", "answer 8<|end|>")
    script.incarnations = ["one", "one"]
    assert completed_rollout(task(), 2, play(script), "", PROVENANCE).incarnation == "one"
    for other in ("two", ""):
        script = Script(tokenizer, "add 0 3<|end|>", "answer 8<|end|>")
        script.incarnations = ["one", other]
        with pytest.raises(EpisodeFailed, match=f"incarnation: turns of 'one' and of '{other}'"):
            play(script)


@given(turns=st.lists(st.text(max_size=12), min_size=6, max_size=6))
def test_whatever_is_sampled_ends_in_a_score(tokenizer, turns):
    result = play(Script(tokenizer, *[turn + "!" for turn in turns]))
    assert 1 <= result.turns <= 6
    assert result.sampled_tokens == int(result.segment.mask().sum())
