"""Update paths over any history with any damage lead to the version, bit for bit, or leave the old weights."""

import tempfile
import tracemalloc
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.consumers.replica_support import base_directory
from tests.kernels.encoding import encode_delta
from tests.records import build, tensor_infos
from tidemill.kernels.block import CodecSettings
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.weights.anchor import write_anchor
from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.graph import Delta, UpdatePath, VersionGraph
from tidemill.kernels.weights.mirror import Draft, Mirror
from tidemill.kernels.weights.rebuild import Rebuilder, RefusedStepError
from tidemill.kernels.wire import DeltaError
from tidemill.schemas.records import Manifest, ShardPosition, SkipDelta

SHAPES = {"embed": (20, 16), "up": (48, 16), "norm": (16,)}
SEEDS = st.integers(0, 1 << 30)


def first_view(shapes=None):
    random = np.random.default_rng(0)
    return {n: random.integers(0, 1 << 14, shape, dtype=np.uint16) for n, shape in (shapes or SHAPES).items()}


def nudged(view, seed, density=0.1):
    random = np.random.default_rng(seed)
    return {n: np.where(random.random(b.shape) < density, b ^ np.uint16(1), b) for n, b in view.items()}


def same(mirror, view):
    return mirror.fingerprints.keys() == view.keys() and all(
        np.array_equal(mirror.bits(name), bits.reshape(-1)) for name, bits in view.items()
    )


class Streams:
    """Deltas in memory, indexed by the offset in their shards. Their bytes may be damaged or late."""

    def __init__(self):
        self.streams, self.faults = [], {}

    def add(self, version, base, old, new, codec=None):
        changes = [TensorChange(name, "bfloat16", old[name], new[name]) for name in new]
        self.streams.append(list(encode_delta(version, base, changes, codec or CodecSettings())))
        return [ShardPosition(0, "", 0, [len(self.streams) - 1], 0, "")]

    def pieces(self, manifest, shard):
        (offset,) = shard.offsets
        yield from self.streams[offset]
        if self.faults.get(offset) == "damaged":
            raise DeltaError("it does not match its record")
        if self.faults.get(offset) == "late":
            raise TimeoutError("did not arrive")


def manifest_of(version, parent, view, shards, anchor=None):
    tensors = tensor_infos(view)
    return build(Manifest, run_id="run", version=version, parent=parent, shards=shards, delta_bytes=len(shards),
                 tensors=tensors, fingerprint=total_fingerprint(tensors).hex(), anchor=anchor)  # fmt: skip


class Histories(RuleBasedStateMachine):
    """A branch that grows, forks and is damaged, and a mirror that follows its paths."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.base = base_directory(self.root / "base")
        self.deltas, self.graph = Streams(), VersionGraph("run", "main")
        self.views, self.bad_anchors, self.lies = [], set(), set()
        self.rebuilders = [Rebuilder(self.deltas.pieces, 2, directory) for directory in (None, self.root / "copies")]
        self.mirror, self.held = Mirror(), None

    def teardown(self):
        for rebuilder in self.rebuilders:
            rebuilder.close()
        self.stack.close()

    @initialize()
    def begin(self):
        self.views.append(first_view())
        self.graph.observe(manifest_of(0, None, self.views[0], [], self.anchor(0)))

    def anchor(self, version):
        return write_anchor(str(self.root / f"v{version}"), self.base, self.views[version])

    def drawn(self, seed):
        return seed % len(self.views)

    @rule(seed=SEEDS, lies=st.booleans(), fault=st.sampled_from(["", "", "damaged", "late", "other weights"]),
          anchored=st.booleans())  # fmt: skip
    def publish(self, seed, lies, fault, anchored):
        """Publish the next version, from any older one."""
        parent, version = self.drawn(seed), len(self.views)
        self.views.append(nudged(self.views[parent], seed))
        old = nudged(self.views[parent], seed + 1, 0.5) if fault == "other weights" else self.views[parent]
        shards = self.deltas.add(version, parent, old, self.views[version])
        self.deltas.faults[shards[0].offsets[0]] = fault
        made = manifest_of(version, parent, self.views[version], shards, self.anchor(version) if anchored else None)
        if lies:
            self.lies.add(version)
            made = replace(made, tensors=[replace(made.tensors[0], fingerprint="0" * 32), *made.tensors[1:]])
        self.graph.observe(made)

    @precondition(lambda self: len(self.views) > 1)
    @rule(seed=SEEDS)
    def skip(self, seed):
        """Publish a skip-delta between any two versions."""
        version = 1 + seed % (len(self.views) - 1)
        base = seed % version
        shards = self.deltas.add(version, base, self.views[base], self.views[version])
        self.graph.observe(build(SkipDelta, run_id="run", version=version, base=base, shards=shards, n_bytes=1))

    @rule(seed=SEEDS)
    def damage_an_anchor(self, seed):
        version = self.drawn(seed)
        if self.graph.manifests[version].anchor is not None and version not in self.bad_anchors:
            self.bad_anchors.add(version)
            file = self.root / f"v{version}" / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))

    def first_fault(self, path, recount):
        """Return the step at which a path fails, and the error; None if it leads to its version."""
        if path.anchor is not None and path.anchor.version in self.bad_anchors | self.lies:
            return path.anchor, RefusedStepError
        for delta in path.deltas:
            if self.deltas.faults.get(delta.shards[0].offsets[0]) == "late":
                return delta, TimeoutError
            listed = recount or delta is path.deltas[-1]
            if self.deltas.faults.get(delta.shards[0].offsets[0]) or (listed and delta.version in self.lies):
                return delta, RefusedStepError
        return None

    @rule(seed=SEEDS, fresh=st.booleans(), recount=st.booleans(), copies=st.booleans(), keep=st.booleans())
    def follow(self, seed, fresh, recount, copies, keep):
        """Follow a path from the held version, or from nothing, to any version."""
        target = self.drawn(seed)
        mirror, held = (Mirror(), None) if fresh else (self.mirror, self.held)
        path = self.graph.path(target, held)
        if path is None:
            return
        before = {name: mirror.bits(name).copy() for name in mirror.fingerprints}
        draft, steps, fault = Draft(mirror), [], self.first_fault(path, recount)
        try:
            self.rebuilders[copies].follow(path, draft, recount=recount, progress=steps.append)
        except (RefusedStepError, TimeoutError) as error:
            assert fault is not None and (steps[-1], type(error)) == fault
            assert same(mirror, before) and mirror.version == (-1 if held is None else held)
            if isinstance(error, RefusedStepError):
                assert error.step is steps[-1]
                self.graph.refuse(error.step)
            return
        assert fault is None and steps == [*([path.anchor] if path.anchor else []), *path.deltas]
        assert same(mirror, self.views[target]) and mirror.version == target
        assert mirror.weights.keys() == SHAPES.keys()
        if before:
            for change in draft.changes():
                before[change.name][change.indices] = change.bits
            assert same(mirror, before)
        if keep:
            draft.keep()
            self.mirror, self.held = mirror, target
        else:
            draft.revert()
            assert fresh or held is None or same(mirror, self.views[held])
            assert held is not None or mirror.fingerprints == {}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=20)


@pytest.fixture
def long_path(tmp_path):
    """An anchor of a million elements, and a delta in small blocks that changes nearly all elements."""
    old = first_view({"w": (1024, 1024)})
    new = nudged(old, 1, density=0.99)
    anchor = write_anchor(str(tmp_path / "v0"), base_directory(tmp_path / "base"), old)
    deltas = Streams()
    shards = deltas.add(1, 0, old, new, CodecSettings(block_elements=1 << 14))
    made = manifest_of(1, 0, new, shards)
    return manifest_of(0, None, old, [], anchor), Delta(made, 0, tuple(shards), 1), deltas, new


def test_a_path_from_an_anchor_holds_one_copy_and_the_blocks_in_progress(long_path):
    """A delta's changes need six times the memory of the weights, so they are held only if an undo may need them."""
    anchor, delta, deltas, new = long_path
    peaks = []
    for paths in ([UpdatePath(anchor, (delta,))], [UpdatePath(anchor, ()), UpdatePath(None, (delta,))]):
        rebuilder, mirror = Rebuilder(deltas.pieces, 1), Mirror()
        tracemalloc.start()
        for path in paths:
            rebuilder.follow(path, Draft(mirror), progress=lambda _: tracemalloc.reset_peak())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        rebuilder.close()
        assert same(mirror, new)
    n_bytes = new["w"].nbytes
    assert peaks[0] < 1.6 * n_bytes, "more than the weights and a few blocks"
    assert peaks[1] > 4 * n_bytes, "the measure does not see what a delta changes"


class Interrupted(RuntimeError):
    pass


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_the_load_of_an_anchor_can_be_interrupted_at_each_file_and_tensor(tmp_path, remote):
    view = first_view()
    anchor = write_anchor(str(tmp_path / "v0"), base_directory(tmp_path / "base"), view)
    if remote:
        fsspec.filesystem("memory").put(str(tmp_path / "v0"), f"/store/{tmp_path.name}", recursive=True)
        anchor = replace(anchor, uri=f"memory://store/{tmp_path.name}")
    path = UpdatePath(manifest_of(0, None, view, [], anchor), ())
    calls, last = 0, 0

    def interrupt():
        nonlocal calls
        calls += 1
        if calls == last:
            raise Interrupted

    rebuilder, mirror = Rebuilder(Streams().pieces, 1, tmp_path / "copies", interrupt), Mirror()
    while True:
        last, calls = last + 1, 0
        try:
            rebuilder.follow(path, Draft(mirror))
        except Interrupted:
            assert mirror.version == -1 and mirror.weights == {}
            assert list(tmp_path.glob("copies/*")) == []
        else:
            break
    rebuilder.close()
    n_files = 2
    assert last > n_files + len(view) and same(mirror, view) and mirror.version == 0


def test_the_tensors_of_an_anchor_without_a_list_come_from_the_chain(long_path):
    anchor, _, deltas, new = long_path
    rebuilder, unlisted = Rebuilder(deltas.pieces, 1), replace(anchor, tensors=[])
    mirror = Mirror()
    rebuilder.follow(UpdatePath(unlisted, ()), Draft(mirror), outline=tensor_infos(new))
    assert mirror.fingerprint.hex() == anchor.fingerprint
    wrong = replace(unlisted, fingerprint="0" * 32)
    with pytest.raises(RefusedStepError, match="do not add up to version 0"):
        rebuilder.follow(UpdatePath(wrong, ()), Draft(Mirror()), outline=tensor_infos(new))
    with pytest.raises(RefusedStepError, match="does not name the tensors of version 0"):
        rebuilder.follow(UpdatePath(unlisted, ()), Draft(Mirror()), outline=tensor_infos(first_view()))
    with pytest.raises(RefusedStepError, match="version 0 has no anchor"):
        rebuilder.follow(UpdatePath(replace(anchor, anchor=None), ()), Draft(Mirror()))
    rebuilder.close()
