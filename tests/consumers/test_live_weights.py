"""Live weights over plain parameters: a write in checkpoint coordinates changes the elements that the loader would."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.consumers.replica import live_weights
from tidemill.consumers.replica.live_weights import LiveWeights
from tidemill.consumers.replica.places import Box, DeviceStorage, HostStorage, Layout
from tidemill.consumers.replica.weight_map import UnsupportedModelError, record_map
from tidemill.kernels.backend import backend_for
from tidemill.kernels.fingerprint import TensorKey, fingerprint
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.mirror import ElementChange

HIDDEN, ROWS, EXPERTS, INNER, PADDED = 4, 6, 3, 5, 8


class Fused(torch.nn.Module):
    """Loads as a serving engine does: fused rows, padded rows, padded columns, several matrices in one parameter."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Parameter(torch.zeros(8, HIDDEN, dtype=dtype))
        self.qkv = torch.nn.Parameter(torch.zeros(2 * ROWS, HIDDEN, dtype=dtype))
        self.w2 = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, PADDED, dtype=dtype))
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "embed":
                self.embed.data[: tensor.shape[0]].copy_(tensor)
            elif name in "qk":
                self.qkv.data["qk".index(name) * ROWS :][:ROWS].copy_(tensor)
            elif name == "down":
                for expert in range(EXPERTS):
                    self.w2.data[expert].narrow(1, 0, INNER).copy_(tensor[expert])
            elif name == "turned":
                self.norm.data.copy_(tensor.t()[0])
            elif name == "crossed":
                self.norm.data.view(2, 2).copy_(tensor[:2].t())
            elif name == "twice":
                self.norm.data.copy_(tensor)
                self.norm.data.copy_(tensor)
            elif name == "cast":
                self.norm.data.copy_(tensor.to(torch.float64))
            elif name == "anew":
                torch.empty(tensor.shape).copy_(tensor)
            else:
                getattr(self, name).data.copy_(tensor)


SPECS = [
    TensorSpec("embed", (7, HIDDEN), "bfloat16"),
    TensorSpec("q", (ROWS, HIDDEN), "bfloat16"),
    TensorSpec("k", (ROWS, HIDDEN), "bfloat16"),
    TensorSpec("down", (EXPERTS, HIDDEN, INNER), "bfloat16"),
    TensorSpec("norm", (HIDDEN,), "float32"),
]
ORDER = np.random.default_rng(3).permutation(HIDDEN * PADDED)
"""How the fake engine reorders each expert after loading."""


def reordered(model):
    """Reorder as the engine does after loading: element i of an expert moves to ORDER[i]."""
    flat = model.w2.data.reshape(EXPERTS, -1)
    packed = torch.empty_like(flat)
    packed[:, torch.from_numpy(ORDER)] = flat
    model.w2.data = packed.reshape(model.w2.shape)
    return model


def loaded(values, dtype=torch.float32, specs=SPECS, reorder=True):
    """Return a new model loaded with these bit patterns."""
    model = Fused(dtype)
    for spec in specs:
        if spec.name in values:
            signed = values[spec.name].view(f"<i{values[spec.name].itemsize}")
            tensor = torch.from_numpy(signed.copy()).view(getattr(torch, spec.dtype)).reshape(spec.shape)
            model.load_weights([(spec.name, tensor)])
    return reordered(model) if reorder else model


def live_of(model, specs=SPECS):
    return LiveWeights(model, record_map(model, specs, {"w2": ORDER}), specs)


def random_values(seed, specs=SPECS):
    random = np.random.default_rng(seed)
    widths = {"bfloat16": np.uint16, "float32": np.uint32}
    values = {spec.name: random.integers(0, 1 << 32, spec.n_elements).astype(widths[spec.dtype]) for spec in specs}
    # Loading converts, and a conversion may change the bits of a NaN.
    for bits in values.values():
        bits &= bits.dtype.type(~(1 << (8 * bits.itemsize - 2)) & ((1 << 8 * bits.itemsize) - 1))
    return values


def read_back(live):
    found = {}
    for name in live.layouts:
        bits = found[name] = np.zeros(*live.patterns(name))
        for box, begin, piece in live.pieces(name):
            bits[box.indices(begin, len(piece))] = np.asarray(piece)
    return found


def same_storage(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def difference(old, new, seed):
    random, changes = np.random.default_rng(seed), []
    for name in new:
        changed = random.permutation(np.flatnonzero(old[name] != new[name]))
        for part in np.array_split(changed, 3):
            changes.append(ElementChange(name, part, new[name][part]))
    return changes


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_a_write_has_the_result_of_the_loader_and_can_be_undone(seed, density):
    old, other = random_values(seed), random_values(seed + 1)
    chosen = np.random.default_rng(seed)
    new = {name: np.where(chosen.random(old[name].size) < density, other[name], old[name]) for name in old}
    model = loaded(old)
    live = live_of(model)
    assert all(np.array_equal(read_back(live)[name], old[name]) for name in old)
    write = live.prepare(difference(old, new, seed))
    assert same_storage(model, loaded(old))
    live.commit(write)
    assert same_storage(model, loaded(new))
    assert all(np.array_equal(read_back(live)[name], new[name]) for name in old)
    live.take_back(write)
    assert same_storage(model, loaded(old))


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([torch.float32, torch.bfloat16]))
def test_torchs_index_operations_do_what_the_compiled_loops_do(seed, density, dtype):
    """Torch reads and writes a parameter on a GPU; in this test its tensors are on the CPU."""
    specs = [replace(spec, dtype="bfloat16") for spec in SPECS] if dtype is torch.bfloat16 else SPECS
    old, other = random_values(seed, specs), random_values(seed + 1, specs)
    chosen = np.random.default_rng(seed)
    new = {name: np.where(chosen.random(old[name].size) < density, other[name], old[name]) for name in old}
    model, host = (loaded(old, dtype, specs, reorder=False) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_weights, "HOST", "another device")
        live = LiveWeights(model, record_map(model, specs, {}), specs)
    assert all(isinstance(storage, DeviceStorage) for storage in live._storage.values())
    live.warm()
    write = live.prepare(difference(old, new, seed))
    assert same_storage(model, host)
    live.commit(write)
    on_host = LiveWeights(host, record_map(host, specs, {}), specs)
    on_host.commit(on_host.prepare(difference(old, new, seed)))
    assert same_storage(model, host)
    assert all(np.array_equal(read_back(live)[name], new[name]) for name in new)
    for name in new:
        for (box, begin, bits), (_, _, on_cpu) in zip(live.pieces(name), on_host.pieces(name), strict=True):
            found = backend_for(bits).fingerprint(bits, TensorKey.of(name), box.source + begin)
            assert found == fingerprint(on_cpu, TensorKey.of(name), box.source + begin)
    live.take_back(write)
    assert all(np.array_equal(read_back(live)[name], old[name]) for name in old)
    live.write_whole(live.prepare_whole(other.items()))
    on_host.write_whole(on_host.prepare_whole(other.items()))
    assert same_storage(model, host)
    if dtype is torch.float32:
        model.qkv.data.view(torch.int32)[3, 1] ^= 1
        with pytest.raises(ValueError, match="q is no value"):
            list(live.pieces("q"))


def test_a_reordered_parameter_on_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(live_weights, "HOST", "another device")
    with pytest.raises(UnsupportedModelError, match="w2 was reordered on a GPU"):
        live_of(loaded({}))


def test_every_bit_pattern_is_preserved_including_nans():
    live = live_of(loaded({}))
    values = {name: random_values(9)[name] | 0x7F81 for name in live.layouts}
    live.write_whole(live.prepare_whole(values.items()))
    assert all(np.array_equal(read_back(live)[name], values[name]) for name in values)


def test_warming_up_changes_nothing():
    model = loaded(random_values(1))
    live_of(model).warm()
    assert same_storage(model, loaded(random_values(1)))


def test_a_whole_write_equals_a_new_load():
    new = random_values(4)
    model = loaded(random_values(1))
    live = live_of(model)
    live.write_whole(live.prepare_whole(new.items()))
    assert same_storage(model, loaded(new))


def test_a_bf16_engine_holds_bf16_bits():
    specs = [spec for spec in SPECS if spec.dtype == "bfloat16"] + [TensorSpec("norm", (HIDDEN,), "bfloat16")]
    model = reordered(Fused(torch.bfloat16))
    live, values = live_of(model, specs), random_values(2, specs)
    live.write_whole(live.prepare_whole(values.items()))
    assert all(np.array_equal(read_back(live)[name], values[name]) for name in values)
    assert np.array_equal(model.norm.data.view(torch.int16).numpy().view(np.uint16), values["norm"])


def test_a_flipped_lowest_bit_of_a_bf16_value_in_an_fp32_engine_is_detected():
    model = loaded(random_values(1))
    live = live_of(model)
    model.qkv.data.view(torch.int32)[3, 1] ^= 1
    with pytest.raises(ValueError, match="q is no value"):
        list(live.pieces("q"))


@pytest.mark.parametrize(
    "change",
    [
        ElementChange("unknown", np.array([0]), np.array([1], np.uint16)),
        ElementChange("q", np.array([ROWS * HIDDEN]), np.array([1], np.uint16)),
        ElementChange("q", np.array([-1]), np.array([1], np.uint16)),
        ElementChange("q", np.array([0, 1]), np.array([1], np.uint16)),
        ElementChange("q", np.array([0]), np.array([1], np.uint32)),
        ElementChange("norm", np.array([0]), np.array([1], np.uint16)),
    ],
)
def test_a_wrong_change_is_refused_and_nothing_is_written(change):
    model = loaded(random_values(1))
    good = ElementChange("k", np.array([0]), np.array([1], np.uint16))
    with pytest.raises(ValueError, match=change.name):
        live_of(model).prepare([good, change])
    assert same_storage(model, loaded(random_values(1)))


@pytest.mark.parametrize("wrong", [np.zeros(3, np.uint16), np.zeros(ROWS * HIDDEN, np.uint32)])
def test_a_wrong_whole_value_is_refused_and_nothing_is_written(wrong):
    model = loaded(random_values(1))
    with pytest.raises(ValueError, match="q has 24 uint16 patterns"):
        live_of(model).prepare_whole([("k", random_values(5)["k"]), ("q", wrong)])
    assert same_storage(model, loaded(random_values(1)))


def test_a_write_fits_only_the_weights_that_it_was_prepared_for():
    live = live_of(loaded(random_values(1)))
    first, second = (live.prepare([ElementChange("q", np.array([k]), np.array([k], np.uint16))]) for k in (0, 1))
    live.commit(first)
    with pytest.raises(ValueError, match="prepare it again"):
        live.commit(second)
    live.write_whole(live.prepare_whole([("q", random_values(6)["q"])]))
    with pytest.raises(ValueError, match="not the last one"):
        live.take_back(first)


@pytest.mark.parametrize(
    ("spec", "dtype", "why"),
    [
        (TensorSpec("norm", (HIDDEN,), "float32"), torch.bfloat16, "norm is float32, the engine holds it as bfloat16"),
        (TensorSpec("norm", (HIDDEN,), "float16"), torch.float32, "norm is float16, the engine holds it as float32"),
        (TensorSpec("turned", (HIDDEN, 1), "bfloat16"), torch.float32, ""),
        (TensorSpec("crossed", (HIDDEN, 2), "bfloat16"), torch.float32, "crossed lies in norm with gaps"),
        (TensorSpec("twice", (HIDDEN,), "bfloat16"), torch.float32, "elements of twice from 0 lie in two places"),
        (TensorSpec("cast", (HIDDEN,), "bfloat16"), torch.float32, "changes the values or shape of cast"),
        (TensorSpec("embed", (9, HIDDEN), "bfloat16"), torch.float32, "changes the values or shape of embed"),
        (TensorSpec("nowhere", (1,), "bfloat16"), torch.float32, "no place for checkpoint tensor nowhere"),
        (TensorSpec("anew", (HIDDEN,), "bfloat16"), torch.float32, "^the engine's loader writes anew to no parameter"),
    ],
)
def test_a_tensor_that_cannot_be_mapped_exactly_is_refused_with_the_reason(spec, dtype, why):
    model = Fused(dtype)
    for name in list(dict(model.named_parameters())):
        if name not in ("norm", "embed" if spec.name == "embed" else "norm"):
            delattr(model, name)
    others = [TensorSpec("norm", (HIDDEN,), "bfloat16")] if spec.name in ("embed", "nowhere") else []
    if not why:
        assert record_map(model, [spec], {})
        return
    with pytest.raises(UnsupportedModelError, match=why):
        record_map(model, [*others, spec], {})


def test_a_parameter_without_a_checkpoint_tensor_is_refused():
    with pytest.raises(UnsupportedModelError, match="names no tensor for the engine's norm"):
        record_map(Fused(), SPECS[:-1], {})


def test_a_packed_away_parameter_is_refused():
    model = Fused()
    model.qkv.data = torch.empty(0)
    with pytest.raises(UnsupportedModelError, match="packed qkv out of reach"):
        record_map(model, SPECS, {})


def test_a_layout_beyond_its_parameter_is_refused():
    layout = Layout.of("norm", [Box(0, 1, 1, HIDDEN, HIDDEN, HIDDEN)], None, 0)
    assert layout.last == HIDDEN
    with pytest.raises(UnsupportedModelError, match="does not fit"):
        LiveWeights(Fused(), {"norm": layout}, [SPECS[-1]])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 7), st.integers())
def test_a_layout_visits_each_of_its_places_once(rows, row, left_out, gap, target, seed):
    """Two boxes, each in its own reordered block; `left_out` columns of the tensor are stored elsewhere."""
    step, pitch = row + gap, row + left_out
    block, length = 2 * (target + rows * step), rows * row
    order = np.random.default_rng(seed % 1000).permutation(block)
    boxes = [Box(k * rows * pitch, k * block + target, rows, row, pitch, step) for k in range(2)]
    layout = Layout.of("p", boxes, order, 0)
    number, column = np.arange(length) // row, np.arange(length) % row
    expected = [*order[target + number * step + column], *(block + order[target + number * step + column])]
    held = np.concatenate([number * pitch + column, rows * pitch + number * pitch + column])
    assert [*boxes[0].indices(0, length), *boxes[1].indices(0, length)] == held.tolist()
    tensor = np.random.default_rng(5).integers(0, 1 << 32, 2 * rows * pitch).astype(np.uint32)
    storage = HostStorage(np.arange(2 * block, dtype=np.uint32))
    found, new, _ = storage.find([(layout, np.arange(tensor.size), tensor)])
    assert (found.tolist(), new.tolist()) == (expected, tensor[held].tolist())
    for box, where in zip(boxes, (expected[:length], expected[length:]), strict=True):
        room = np.empty(length - length // 2, np.uint32)
        assert storage.read(layout, box, length // 2, room).tolist() == where[length // 2 :]
        storage.write(layout, box, box.cut(tensor))
    assert storage.elements[expected].tolist() == tensor[held].tolist()
    assert max(expected) <= layout.last
