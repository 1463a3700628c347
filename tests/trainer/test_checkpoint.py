"""Checkpoints: training continues from one bit for bit; a damaged one is refused; the newest few are kept."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.conftest import make_trainable, tiny_model
from tidemill.kernels.weights.checkpoint import PIECE_BYTES, file_pieces
from tidemill.kernels.weights.ranks import Ranks
from tidemill.trainer import checkpoint
from tidemill.trainer.checkpoint import CheckpointState, CheckpointStore
from tidemill.trainer.config import KlSettings, TrainerSettings
from tidemill.trainer.step import Learner
from tidemill.trainer.trainable import TopicProgress

SETTINGS = TrainerSettings(kl=KlSettings(coefficient=0.0), row_tokens=128)
PROGRESS = TopicProgress({0: 5, 3: 2}, {0: [7, 9]}, ["a", "b"])


def state_of(step: int) -> CheckpointState:
    return CheckpointState("run", "main", step, step, "f" * 32, "hash", PROGRESS)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path / "store"), "run", "main", keep=2)


def test_training_continues_bit_for_bit(store: CheckpointStore) -> None:
    groups = [make_trainable("a"), make_trainable("b")]
    straight = Learner(tiny_model(), SETTINGS, None)
    for step in (1, 2):
        straight.train(groups, step, 0, seed=step)
    store.write(state_of(2), straight.masters.state())
    resumed = Learner(tiny_model(seed=9), SETTINGS, None)
    state, tensors = store.read(2)
    resumed.masters.load(tensors)
    assert state == state_of(2)
    for learner in (straight, resumed):
        for step in (3, 4):
            learner.train(groups, step, 0, seed=step)
    expected, found = straight.masters.state(), resumed.masters.state()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_file_is_written_in_pieces_without_a_copy_of_the_tensors(store: CheckpointStore, monkeypatch) -> None:
    pieces: list[int] = []

    def written(weights, metadata):
        for piece in file_pieces(weights, metadata):
            pieces.append(len(piece))
            yield piece

    monkeypatch.setattr("tidemill.trainer.checkpoint.file_pieces", written)
    whole = torch.arange(6 << 20, dtype=torch.float32).reshape(2, -1)
    store.write(state_of(1), {"master/w": whole, "master/transposed": whole.T, "step/w": torch.tensor(3.0)})
    assert max(pieces) == PIECE_BYTES < whole.nbytes
    _, tensors = store.read(1)
    assert torch.equal(tensors["master/w"], whole) and torch.equal(tensors["master/transposed"], whole.T)
    assert tensors["step/w"].shape == () and tensors["step/w"] == 3.0


@pytest.mark.parametrize("rows", [(0, 3), (2, 5), (3, 7), (5, 5), (0, 7)])
def test_only_the_requested_rows_of_each_file_are_read(
    store: CheckpointStore, monkeypatch, rows: tuple[int, int]
) -> None:
    """Three ranks hold 4, 3 and 0 rows."""
    whole, moment = torch.arange(14, dtype=torch.float32).reshape(7, 2), torch.arange(7, dtype=torch.bfloat16)
    for rank, own in ((1, slice(4, 7)), (2, slice(7, 7)), (0, slice(0, 4))):
        ranks = FixedRanks(rank, 3)
        tensors = {"master/w": whole[own], "exp_avg/w": moment[own], "step/w": torch.tensor(3.0)}
        store.write(state_of(1), tensors, ranks=ranks)
    taken: list[int] = []
    read = checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", lambda file, at, into: taken.append(into.nbytes) or read(file, at, into))
    _, tensors = store.read(1, {"w": rows})
    assert torch.equal(tensors["master/w"], whole[slice(*rows)])
    assert torch.equal(tensors["exp_avg/w"], moment[slice(*rows)])
    assert tensors["step/w"] == 3.0
    assert sum(taken) == (rows[1] - rows[0]) * (8 + 2) + 3 * 4


class FixedRanks(Ranks):
    """One rank of several, which does its own part and does not wait for the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def from_first(self, make):
        return make() if self.is_first else None


def test_the_newest_checkpoint_is_never_past_the_log(store: CheckpointStore) -> None:
    assert store.newest(100) is None
    for step in (3, 6):
        store.write(state_of(step), {"master/w": torch.zeros(1)})
    assert [store.newest(last) for last in (2, 3, 5, 6, 9)] == [None, 3, 3, 6, 6]


def test_checkpoints_of_another_log_do_not_replace_the_run_s_own(store: CheckpointStore) -> None:
    """The run began again on new topics, with the same run id and store."""
    for step in (10, 20, 3, 6, 9):
        store.write(state_of(step), {"master/w": torch.zeros(1)})
    assert store.newest(9) == 9
    assert store.steps() == [6, 9, 10, 20]


def test_pinned_steps_are_kept_while_they_are_pinned(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        store.write(state_of(step), {"master/w": torch.zeros(1)}, pinned={1, 2})
    assert store.steps() == [1, 2, 3, 4]
    store.write(state_of(5), {"master/w": torch.zeros(1)}, pinned={2})
    assert store.steps() == [2, 4, 5]


def test_progress_in_both_topics_is_stored(store: CheckpointStore) -> None:
    state = replace(state_of(1), online=TopicProgress({0: 9}, {0: [11]}, ["batch"]))
    store.write(state, {"master/w": torch.zeros(1)})
    assert store.read(1)[0] == state


def test_a_checkpoint_older_than_online_batches_is_read(store: CheckpointStore, monkeypatch) -> None:
    whole = dataclasses.asdict
    with monkeypatch.context() as patched:
        patched.setattr(dataclasses, "asdict", lambda state: {k: v for k, v in whole(state).items() if k != "online"})
        path = Path(store.write(state_of(1), {"master/w": torch.zeros(1)}))
    assert b"online" not in path.read_bytes()
    assert store.read(1)[0] == state_of(1)


def test_a_truncated_checkpoint_is_refused_by_name(store: CheckpointStore) -> None:
    path = Path(store.write(state_of(1), {"master/w": torch.zeros(64)}))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(RuntimeError, match=r"step-00000001.*damaged.*delete it"):
        store.read(1)


def test_a_checkpoint_with_a_damaged_length_is_refused_by_name(store: CheckpointStore) -> None:
    path = Path(store.write(state_of(1), {"master/w": torch.zeros(64)}))
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(RuntimeError, match=r"step-00000001.*damaged.*delete it"):
        store.read(1)


def test_an_unfinished_checkpoint_is_not_listed(store: CheckpointStore) -> None:
    path = Path(store.write(state_of(1), {"master/w": torch.zeros(1)}))
    path.rename(path.with_name("step-00000002.safetensors.partial"))
    assert store.steps() == []


def test_files_of_an_interrupted_checkpoint_are_deleted_with_the_next_one(store: CheckpointStore) -> None:
    path = Path(store.write(state_of(1), {"master/w": torch.zeros(1)}))
    path.rename(path.with_name("step-00000002.rank-1-of-2.safetensors.partial"))
    kept = store.write(state_of(3), {"master/w": torch.zeros(1)})
    assert list(path.parent.iterdir()) == [Path(kept)]


def test_a_checkpoint_that_cannot_be_written_is_named(store: CheckpointStore, monkeypatch) -> None:
    def full(_weights, _metadata):
        yield b"head"
        raise OSError(28, "No space left on device")

    store.write(state_of(1), {"master/w": torch.ones(3)})
    monkeypatch.setattr("tidemill.trainer.checkpoint.file_pieces", full)
    with pytest.raises(OSError, match=r"step-00000002\.safetensors cannot be written.*No space left.*keep_checkpoints"):
        store.write(state_of(2), {"master/w": torch.ones(3)})
    assert store.steps() == [1]
