"""Mid-training: packing, Muon, a falling loss, and the whole role with a real log."""

import json
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.documents import dead_letters
from tidemill.compose.config import CorpusSettings
from tidemill.compose.demo.corpus import corpus
from tidemill.compose.demo.corpus import run as write_corpus
from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.config import ChatSettings, RunSettings
from tidemill.schemas.log.producer import RecordProducer
from tidemill.trainer.midtrain import (
    DocumentRow,
    epochs,
    learning_rate,
    loss_of,
    midtrain,
    orthogonal,
    read_corpus,
    run,
    split_parameters,
)
from tidemill.trainer.midtrain_config import MidtrainSettings, ModelShape, TokenizerSettings
from tidemill.trainer.model import build_model, use_packed_attention

TINY = MidtrainSettings(
    model=ModelShape(hidden_size=32, intermediate_size=64, layers=2, heads=2, kv_heads=1, max_positions=256),
    tokenizer=TokenizerSettings(vocab_size=360),
    steps=30,
    row_tokens=256,
    warmup_steps=3,
    threads=1,
    report_every=8,
)
CHAT = ChatSettings()
TEXTS = [document.text for document in corpus(0, CorpusSettings(documents=120), CHAT)]
DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def trained():
    """The model, tokenizer, losses and number of tokens with seed 1."""
    return midtrain(TEXTS, TINY, 1)


def test_a_training_that_diverges_names_the_step_and_the_setting():
    with pytest.raises(RuntimeError, match=r"diverged at step \d+: lower midtrain.learning_rate"):
        midtrain(TEXTS, TINY.model_copy(update={"learning_rate": 1e30}), 1)


@given(DOCUMENTS.filter(lambda documents: any(len(d) > 1 for d in documents)), st.integers(16, 24), st.integers(0, 9))
def test_an_epoch_contains_every_piece_once(documents, row_tokens, seed):
    pieces = sorted(d[i : i + row_tokens] for d in documents for i in range(0, len(d), row_tokens))
    pieces = [piece for piece in pieces if len(piece) > 1]
    seen = []
    for row in epochs(documents, row_tokens, seed):
        assert row.input_ids.shape == row.position_ids.shape == (1, sum(row.lengths))
        assert sum(row.lengths) <= row_tokens
        seen += [ids.tolist() for ids in row.input_ids[0].split(row.lengths)]
        assert_predicts_itself(row)
        if len(seen) >= len(pieces):
            break
    assert sorted(seen) == pieces


def assert_predicts_itself(row: DocumentRow):
    parts = zip(*(part.split(row.lengths) for part in (row.input_ids[0], row.position_ids[0], row.labels)), strict=True)
    for ids, positions, labels in parts:
        assert positions.tolist() == list(range(len(ids)))
        assert labels.tolist() == [*ids.tolist()[1:], -100]


def test_documents_without_a_token_to_predict_are_refused():
    with pytest.raises(ValueError, match="nothing to train on"):
        next(epochs([[1], []], 16, 0))


def test_a_document_is_not_influenced_by_its_neighbours_in_the_row(trained):
    model = build_model(TINY.model, trained[1], "<|im_end|>", 0)
    use_packed_attention(model)
    (first,) = islice(epochs([[5, 6, 7, 8]], 16, 0), 1)
    alone = loss_of(model, first)
    ids = torch.tensor([[9, 10, 11, 5, 6, 7, 8]])
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = DocumentRow(ids, places, torch.tensor([-100] * 3 + first.labels.tolist()), (3, 4))
    assert loss_of(model, packed).item() == pytest.approx(alone.item(), abs=1e-5)


@settings(max_examples=25)
@given(st.integers(2, 24), st.integers(2, 24), st.integers(0, 1000))
def test_orthogonal_keeps_directions_and_evens_out_sizes(rows, columns, seed):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    result = orthogonal(matrix)
    assert result.shape == matrix.shape
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    seen = torch.diagonal(left.T @ result @ right.T)
    well_posed = sizes > 0.05 * sizes[0]
    assert ((seen > 0.3) & (seen < 1.5))[well_posed].all()


def test_every_parameter_has_an_optimizer_and_muon_has_only_matrices(trained):
    model = trained[0]
    inner, outer = split_parameters(model)
    assert {id(p) for p in inner} | {id(p) for p in outer} == {id(p) for p in model.parameters()}
    assert len(inner) == 2 * 7 and all(parameter.ndim == 2 for parameter in inner)
    assert any(p is model.get_input_embeddings().weight for p in outer)


def test_the_learning_rate_warms_up_and_decays():
    rates = [learning_rate(step, TINY) for step in range(TINY.steps)]
    assert rates[0] < rates[1] < rates[2]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert max(rates) <= TINY.learning_rate
    assert rates[-1] < 0.2 * TINY.learning_rate


def test_training_lowers_the_loss_and_is_deterministic(trained, caplog):
    with caplog.at_level("INFO"):
        again, _, repeated, tokens = midtrain(TEXTS, TINY, 1)
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("midtrain ")]
    reports = [json.loads(line.removeprefix("midtrain ")) for line in told]
    other = midtrain(TEXTS, TINY.model_copy(update={"steps": 1}), 2)[2]
    model, _, losses, _ = trained
    assert losses[-1] < 0.85 * losses[0]
    assert losses == repeated and losses[0] != other[0]
    same = dict(again.named_parameters())
    assert all(torch.equal(p, same[name]) for name, p in model.named_parameters())
    assert [report["step"] for report in reports] == [8, 16, 24, 30]
    assert reports[-1]["tokens"] == tokens
    assert reports[-1]["loss"] == pytest.approx(sum(repeated[-8:]) / 8, abs=1e-4)


def test_the_role_reads_a_log_and_writes_a_checkpoint(kafka, trained, tmp_path):
    log = kafka.fresh(2, [Topic.DOCUMENTS])
    wanted = TINY.model_copy(update={"output": str(tmp_path / "model")})
    with pytest.raises(LookupError, match="tidemill documents"):
        run(log, RunSettings(), wanted, CHAT)
    small = CorpusSettings(documents=120)
    for _ in range(2):
        write_corpus(log, RunSettings(), small, CHAT)
    with RecordProducer(log, "test") as producer:
        producer.send_bytes(Names(log.topic_prefix).of(Topic.DOCUMENTS), b"poison", key=b"k")
    run(log, RunSettings(seed=1), wanted, CHAT)
    record = json.loads((tmp_path / "model" / "midtrain.json").read_text())
    assert record["documents"] == 120
    assert sum(record["until"].values()) == 241
    assert record["last_loss"] < record["first_loss"]
    assert_like_a_direct_run(tmp_path / "model", *trained[:2])
    assert [letter.value() for letter in dead_letters(log, Topic.DOCUMENTS)] == [b"poison"]
    assert_older_ends_give_the_older_corpus(log, record)


def assert_like_a_direct_run(directory, model, tokenizer):
    opened = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())
    assert all(torch.equal(p.bfloat16().float(), opened[name]) for name, p in model.named_parameters())
    assert AutoTokenizer.from_pretrained(directory).get_vocab() == tokenizer.get_vocab()


def assert_older_ends_give_the_older_corpus(log, record):
    until = {int(partition): end for partition, end in record["until"].items()}
    write_corpus(log, RunSettings(seed=9), CorpusSettings(documents=30), CHAT)
    assert read_corpus(log, TINY.model_copy(update={"until": until})) == (TEXTS, until)
    assert len(read_corpus(log, TINY)[0]) == 150
    with pytest.raises(LookupError, match="offset 9999"):
        read_corpus(log, TINY.model_copy(update={"until": {0: 9999}}))
    with pytest.raises(LookupError, match=r"nothing to train on with the source 'elsewhere' \(midtrain\.source\)"):
        read_corpus(log, TINY.model_copy(update={"source": "elsewhere"}))
