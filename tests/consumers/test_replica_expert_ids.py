"""The expert ids that an engine reports are those of transformers, also for cached and forked prefixes."""

import pytest

from tidemill.consumers.replica.config import refusal

LAYERS, TOP_K = 2, 2


@pytest.fixture(scope="module")
def seen(driven):
    """The driver's results for an engine."""
    return driven("expert_driver")


@pytest.mark.parametrize("when", ["first", "again", "fork"])
def test_every_token_but_the_last_has_the_experts_of_transformers(seen, when):
    for found in seen[when].values():
        assert found["shape"] == found["expected"] and found["shape"][1:] == [LAYERS, TOP_K]
        assert found["same"] == 1.0 and found["type"] == "uint8"


def test_cached_prefixes_have_their_ids(seen):
    assert seen["cached"]["long"] >= 64 and seen["cached"]["fork"] == 64
    assert seen["same"]


def test_an_answer_may_leave_out_the_ids_of_a_prefix(seen):
    assert seen["tail"]


def test_tokens_have_the_experts_of_the_version_that_computed_them(seen):
    moved = seen["moved"]
    assert [span[0] for span in moved["spans"]] == [0, 1] and moved["spans"][1][2] == 24
    assert moved["rows"] == 100 + 24 - 1
    assert moved["before"] == 1.0 and moved["after"] < 1.0


def test_ids_take_one_byte_per_layer_and_expert(seen):
    assert seen["bytes a token"] == LAYERS * TOP_K


def test_a_dense_model_is_refused(seen):
    assert seen["dense"] == "rank 0: replica.expert_ids: the model has no experts; set it to false"


def test_vllms_own_flag_is_set_by_the_setting():
    assert "other settings of [replica]" in refusal("enable_return_routed_experts")
