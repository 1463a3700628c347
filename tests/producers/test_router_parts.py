"""The router's pure parts: which users are in the canary arm, requests, and answers that are cut off anywhere."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.producers.router_support import decision, interaction_of
from tests.records import build
from tidemill.producers.edge.completion_request import CollectedChoice, Refusal, RequestKind, parse, sampling_of
from tidemill.producers.edge.routing import CanaryShare
from tidemill.producers.outbox import SegmentClaims
from tidemill.producers.sampling.completion import BadResponse
from tidemill.schemas.codec import Codec
from tidemill.schemas.records import Arm, GateVerdict, Interaction, VersionSpan
from tidemill.schemas.stored_object import claimed


def after(*decisions) -> CanaryShare:
    """Return the canary share after these decisions; each is accepted."""
    canary = CanaryShare("r", "main")
    for one in decisions:
        assert canary.observe(one) == ""
    return canary


def arms(canary: CanaryShare, count: int = 4000, salt: str = "s") -> list[Arm]:
    return [canary.assign(f"user {number}", salt)[0] for number in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_share_of_the_users_is_in_the_canary_arm_and_stays_there(share):
    canary = after(decision("canary", 7, share))
    found = arms(canary)
    assert abs(found.count(Arm.CANARY) / 4000 - share) < 0.02 and found == arms(canary)
    assert {canary.assign(f"user {n}", "s")[1] for n in range(50)} <= {share, 1 - share}


def test_a_larger_share_keeps_the_users_and_another_candidate_draws_others():
    small, large = arms(after(decision("canary", 7, 0.1))), arms(after(decision("canary", 7, 0.3)))
    assert all(b is Arm.CANARY for a, b in zip(small, large, strict=True) if a is Arm.CANARY)
    other = arms(after(decision("canary", 8, 0.1)))
    both = sum(a is b is Arm.CANARY for a, b in zip(small, other, strict=True))
    assert both < 0.3 * small.count(Arm.CANARY)
    assert small != arms(after(decision("canary", 7, 0.1)), salt="another")


@pytest.mark.parametrize("verdict", [verdict for verdict in GateVerdict if verdict is not GateVerdict.CANARY])
def test_every_decision_about_what_is_served_ends_the_canary(verdict):
    canary = after(decision("canary", 7, 0.5), decision(verdict.value, 7))
    assert canary.share == (0.5 if verdict is GateVerdict.ADMIT else 0.0)


def test_the_rejection_of_another_version_and_other_branches_leave_the_canary_alone():
    elsewhere = [replace(decision("promote", 7), **other) for other in ({"run_id": "x"}, {"branch": "x"})]
    assert after(decision("canary", 7, 0.5), decision("reject", 6), *elsewhere).share == 0.5


@pytest.mark.parametrize(
    "bad", [decision("canary", 7), decision("canary", 7, 1.5), decision("canary", 7, float("nan")),
            decision("canary", None, 0.5)]
)  # fmt: skip
def test_a_canary_decision_without_a_usable_share_gets_no_users(bad):
    canary = after(decision("canary", 6, 0.5))
    assert "share" in canary.observe(bad) and canary.share == 0.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
NAMES = ["prompt", "messages", "stream", "logprobs", "user", "metadata", "n", "temperature", "stream_options", "x"]


@given(st.sampled_from(list(RequestKind)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6))
def test_any_request_is_forwarded_whole_or_refused(kind, asked):
    try:
        ask = parse(kind, json.dumps(asked).encode())
    except Refusal as refusal:
        assert refusal.status == 400
    else:
        assert ask.fields["return_token_ids"] is True and ask.fields["stream"] is ask.stream
        assert type(ask.fields["logprobs"]) is int and json.dumps(dict(ask.fields))
        assert not {"user", "metadata", "x", "n", "messages"} & ask.fields.keys()


@given(st.binary(max_size=40))
def test_an_invalid_request_is_refused(body):
    with pytest.raises(Refusal):
        parse(RequestKind.CHAT, body)


@pytest.mark.parametrize("given_", [{"top_k": 2**63}, {"min_p": 10**400}, {"stop_token_ids": [1, -(2**64)]}])
def test_a_number_that_a_replica_or_the_record_cannot_hold_is_refused(given_):
    with pytest.raises(Refusal, match="more than 64 bits") as refused:
        parse(RequestKind.COMPLETION, json.dumps({"prompt": "x", **given_}).encode())
    assert refused.value.parameter == next(iter(given_))


@pytest.mark.parametrize(
    ("given_", "named"),
    [({"temperature": 1}, ()), ({"temperature": 1.0, "top_p": 1, "top_k": -1, "logit_bias": {}}, ()),
     ({"temperature": 0.9}, ("temperature",)), ({"top_k": 5, "min_p": 0.1}, ("top_k", "min_p")),
     ({"temperature": True}, ("temperature",)), ({"response_format": {"type": "json_object"}}, ("response_format",))],
)  # fmt: skip
def test_sampling_that_is_not_the_models_own_is_named(given_, named):
    assert parse(RequestKind.COMPLETION, json.dumps({"prompt": "x", **given_}).encode()).other_sampling == named


@pytest.mark.parametrize(
    ("given_", "told"),
    [({"top_k": -1, "temperature": 1}, ""), ({"temperature": 0.9, "top_p": 1}, "temperature 0.9"),
     ({"top_k": 5, "min_p": 0.1, "min_tokens": 3}, "top_k 5, min_p 0.1, min_tokens"),
     ({"temperature": True, "logit_bias": {"1": 2}}, "temperature, logit_bias"),
     ({"top_k": 2**63 - 1}, "top_k 9.22337e+18"),
     ({"presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "top_p": 0.5},
      "top_p 0.5, presence_penalty 1, frequency_penalty -0.5, repetition_penalty 1.1")],
)  # fmt: skip
def test_the_record_contains_how_an_answer_was_sampled(given_, told):
    ask = parse(RequestKind.COMPLETION, json.dumps({"prompt": "x", **given_}).encode())
    sampling = sampling_of(ask)
    assert sampling.changes() == told
    made = build(Interaction, sampling=sampling)
    assert Codec().decode(Codec().encode(made)) == made


@st.composite
def answers(draw):
    """Draw an answer as a replica streams it: the versions of its tokens, and its chunks."""
    versions = sorted(draw(st.lists(st.integers(0, 3), min_size=1, max_size=12)))
    found, told = [], 0
    for place, _ in enumerate(versions):
        spans, ends = spans_of(versions[: place + 1]), place == len(versions) - 1
        choice = {"index": 0, "token_ids": [100 + place], "logprobs": {"token_logprobs": [-float(place)]},
                  "finish_reason": "stop" if ends else None}  # fmt: skip
        if ends or len(spans) != told:
            choice["weight_versions"], told = spans, len(spans)
        found.append({"choices": [{**choice, **({"prompt_token_ids": [1, 2]} if place == 0 else {})}]})
    return versions, found


def spans_of(versions: list[int]) -> list[list[int]]:
    return [[v, versions.index(v), versions.index(v) + versions.count(v)] for v in sorted(set(versions))]


@given(answers(), st.data())
def test_an_answer_cut_off_anywhere_knows_the_version_of_every_token(answer, data):
    versions, found = answer
    cut = data.draw(st.integers(1, len(found)))
    collected = CollectedChoice()
    assert [collected.take(chunk) for chunk in found[:cut]] == [1] * cut
    segment = collected.segment(trainable=True)
    assert segment.spans == [VersionSpan(v, 2 + a, 2 + b) for v, a, b in spans_of(versions[:cut])]
    assert segment.mask().tolist() == [0, 0] + [1] * cut and segment.ids().tolist() == [1, 2, *range(100, 100 + cut)]
    assert segment.sampled_logprobs().tolist() == [0.0, 0.0, *[-float(place) for place in range(cut)]]


@given(answers(), JSON, st.sampled_from(["token_ids", "logprobs", "weight_versions", "prompt_token_ids"]), st.data())
def test_damage_is_refused_or_harmless(answer, damage, name, data):
    _, found = answer
    found[data.draw(st.integers(0, len(found) - 1))]["choices"][0][name] = damage
    collected = CollectedChoice()
    try:
        for chunk in found:
            collected.take(chunk)
        segment = collected.segment(trainable=True)
    except BadResponse:
        return
    assert sum(span.end - span.start for span in segment.spans) == sum(segment.mask()) == len(collected.tokens)


def test_tokens_without_versions_are_refused():
    collected = CollectedChoice()
    collected.take({"choices": [{"token_ids": [3], "logprobs": {"token_logprobs": [-1]}, "finish_reason": "stop"}]})
    with pytest.raises(BadResponse, match="weight_versions"):
        collected.segment(trainable=True)
    assert collected.segment(trainable=False).mask().tolist() == [0]


def test_a_large_interaction_has_its_segments_in_the_store_and_is_read_back(tmp_path):
    collected = CollectedChoice()
    collected.take({"choices": [{"token_ids": [3] * 500, "logprobs": {"token_logprobs": [-1] * 500},
                                 "finish_reason": "stop", "weight_versions": [[2, 0, 500]]}]})  # fmt: skip
    made, codec = interaction_of(collected.segment(trainable=True)), Codec(None)
    small = SegmentClaims(str(tmp_path), "r", 100_000, codec).checked(made)
    large = SegmentClaims(str(tmp_path), "r", 5000, codec).checked(made)
    assert small is made and large.segments == []
    assert len(codec.encode(large)) < 1000 and claimed(large, codec) == made
