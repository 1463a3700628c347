"""Packing: rows contain every rollout once, logprobs do not depend on packing, malformed rollouts are refused."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import build
from tests.trainer.conftest import make_rollout, make_segment, make_trainable, tiny_model
from tidemill.schemas.records import Rollout, Segment, VersionSpan
from tidemill.trainer.batch import InvalidRolloutError, check, pack
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.step import Learner

VOCAB = 64


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12), row_tokens=st.integers(16, 120), share=st.booleans())
@settings(max_examples=40)
def test_every_sampled_token_is_in_exactly_one_row(sizes: list[int], row_tokens: int, share: bool) -> None:
    segments = ([make_segment(10 * k + i, 16 + 7 * i) for i in range(n)] for k, n in enumerate(sizes))
    made = [build(Rollout, segments=of_one) for of_one in segments]
    rows = pack(made, row_tokens, VOCAB, share_prefixes=share)
    owners = torch.cat([row.sequence for row in rows])
    assert torch.bincount(owners).tolist() == [sum(int(s.mask().sum()) for s in r.segments) for r in made]
    assert len({i for row in rows for i in set(row.sequence.tolist())}) == sum(
        len(set(row.sequence.tolist())) for row in rows
    ), "a rollout is in two rows"
    for row in rows:
        assert row.input_ids.shape[1] <= row_tokens or len(set(row.sequence.tolist())) == 1
        assert row.tokens == sum(s.n_tokens for i in set(row.sequence.tolist()) for s in made[i].segments)
        found = contexts(row)
        for index in set(row.sequence.tolist()):
            of_rollout = [
                context for context, owner in zip(found, row.sequence.tolist(), strict=True) if owner == index
            ]
            assert of_rollout == [context for segment in made[index].segments for context in sampled_contexts(segment)]


def contexts(row) -> list[list[int]]:
    """Return, for each sampled token of a row, the tokens that predict it, then itself, found by token depths."""
    stack: list[int] = []
    by_place = []
    for token, depth in zip(row.input_ids[0].tolist(), row.position_ids[0].tolist(), strict=True):
        assert depth <= len(stack), "a token without the one before it"
        stack = [*stack[:depth], token]
        by_place.append(stack)
    places = row.predicting[row.predictors].tolist()
    return [[*by_place[place], target] for place, target in zip(places, row.targets.tolist(), strict=True)]


def sampled_contexts(segment: Segment) -> list[list[int]]:
    return [segment.ids()[: at + 1].tolist() for at in np.flatnonzero(segment.mask())]


def with_value(data: bytes, dtype: str, place: int, value: float) -> bytes:
    array = np.frombuffer(data, dtype).copy()
    array[place] = value
    return array.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"n_tokens": s.n_tokens + 1}, "arrays of"),
        (lambda s: {"token_ids": s.token_ids[:-1]}, "arrays of"),
        (lambda s: {"token_ids": with_value(s.token_ids, "<u4", 0, VOCAB)}, "vocabulary of 64"),
        (lambda s: {"loss_mask": with_value(s.loss_mask, "u1", 0, 1)}, "first token"),
        (lambda s: {"loss_mask": with_value(s.loss_mask, "u1", 7, 2)}, "other than 0 and 1"),
        (lambda s: {"logprobs": with_value(s.logprobs, "<f4", 7, np.nan)}, "finite"),
        (lambda s: {"logprobs": with_value(s.logprobs, "<f4", 7, 0.5)}, "at most 0"),
        (lambda s: {"spans": s.spans[:1]}, "do not cover"),
        (lambda s: {"spans": [*s.spans, VersionSpan(0, 0, 2)]}, "do not cover"),
        (lambda s: {"spans": [VersionSpan(0, 6, 99)]}, "do not cover"),
        (lambda s: {"loss_mask": bytes(s.n_tokens), "spans": []}, "no sampled token"),
    ],
)
def test_malformed_rollout_is_refused_with_the_reason(change, message: str) -> None:
    made = make_segment(1)
    bad = make_rollout("g", 0, 1.0, segments=[replace(made, **change(made))])
    with pytest.raises(InvalidRolloutError, match=message):
        check(bad, VOCAB)


def test_a_logprob_that_a_sampler_rounded_to_above_0_is_trained() -> None:
    """The producers take it too (`sampling.completion.Logprob`)."""
    made = make_segment(1)
    segment = replace(made, logprobs=with_value(made.logprobs, "<f4", 7, 5e-5))
    check(make_rollout("g", 0, 1.0, segments=[segment]), VOCAB)


def forked(rollout, at: int):
    """Return another rollout with the same tokens before `at`."""
    (segment,) = rollout.segments
    ids = segment.ids().copy()
    ids[at:] = (ids[at:] + 1) % VOCAB
    return replace(rollout, segments=[replace(segment, token_ids=ids.tobytes())])


@pytest.mark.parametrize("on", [True, False])
def test_logprobs_of_a_rollout_do_not_depend_on_other_rollouts(on) -> None:
    """Bit for bit with the setting; without it they do depend on them."""
    group = make_trainable("a", (1.0, 0.0))
    long = [replace(each, segments=[make_segment(seed, 150)]) for seed, each in enumerate(group.rollouts)]
    group = replace(group, rollouts=tuple(long))
    own = sum(int(segment.mask().sum()) for rollout in long for segment in rollout.segments)
    others = [replace(group, rollouts=tuple(forked(each, at) for each in long)) for at in (30, 80, 120)]
    seen = set()
    for beside, row_tokens in product(([], others[:1], others[1:], others), (32, 4096)):
        settings = TrainerSettings(kl=KlSettings(coefficient=0), row_tokens=row_tokens, batch_invariant=on)
        trained = Learner(tiny_model(), settings, None).train([*beside, group], 1, 0, seed=1).trained
        seen.add(tuple(trained.trainer_logprobs[-own:].tolist()))
    assert (len(seen) == 1) is on
