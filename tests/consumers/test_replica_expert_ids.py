"""The expert ids that an engine reports are those of transformers, also for cached and forked prefixes."""

import asyncio

import numpy as np
import pytest

from tests.consumers import expert_driver
from tests.consumers.test_replica_server import Served
from tidemill.consumers.replica.config import refusal
from tidemill.producers.config import RolloutSettings
from tidemill.producers.sampling.completion import Sampling
from tidemill.producers.sampling.replicas import open_replica_client
from tidemill.schemas.expert_ids import unpacked_ids

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


def test_a_rollout_worker_reads_them_over_http(tmp_path_factory, vllm):
    root = tmp_path_factory.mktemp("served")
    base = expert_driver.engines.make_model(expert_driver.engines.Kind("float32", intermediate=64), root / "v0")
    served = Served(root, base, expert_ids=True)
    address = f"http://127.0.0.1:{served.port}"

    async def two_turns():
        async with open_replica_client(RolloutSettings(replicas=[address], expert_ids=True)) as client:
            prompt = [(7 * i) % 190 + 5 for i in range(40)]
            first = await client.complete(address, prompt, Sampling(6, 1.0, expert_ids_from=0))
            asked = [*prompt, *first.token_ids, 9, 10]
            sampling = Sampling(6, 1.0, expert_ids_from=len(asked) - 3)
            second = await client.complete(address, asked, sampling)
            return [*asked, *second.token_ids], [unpacked_ids(made.expert_ids) for made in (first, second)]

    try:
        tokens, parts = asyncio.run(two_turns())
    finally:
        served.close()
    assert np.array_equal(np.sort(np.concatenate(parts), -1), expert_driver.chosen(base, tokens))
