"""An engine of two ranks is updated, proved and reported as one: versions under load, and damage of only one rank."""

from contextlib import suppress

import psutil
import pytest

from tests.consumers import ranks_driver


@pytest.fixture(scope="module")
def results(driven):
    """The driver's results, by scenario."""
    return driven("ranks_driver")


@pytest.fixture(scope="module", params=["dense", "experts"])
def seen(request, results):
    """The results for an engine with two ranks."""
    return {**results[request.param], "kind": request.param}


def test_versions_under_load_are_proved_and_every_token_is_reported_with_its_version(seen):
    load = seen["load"]
    assert load["objections"] == [""] * ranks_driver.MOVES and load["running"] == ranks_driver.REQUESTS
    assert load["wrong"] == 0
    assert load["spans"] > 2 * ranks_driver.REQUESTS


def test_an_updated_engine_computes_what_a_fresh_engine_computes(seen):
    assert seen["first"] == seen["whole"] == ""
    assert seen["after"] == seen["fresh"] != seen["before"]
    assert seen["whole_greedy"] == seen["before"]


def test_ranks_with_whole_experts_are_updated_and_compute_the_same(seen):
    assert ("whole_experts" in seen) == (seen["kind"] == "experts")
    if load := seen.get("whole_experts"):
        assert load["objections"] == [""] * (ranks_driver.MOVES - 1)
        assert (load["wrong"], seen["back"]) == (0, seen["fresh"])


@pytest.mark.parametrize(
    ("what", "why"),
    [("shard", "rank 1: the changes in shared memory are not those"), ("commit", "rank 1: the weights were changed")],
)
def test_a_version_that_one_rank_refuses_is_kept_by_no_rank(seen, what, why):
    damages = seen["damages"]
    assert damages[what].startswith(why)
    assert (damages[f"{what} then"], damages[f"{what} version"]) == ("", ranks_driver.MOVES + 2)


def test_all_ranks_continue_after_a_refusal_and_undo_an_update(seen):
    damages = seen["damages"]
    assert damages["moved"] == damages["undone"] == "" and damages["version"] == ranks_driver.MOVES + 2


def test_one_flipped_bit_on_one_rank_fails_the_proof(seen):
    damages = seen["damages"]
    assert damages["model.norm.weight"] == "ranks 0 and 1 hold different copies of elements of model.norm.weight"
    assert damages["model.layers.1.self_attn.o_proj.weight"] == ranks_driver.OTHER_VERSION
    assert damages["healed"] == ""


def test_experts_are_also_known_by_the_names_that_transformers_has_in_memory(seen):
    assert seen.get("fused", ["", ""]) == ["", ""]
    assert ("fused" in seen) == (seen["kind"] == "experts")


def test_answers_contain_the_experts_of_all_tokens_but_the_last_if_there_are_experts(seen):
    assert seen["expert_ids"] == ([12 + 4 - 1, 2, 2] if seen["kind"] == "experts" else None)


def test_no_file_of_the_ranks_shared_memory_outlasts_them(seen):
    assert seen["shared"] and all(file.endswith(" (deleted)") for file in seen["shared"])


def test_a_rank_killed_before_the_commit_ends_the_engine(seen):
    # The core names the rank, unless its own monitor of the ranks has ended it before the call.
    assert "rank 1 of the engine died" in seen["killed"] or seen["killed"].startswith("EngineDeadError")
    assert seen["left"] == 0


def test_a_core_that_dies_during_a_call_ends_the_call_and_its_ranks(seen):
    assert seen["core_killed"].startswith("EngineDeadError")
    assert seen["left"] == 0


@pytest.fixture(scope="module")
def seen_together(results):
    """The results for two engines with half of the experts each."""
    return results["together"]


def test_engines_that_share_experts_apply_each_version_together(seen_together):
    load = seen_together["load"]
    assert load["objections"] == [""] * (ranks_driver.MOVES - 1) and load["running"] == ranks_driver.REQUESTS
    assert (load["wrong"], seen_together["torn"]) == (0, [0, 0])
    assert load["spans"] > 2 * ranks_driver.REQUESTS
    assert seen_together["first"] == "" and seen_together["after"] == seen_together["before"]


def test_a_version_that_one_engine_refuses_is_undone_by_the_other(seen_together):
    assert seen_together["commit"].startswith("engine 1, rank 0: the weights were changed")
    assert seen_together["commit then"] == seen_together["moved"] == seen_together["undone"] == ""
    assert seen_together["version"] == ranks_driver.MOVES - 1


def test_one_flipped_bit_in_one_engine_fails_the_proof_of_both(seen_together):
    norm, expert = "model.norm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"
    assert seen_together[norm] == f"ranks 0 and 1 hold different copies of elements of {norm}"
    assert seen_together[expert] == ranks_driver.OTHER_VERSION
    assert seen_together[f"{norm} then"] == seen_together[f"{expert} then"] == ""


def test_the_coordinator_of_engines_side_by_side_dies_with_a_killed_server(results):
    with suppress(psutil.NoSuchProcess):
        psutil.Process(results["coordinator"]).wait(60)
