"""Shared prefixes are computed once, with the values and gradients of segments that are computed one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PhiConfig, PhiForCausalLM

from tests.records import build
from tests.trainer.conftest import fingerprint_of, make_trainable, make_trainable_batch, tiny_model
from tidemill.schemas.records import Rollout, Segment, VersionSpan
from tidemill.trainer import attention, policy
from tidemill.trainer.attention import TreeAttention
from tidemill.trainer.batch import pack
from tidemill.trainer.choices import CORRECT_THEMSELVES, CorrectionKind, Estimator, ObjectiveName
from tidemill.trainer.config import CorrectionSettings, KlSettings, OnlineSettings, OptimizerSettings, TrainerSettings
from tidemill.trainer.master import MasterWeights
from tidemill.trainer.model import use_packed_attention
from tidemill.trainer.policy import frozen_logprobs, sampled_logprobs
from tidemill.trainer.serving_view import serving_view
from tidemill.trainer.step import Learner, make_deterministic

VOCAB = 64


def segment_of(ids: list[int], mask: list[int]) -> Segment:
    """Make a segment whose logprobs depend only on its tokens."""
    marks = np.array(mask, np.uint8)
    logprobs = np.where(marks, -4.0 - 0.02 * (np.array(ids) % 7), 0).astype("<f4")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marks, [0]])))
    spans = [VersionSpan(0, int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    return Segment(len(ids), np.array(ids, "<u4").tobytes(), marks.tobytes(), logprobs.tobytes(), spans)


@st.composite
def segment_trees(draw) -> list[list[Segment]]:
    """Draw the segments of some rollouts. Each continues a prefix of an earlier segment, or starts empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    alphabet, longest = draw(st.sampled_from([2, 64])), draw(st.sampled_from([12, 90]))
    drawn: list[list[int]] = []
    rollouts = []
    for _ in range(draw(st.integers(1, 7))):
        segments = []
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            base = drawn[rng.integers(len(drawn))] if drawn and rng.random() < 0.8 else []
            ids = [*base[: rng.integers(len(base) + 1)], *rng.integers(0, alphabet, rng.integers(2, longest)).tolist()]
            mask = [0, *(rng.random(len(ids) - 1) < rng.choice([0.1, 0.9])).astype(int).tolist()]
            mask[-1 - rng.integers(min(3, len(ids) - 1))] = 1
            drawn.append(ids)
            segments.append(segment_of(ids, mask))
        rollouts.append(segments)
    return rollouts


def results(model, rollouts: list[Rollout], row_tokens: int, share: bool) -> dict[str, torch.Tensor]:
    """Return logprobs and entropies by rollout, the gradient of weighted logprobs, and the computed token count."""
    parts: dict[tuple[str, int], torch.Tensor] = {}
    computed = 0
    model.zero_grad()
    for row in pack(rollouts, row_tokens, VOCAB, share_prefixes=share):
        computed += row.tree.length
        logprobs, entropy = sampled_logprobs(model, row)
        weights = torch.sin(1.0 + row.sequence + row.targets).to(logprobs.dtype)
        (weights * logprobs).sum().backward()
        for owner in row.sequence.unique().tolist():
            parts["logprobs", owner] = logprobs.detach()[row.sequence == owner]
            parts["entropy", owner] = entropy[row.sequence == owner]
    found = {kind: torch.cat([parts[kind, n] for n in range(len(rollouts))]) for kind in ("logprobs", "entropy")}
    found |= {name: p.grad.clone() for name, p in model.named_parameters()}
    return found | {"computed": torch.tensor(float(computed))}


@pytest.fixture(scope="module")
def models():
    """Models by precision. A Qwen3 always computes norms and tables in float32, so the float64 model is a Phi."""
    make_deterministic(1)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    phi = PhiForCausalLM(PhiConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, **shape))
    made = {torch.float32: tiny_model(1), torch.float64: phi.double()}
    for model in made.values():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5.0 if parameter.ndim > 1 else 1.0)
        use_packed_attention(model.eval())
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-11)])
@given(made=segment_trees(), row_tokens=st.sampled_from([64, 300, 5000]))
@settings(max_examples=40)
def test_shared_tokens_give_the_values_and_gradients_of_separate_ones(models, dtype, tolerance, made, row_tokens):
    rollouts = [build(Rollout, segments=segments) for segments in made]
    shared, plain = (results(models[dtype], rollouts, row_tokens, share) for share in (True, False))
    assert shared.pop("computed") <= plain.pop("computed")
    for name, expected in plain.items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(shared[name], expected, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: n + m)


def random_parents(rng: np.random.Generator, length: int) -> np.ndarray:
    """Make the parents of a random forest in depth-first order."""
    parents: list[int] = []
    above: list[int] = []
    for token in range(length):
        if above and rng.random() < 0.1:
            above = above[: rng.integers(len(above) + 1)]
        parents.append(above[-1] if above else -1)
        above.append(token)
    return np.array(parents)


def by_mask(query, key, value, parents: np.ndarray, scale: float) -> torch.Tensor:
    allowed = np.zeros((len(parents), len(parents)), bool)
    for token, parent in enumerate(parents):
        allowed[token] |= allowed[parent] if parent >= 0 else False
        allowed[token, token] = True
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT * scale).masked_fill(torch.from_numpy(~allowed), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 3, 8), (6, 1, 16)])
@given(seed=st.integers(0, 10_000), length=st.integers(1, 220))
@settings(max_examples=15)
def test_tree_attention_equals_attention_with_the_trees_mask(heads, kv_heads, width, kernel, seed, length):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, length)
    states = [torch.from_numpy(rng.normal(size=(1, n, length, width))) for n in (heads, kv_heads, kv_heads)]
    states = [x.requires_grad_() for x in states]
    upstream = torch.from_numpy(rng.normal(size=(1, heads, length, width)))
    with pytest.MonkeyPatch.context() as patched:
        if not kernel:
            patched.setattr(attention, "_has_kernel", lambda *_: False)
        out = TreeAttention.apply(*states, attention.tree_calls(parents), 0.7)
        grads = torch.autograd.grad(out, states, upstream)
    expected = by_mask(*states, parents, 0.7)
    for mine, other in zip((out, *grads), (expected, *torch.autograd.grad(expected, states, upstream)), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


def test_attention_computes_only_the_pairs_of_the_tree():
    """A prompt of 300 tokens and answers of 100 and 20: two long runs, one batch of padded short runs, one trunk."""
    parents = np.concatenate([np.arange(-1, 299), [299], np.arange(300, 399), [299], np.arange(400, 419), [299]])
    calls = attention.tree_calls(np.append(parents, np.arange(420, 439)))
    assert calls.runs == ((0, 300), (300, 400))
    assert calls.trunks == ((0, 300, 440),)
    (short,) = calls.short
    assert short.mask.shape == (2, 1, 24, 24)
    assert short.tokens[short.slots].tolist() == list(range(400, 440))


PROMPT, ANSWERS = list(range(10, 30)), [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 9]]


def test_shared_tokens_of_segments_are_in_a_row_once():
    rollouts = [build(Rollout, segments=[segment_of([*PROMPT, *a], [0] * 20 + [1] * 4)]) for a in ANSWERS]
    (row,) = pack(rollouts, 1000, VOCAB)
    # The prompt; 1 2 once, then 3 and 5; 7 8 9. Nothing is predicted from an answer's last token.
    assert row.input_ids.shape == (1, 20 + 4 + 3)
    assert row.tokens == 3 * 24
    assert len(row.targets) == 12
    assert len(row.predicting) == 1 + 4 + 3
    assert [row.input_ids.shape[1] for row in pack(rollouts, 1000, VOCAB, share_prefixes=False)] == [3 * 23]


def test_a_rollout_joins_the_row_to_which_it_adds_the_fewest_tokens():
    def rollout(first: int, answer: int) -> Rollout:
        return build(Rollout, segments=[segment_of([first] * 20 + [answer] * 5, [0] * 20 + [1] * 5)])

    made = [rollout(1, 40), rollout(2, 40), rollout(1, 41), rollout(2, 41)]
    first, second = pack(made, 40, VOCAB)
    assert (set(first.sequence.tolist()), set(second.sequence.tolist())) == ({0, 2}, {1, 3})
    assert (first.input_ids.shape[1], second.input_ids.shape[1]) == (28, 28)


def test_a_turn_of_two_branches_is_trained_where_it_is_marked(models):
    turn, model = [5, 6, 7, 8], models[torch.float32]
    trained = segment_of([*PROMPT, *turn, 30, 31], [0] * 20 + [1] * 4 + [0] * 2)
    fork = segment_of([*PROMPT, *turn, 32, 33, 34], [0] * 24 + [0, 1, 1])
    rows = [pack([build(Rollout, segments=each)], 1000, VOCAB) for each in ([trained, fork], [trained])]
    both, alone = rows[0][0], rows[1][0]
    assert len(both.targets) == 6
    torch.testing.assert_close(frozen_logprobs(model, both)[:4], frozen_logprobs(model, alone), rtol=0, atol=1e-5)


def learning(**changes: object) -> TrainerSettings:
    plain = {"kl": KlSettings(coefficient=0.0), "optimizer": OptimizerSettings(max_grad_norm=1e9), "row_tokens": 150}
    return TrainerSettings(**{**plain, **changes})


@pytest.fixture
def groups():
    """Two groups. Rollouts share a prompt and prefixes of answers; one rollout has two branches with a common turn."""

    def shared(group, prompt: int):
        rng, rollouts = np.random.default_rng(prompt), []
        for index, rollout in enumerate(group.rollouts):
            head = [3, 4, *range(prompt, prompt + 30), index % 2, 9]
            ids = [*head, *rng.integers(0, VOCAB, 10 + index).tolist()]
            segments = [segment_of(ids, [0] * 32 + [1] * (len(ids) - 34) + [0, 0])]
            if index == 0:
                other = [*ids[:38], *rng.integers(0, VOCAB, 8).tolist()]
                segments.append(segment_of(other, [0] * 40 + [1] * 6))
            rollouts.append(replace(rollout, segments=segments))
        return replace(group, rollouts=tuple(rollouts))

    return [
        shared(make_trainable("a", (1.0, 0.0, 0.5)), 5),
        shared(make_trainable("b", (0.0, 0.0, 1.0, 1.0)), 20),
    ]


def stepped(monkeypatch, options: TrainerSettings, groups, online=None):
    """Take a step; return the gradients of its updates, and its metrics."""
    seen: list[dict[str, torch.Tensor]] = []
    update = MasterWeights.update

    def watched(self, learning_rate: float) -> float:
        seen.append({name: p.grad.clone() for name, p in self._parameters.items()})
        return update(self, learning_rate)

    moved = tiny_model(1)
    learner = Learner(moved, options, tiny_model() if options.kl.coefficient else None)
    with monkeypatch.context() as patched:
        patched.setattr(MasterWeights, "update", watched)
        outcome = learner.train(groups, 1, 0, seed=1, online=online)
    return seen, outcome.metrics


NONE = CorrectionSettings(kind=CorrectionKind.NONE)
CASES = {
    **{f"{name}": {"objective": name, **({"correction": NONE} if name in CORRECT_THEMSELVES else {})}
       for name in ObjectiveName},
    **{f"correction {kind}": {"correction": CorrectionSettings(kind=kind, low=0.9, high=1.1)}
       for kind in CorrectionKind},
    "minibatches": {"objective": ObjectiveName.DR_GRPO, "minibatches": 2},
    "kl in the reward": {"kl": KlSettings(coefficient=0.3)},
    "kl in the loss": {"kl": KlSettings(coefficient=0.3, in_loss=True, estimator=Estimator.K3)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_with_shared_tokens(case: str, groups, monkeypatch) -> None:
    found = [stepped(monkeypatch, learning(**CASES[case], share_prefixes=share), groups) for share in (True, False)]
    assert_same_step(*found)


def test_an_online_step_is_the_same_with_shared_tokens(groups, monkeypatch) -> None:
    batch = make_trainable_batch("b", (1.0, 0.0, 0.5))
    answers = zip(batch.interactions, groups[0].rollouts, strict=True)
    batch = replace(batch, interactions=tuple(replace(one, segments=other.segments) for one, other in answers))
    on = OnlineSettings(enabled=True)
    found = [
        stepped(monkeypatch, learning(online=on, share_prefixes=share), groups[1:], batch) for share in (True, False)
    ]
    assert_same_step(*found)


def assert_same_step(shared, plain) -> None:
    (gradients, metrics), (others, expected) = shared, plain
    for mine, other in zip(gradients, others, strict=True):
        scale = max(float(g.abs().max()) for g in other.values())
        assert scale > 0
        for name in other:
            torch.testing.assert_close(mine[name], other[name], rtol=0, atol=2e-5 * scale, msg=lambda m, n=name: n + m)
    assert metrics.pop("packing/computed") < 0.6 * expected.pop("packing/computed")
    for name in ("flops/forward", "flops/backward", "flops/frozen"):
        assert (less := metrics.pop(name)) < (more := expected.pop(name)) or less == more == 0
    assert metrics.pop("flops/saved") > expected.pop("flops/saved") >= 0
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kept", [0, 1 << 40])
@pytest.mark.parametrize("bias", [True, False])
def test_the_head_in_chunks_equals_the_whole_head(kept: int, bias: bool, monkeypatch) -> None:
    monkeypatch.setattr(policy, "CHUNK_SCORES", 4 * 50)
    monkeypatch.setattr(policy, "KEPT_SCORES", kept)
    generator = torch.Generator().manual_seed(0)
    sizes = ((11, 8), (50, 8), (50,))
    states = [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]
    hidden, weight, offset = states
    predictors = torch.tensor([0, 0, 3, 10, 10, 10, 7, 4, 5, 10])
    targets = torch.tensor([1, 1, 2, 49, 49, 0, 3, 4, 5, 7])
    upstream = torch.randn(10, generator=generator, dtype=torch.float64)
    used = states if bias else states[:2]
    logprobs, entropy = policy.SampledLogprobs.apply(
        hidden, weight, offset if bias else None, predictors, targets, True
    )
    scores = (hidden @ weight.T + (offset if bias else 0)).log_softmax(-1)
    expected = scores[predictors, targets]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(scores.exp() * scores).sum(-1).detach(), rtol=0, atol=1e-12)
    assert not entropy.requires_grad
    for mine, other in zip(
        torch.autograd.grad(logprobs, used, upstream), torch.autograd.grad(expected, used, upstream), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_no_result_depends_on_uninitialised_memory(groups) -> None:
    """The step leaves new tensors unfilled for speed; filled with NaN, it gives the same weights."""
    prints = []
    for filled in (False, True):
        learner = Learner(tiny_model(), learning(kl=KlSettings(coefficient=0.1)), tiny_model())
        torch.utils.deterministic.fill_uninitialized_memory = filled
        for step in (1, 2):
            learner.train(groups, step, step - 1, seed=step)
        prints.append(fingerprint_of(serving_view(learner.model)))
    torch.utils.deterministic.fill_uninitialized_memory = False
    assert prints[0] == prints[1]
