"""The mirror follows anchors and deltas, forwards and back, bit for bit, for every element type; reading of deltas."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.consumers import replica_driver as driver
from tests.kernels.encoding import encode_delta
from tests.records import build
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.fingerprint import ZERO, Fingerprint, TensorKey, fingerprint
from tidemill.kernels.weights import delta_fetch, delta_shard
from tidemill.kernels.weights.checkpoint import WeightFilesError, bits_in_memory, map_checkpoint
from tidemill.kernels.weights.delta_fetch import ChunkFetcher
from tidemill.kernels.weights.graph import Delta
from tidemill.kernels.weights.mirror import Draft
from tidemill.kernels.weights.rebuild import Decoder
from tidemill.kernels.wire import DeltaError
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import Manifest, ShardPosition, TensorInfo

DTYPES = {
    "bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32, "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8, "int8": np.uint8, "uint8": np.uint8, "int4": np.uint8,
}  # fmt: skip
SHAPE = (12, 50)


def any_view(seed):
    """Return a tensor of every type with random patterns."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, np.iinfo(bits).max, SHAPE, bits, endpoint=True) for name, bits in DTYPES.items()}


def nudged(view, seed):
    random = np.random.default_rng(seed)
    changed = {name: bits.copy() for name, bits in view.items()}
    for bits in changed.values():
        bits.reshape(-1)[random.choice(bits.size, 9, replace=False)] ^= 1
    return changed


def manifest_of(version, view, parent=None):
    tensors = [
        TensorInfo(name, name, list(bits.shape), fingerprint(bits, TensorKey.of(name)).hex())
        for name, bits in view.items()
    ]
    total = sum((Fingerprint.from_hex(tensor.fingerprint) for tensor in tensors), ZERO)
    return build(Manifest, run_id="test", version=version, parent=parent, step=0,
                 shards=[ShardPosition(0, "", 0, [], 0, "")], tensors=tensors, fingerprint=total.hex())  # fmt: skip


def save(view, directory):
    directory.mkdir()
    stored = {"int4": torch.uint8}
    signed = {name: torch.from_numpy(bits.view(f"<i{bits.itemsize}")) for name, bits in view.items()}
    tensors = {name: bits.view(stored.get(name) or getattr(torch, name)) for name, bits in signed.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(draft, directory, manifest):
    draft.load(map_checkpoint(directory).items(), str(directory), manifest)


def delta_between(mirror, old, new, version, parent):
    """Return the changes of a delta, decoded with the mirror, and its manifest."""
    stream = list(encode_delta(version, parent, [TensorChange(n, n, old[n], new[n]) for n in new]))
    manifest = manifest_of(version, new, parent)
    decoder = Decoder(2)
    try:
        delta = Delta(manifest, parent, tuple(manifest.shards), 0)
        return decoder.decode(delta, lambda *_: (piece for piece in stream), mirror.resolve)[0], manifest
    finally:
        decoder.close()


def same(mirror, view):
    return all(np.array_equal(mirror.bits(name), bits.reshape(-1)) for name, bits in view.items())


@pytest.fixture
def mirror(tmp_path):
    return driver.anchored(save(any_view(0), tmp_path / "v0"), manifest_of(0, any_view(0)))


def test_every_element_type_survives_anchor_delta_and_checkpoint(mirror, tmp_path):
    old, new = any_view(0), nudged(any_view(0), 1)
    draft = Draft(mirror)
    draft.advance(*delta_between(mirror, old, new, 1, 0))
    draft.check(manifest_of(1, new))
    assert same(mirror, new) and {change.name for change in draft.changes()} == set(DTYPES)
    draft.keep()
    mirror.save(tmp_path / "saved")
    tensors = map_checkpoint(tmp_path / "saved")
    assert all(np.array_equal(bits_in_memory(tensors, name), bits.reshape(-1)) for name, bits in new.items())


@pytest.mark.parametrize("begins_with_anchor", [False, True])
def test_the_changes_of_a_draft_lead_from_the_old_weights_to_the_new(mirror, tmp_path, begins_with_anchor):
    views = [any_view(0), nudged(any_view(0), 1), nudged(nudged(any_view(0), 1), 2), any_view(0)]
    live = {name: bits.reshape(-1).copy() for name, bits in views[0].items()}
    draft = Draft(mirror)
    if begins_with_anchor:
        views[1] = any_view(9)
        views[2] = nudged(views[1], 2)
        load(draft, save(views[1], tmp_path / "v1"), manifest_of(1, views[1]))
    else:
        draft.advance(*delta_between(mirror, views[0], views[1], 1, 0))
    draft.advance(*delta_between(mirror, views[1], views[2], 2, 1))
    for change in draft.changes():
        assert len(np.unique(change.indices)) == change.indices.size
        assert (live[change.name][change.indices] != change.bits).all()
        live[change.name][change.indices] = change.bits
    assert all(np.array_equal(live[name], bits.reshape(-1)) for name, bits in views[2].items())


def test_a_draft_that_returns_to_its_start_has_no_changes(mirror):
    old, new = any_view(0), nudged(any_view(0), 1)
    draft = Draft(mirror)
    draft.advance(*delta_between(mirror, old, new, 1, 0))
    draft.advance(*delta_between(mirror, new, old, 2, 1))
    assert draft.changes() == ()


def test_a_step_that_makes_another_version_is_refused_and_writes_nothing(mirror):
    changes, manifest = delta_between(mirror, any_view(0), nudged(any_view(0), 1), 1, 0)
    with pytest.raises(DeltaError, match="does not make version 1"):
        Draft(mirror).advance(changes[1:], manifest)
    assert same(mirror, any_view(0))


@pytest.mark.parametrize("wrong", ["name", "dtype"])
def test_a_delta_of_a_tensor_that_is_not_served_is_refused(mirror, wrong):
    old, new = np.zeros(600, np.uint16), np.ones(600, np.uint16)
    change = TensorChange("other" if wrong == "name" else "float16", "bfloat16", old, new)
    stream = list(encode_delta(1, 0, [change]))
    manifest = manifest_of(1, any_view(0), 0)
    decoder = Decoder(1)
    with pytest.raises(DeltaError, match="not served"):
        decoder.decode(Delta(manifest, 0, tuple(manifest.shards), 0), lambda *_: iter_of(stream), mirror.resolve)
    decoder.close()


def iter_of(pieces):
    yield from pieces


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("value", "int8 of the anchor has fingerprint"),
        ("missing", "does not name the tensors of version 1"),
        ("shape", "has another shape or dtype than the one that is served"),
        ("claim", r"int8 of the anchor has 600 elements, its manifest says \[5, 50\]"),
    ],
)
def test_an_anchor_that_is_not_its_manifests_version_is_refused(mirror, tmp_path, wrong, reason):
    view = any_view(3)
    manifest = manifest_of(1, view)
    if wrong == "value":
        view["int8"][0, 0] ^= 1
    elif wrong == "missing":
        del view["int8"]
    elif wrong == "claim":
        tensors = [replace(one, shape=[5, 50]) if one.name == "int8" else one for one in manifest.tensors]
        manifest = replace(manifest, tensors=tensors)
    else:
        view["int8"] = view["int8"][:5]
        manifest = manifest_of(1, view)
    draft = Draft(mirror)
    with pytest.raises(WeightFilesError, match=reason):
        load(draft, save(view, tmp_path / "bad"), manifest)
    draft.revert()
    assert same(mirror, any_view(0))


class ManyChunks:
    """A version of several shards with small chunks, in a log in memory that records the calls."""

    def __init__(self, n_shards):
        view = {f"{k}": np.random.default_rng(k).integers(0, 1 << 14, 4000, np.uint16) for k in range(n_shards)}
        self.log = driver.MemoryLog()
        held, delta_shard.CHUNK_BYTES = delta_shard.CHUNK_BYTES, 128
        try:
            self.manifest = driver.publish(self.log, 1, view, driver.nudged(view, 1, 0.5), n_shards=n_shards)
        finally:
            delta_shard.CHUNK_BYTES = held

    def read(self, fetcher, shard):
        return b"".join(fetcher.pieces(self.manifest, self.manifest.shards[shard]))


def test_the_fetcher_holds_no_more_than_its_limit():
    many = ManyChunks(1)
    fetcher = ChunkFetcher(many.log, 60.0, held_bytes=1000)
    peak = 0
    for _ in fetcher.pieces(many.manifest, many.manifest.shards[0]):
        peak = max(peak, fetcher._held_bytes)
    assert many.manifest.delta_bytes > 2000 and peak <= 1000


def test_shards_are_read_in_any_order_with_any_limit():
    many = ManyChunks(3)
    fetcher = ChunkFetcher(many.log, 60.0, held_bytes=1000)
    n_bytes = 0
    for shard in (2, 0, 1):
        n_bytes += len(many.read(fetcher, shard))
        assert fetcher._held_bytes <= 1000
    assert n_bytes == many.manifest.delta_bytes and not fetcher._held


def test_the_fetcher_skips_chunks_of_other_shards():
    many = ManyChunks(3)
    fetcher = ChunkFetcher(many.log, 60.0)
    many.read(fetcher, 2)
    assert fetcher._held_bytes == 0 and many.log.at == len(many.log.located)


@pytest.mark.parametrize("opened_after", [False, True])
def test_the_fetcher_goes_back_only_to_a_delta_from_before_the_log_was_opened(opened_after):
    many = ManyChunks(1)
    many.log.at = len(many.log.located) if opened_after else many.log.at
    many.read(ChunkFetcher(many.log, 60.0), 0)
    assert many.log.sought == ([0] if opened_after else [])


def test_a_connection_that_fails_closes_the_earlier_ones(monkeypatch):
    closed = []

    class Reader(nullcontext):
        def __init__(self, *_given, client_id, **_options):
            super().__init__()
            if client_id == "c-2":
                raise LookupError("no topic")

        def __exit__(self, *_error):
            closed.append(self)

    monkeypatch.setattr(delta_fetch, "LogReader", Reader)
    with pytest.raises(LookupError), delta_fetch.open_fetcher(KafkaSettings(), 1.0, 3, "c"):
        pass
    assert len(closed) == 2


def test_shards_are_decoded_at_the_same_time():
    """Each of two shards waits until the other is read, so both succeed only if they are read at the same time."""
    many, both = ManyChunks(2), Barrier(2, timeout=60)
    fetcher, decoder = ChunkFetcher(many.log, 60.0), Decoder(2)

    def pieces(manifest, shard):
        both.wait()
        yield from fetcher.pieces(manifest, shard)

    delta = Delta(many.manifest, 0, tuple(many.manifest.shards), 0)
    changes, _ = decoder.decode(delta, pieces, lambda block: ())
    decoder.close()
    assert changes == ()


class SlowLog(driver.MemoryLog):
    """A log whose first poll after a seek returns nothing, like one at the end of a long link."""

    def seek(self, topic, partition, offset):
        super().seek(topic, partition, offset)
        self.pending = True

    def poll(self, timeout_s, max_records):
        pending, self.pending = getattr(self, "pending", False), False
        return [] if pending else super().poll(timeout_s, max_records)


def test_two_shards_of_one_partition_do_not_take_each_others_seeks_for_a_deleted_chunk():
    many = ManyChunks(2)
    many.log = SlowLog(many.log.located, at=len(many.log.located))
    # The pause between two polls lets the other thread seek before the sought chunk has arrived.
    fetcher = ChunkFetcher(many.log, 60.0, interrupt=lambda: time.sleep(0.005))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda shard: many.read(fetcher, shard), range(2)))
    assert sum(map(len, found)) == many.manifest.delta_bytes and not fetcher._held


def test_an_error_of_one_shard_ends_the_others():
    many = ManyChunks(2)
    shards = [many.manifest.shards[0], replace(many.manifest.shards[1], digest="0" * 32)]
    fetcher, decoder = ChunkFetcher(many.log, 200.0), Decoder(2)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="does not match its record"):
        decoder.decode(Delta(many.manifest, 0, tuple(shards), 0), fetcher.pieces, lambda block: ())
    assert time.monotonic() - begun < 60
    decoder.close()
