"""Reader and writer of one rank's live parameters in checkpoint coordinates, bit for bit.

A write has two phases. `prepare` checks everything, computes the places and copies the present elements; it changes no
parameter and may run while the engine samples. `commit` only stores elements; `take_back` is equally fast. Invariants:
a write happens whole or not at all, and only on the weights for which it was prepared; a read returns the values that
the next forward pass uses, because both use the parameters' own storage.

`RankWeights` does this for a worker of the engine: it prepares and proves in a thread, and keeps the last write so that
it can be taken back. Nothing here needs vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.consumers.replica.places import Box, DeviceStorage, Elements, HostStorage, Layout
from tidemill.consumers.replica.ranks import HeldBoxes, taken_over
from tidemill.consumers.replica.weight_map import UnsupportedModelError
from tidemill.kernels.backend import backend_for
from tidemill.kernels.compiled import Bits, Indices
from tidemill.kernels.elements import AnyArray
from tidemill.kernels.fingerprint import ZERO, TensorKey
from tidemill.kernels.weights.bits import TensorSpec
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint
from tidemill.kernels.weights.mirror import ElementChange

HOST = "cpu"
_PIECE = 1 << 20
"""Elements per read: limits the memory of a proof to a few MiB."""

_VIEWS = {1: (torch.int8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
"""For an element's width: torch's integer type that numpy also has, and the pattern's type."""


@dataclass(frozen=True, slots=True)
class WeightWrite:
    """A prepared write, valid for the weights after `after` writes."""

    patches: Mapping[str, tuple[AnyArray, AnyArray, AnyArray]]
    """For each parameter, from its storage's `find`: places, new elements, and the elements that they replace."""
    after: int


WholeWrite = list[tuple[Layout, Box, Bits]]
"""New patterns for every element that the rank holds, box by box."""


class LiveWeights:
    """The live storage of a model, or of a rank's part of it, accessed through the layout of each checkpoint tensor."""

    def __init__(self, model: torch.nn.Module, layouts: Mapping[str, Layout], tensors: Sequence[TensorSpec]) -> None:
        held = {name: layout for name, layout in layouts.items() if layout.boxes}
        self.layouts = layouts
        """In the checkpoint's order, including tensors of which this rank holds nothing."""
        self._storage: dict[str, HostStorage | DeviceStorage] = {}
        used = {layout.parameter for layout in held.values()}
        for name, parameter in model.named_parameters():
            if name not in used:
                continue
            width, device = parameter.element_size(), parameter.device
            if width not in _VIEWS:
                raise UnsupportedModelError(f"{name} is {parameter.dtype} on {device}: not readable bit for bit")
            as_int, as_bits = _VIEWS[width]
            whole = torch.empty(0, dtype=parameter.dtype, device=device).set_(parameter.data.untyped_storage())
            elements = whole.view(as_int)
            on_host = device.type == HOST
            self._storage[name] = HostStorage(elements.numpy().view(as_bits)) if on_host else DeviceStorage(elements)
        self._patterns = {
            spec.name: (spec.n_elements, np.dtype(_VIEWS[getattr(torch, spec.dtype).itemsize][1])) for spec in tensors
        }
        self._writes = 0
        for name, layout in held.items():
            storage = self._storage[layout.parameter]
            if layout.order.size and not isinstance(storage, HostStorage):
                raise UnsupportedModelError(f"{layout.parameter} was reordered on a GPU: not mapped")
            if layout.last >= storage.size or (layout.order.size and storage.size % layout.order.size):
                raise UnsupportedModelError(f"{name} does not fit into {layout.parameter}: not mapped")

    def patterns(self, name: str) -> tuple[int, np.dtype[Any]]:
        """Return number and unsigned integer type of a tensor's patterns. Raises ValueError if it is not served."""
        if name not in self._patterns:
            raise ValueError(f"the engine serves no tensor {name}")
        return self._patterns[name]

    def prepare(self, changes: Sequence[ElementChange]) -> WeightWrite:
        """Prepare a write of some elements; nothing is written, and nothing may be written meanwhile.

        Raises:
            ValueError: a name, an index, a length or a width is wrong.
        """
        after = self._writes
        placed: dict[str, list[tuple[Layout, Indices, Elements]]] = {}
        for change in changes:
            length, dtype = self.patterns(change.name)
            if change.indices.shape != change.bits.shape or change.indices.ndim != 1:
                raise ValueError(f"{change.name}: {change.indices.shape} indices for {change.bits.shape} values")
            if change.bits.dtype != dtype:
                raise ValueError(f"{change.name}: patterns are {dtype}, not {change.bits.dtype}")
            if len(change.indices) and not 0 <= change.indices.min() <= change.indices.max() < length:
                raise ValueError(f"{change.name}: an index is outside its {length} elements")
            layout = self.layouts[change.name]
            if layout.boxes:
                placed.setdefault(layout.parameter, []).append((layout, change.indices, change.bits))
        return WeightWrite({name: self._storage[name].find(found) for name, found in placed.items()}, after)

    def commit(self, write: WeightWrite) -> None:
        """Write the prepared elements. Raises ValueError, before it writes, if there was another write meanwhile."""
        if write.after != self._writes:
            raise ValueError("the weights were changed after this write was prepared: prepare it again")
        self._writes += 1
        for parameter, (places, new, _) in write.patches.items():
            self._storage[parameter].put(places, new)

    def take_back(self, write: WeightWrite) -> None:
        """Write back the elements that `write` replaced. Raises ValueError if it was not the last write."""
        if write.after != self._writes - 1:
            raise ValueError("this write was not the last one: it cannot be taken back")
        self._writes += 1
        for parameter, (places, _, old) in write.patches.items():
            self._storage[parameter].put(places, old)

    def prepare_whole(self, whole: Iterable[tuple[str, Bits]]) -> WholeWrite:
        """Copy this rank's elements of every tensor (name, uN[n]), one by one; nothing is written.

        Raises ValueError for a tensor with another length or width.
        """
        parts: WholeWrite = []
        for name, bits in whole:
            length, dtype = self.patterns(name)
            if bits.shape != (length,) or bits.dtype != dtype:
                raise ValueError(f"{name} has {length} {dtype} patterns, the new value has {bits.shape} {bits.dtype}")
            layout = self.layouts[name]
            parts += [(layout, box, box.cut(bits)) for box in layout.boxes]
        return parts

    def write_whole(self, write: WholeWrite) -> None:
        """Overwrite every element that this rank holds."""
        self._writes += 1
        for layout, box, bits in write:
            self._storage[layout.parameter].write(layout, box, bits)

    def warm(self) -> None:
        """Run every compiled loop of a write once, with no elements, so that none is compiled in a pause."""
        nowhere = np.empty(0, dtype=np.int64)
        nowhere.flags.writeable = False
        changes = [ElementChange(name, nowhere, np.empty(0, self._patterns[name][1])) for name in self.layouts]
        for change in changes:
            # Shared changes are read-only, which is another type for the compiled loops.
            change.bits.flags.writeable = False
        self.commit(self.prepare(changes))
        for change in changes:
            layout = self.layouts[change.name]
            if layout.boxes:
                nothing = Box(layout.boxes[0].source, layout.boxes[0].target, 0, 1, 1, 1)
                self._storage[layout.parameter].write(layout, nothing, np.empty(0, change.bits.dtype))

    def pieces(self, name: str) -> Iterator[tuple[Box, int, AnyArray]]:
        """Yield this rank's elements of a tensor, in order: a box, the first element's number in it, patterns uN[n].

        The patterns are numpy arrays, or tensors on the parameter's device.

        Raises:
            ValueError: an element is not a value of the checkpoint's type: it cannot belong to any version.
        """
        layout = self.layouts[name]
        for box in layout.boxes:
            for begin in range(0, box.length, _PIECE):
                room = np.empty(min(_PIECE, box.length - begin), dtype=self._patterns[name][1])
                bits = self._storage[layout.parameter].read(layout, box, begin, room)
                if bits is None:
                    raise ValueError(f"a live element of {name} is no value of the checkpoint's type")
                yield box, begin, bits


class RankWeights:
    """One rank's live weights, with the staged write, the last update, and the thread that prepares and proves."""

    def __init__(self, live: LiveWeights) -> None:
        self.live = live
        self.staged: WeightWrite | WholeWrite | None = None
        self.undo: WeightWrite | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-rank")
        self.work: Future[dict[str, Any]] | None = None

    def stage(self, path: str, digest: str) -> dict[str, Any]:
        """Prepare a write of changes that the server shared in memory."""
        started = time.monotonic()
        self.staged = self.live.prepare(taken_over(path, digest))
        return {"stage_ms": 1e3 * (time.monotonic() - started)}

    def load(self, directory: str) -> dict[str, Any]:
        """Prepare a write of everything, from a checkpoint directory."""
        started, tensors = time.monotonic(), map_checkpoint(Path(directory))
        self.staged = self.live.prepare_whole((name, bits_in_memory(tensors, name)) for name in self.live.layouts)
        return {"stage_ms": 1e3 * (time.monotonic() - started)}

    def prove(self) -> dict[str, Any]:
        """Fingerprint this rank's elements, in the order of `boxes`: u8[boxes, 2]."""
        found: list[tuple[int, int]] = []
        for name, layout in self.live.layouts.items():
            key = TensorKey.of(name)
            prints = dict.fromkeys(layout.boxes, ZERO)
            for box, begin, bits in self.live.pieces(name):
                kernels = backend_for(bits)
                if box.dense:
                    prints[box] += kernels.fingerprint(bits, key, box.source + begin)
                else:
                    where = kernels.beside(box.indices(begin, len(bits)), bits)
                    prints[box] += kernels.fingerprint_at(bits, key, where)
            found += [(one.lo, one.hi) for one in prints.values()]
        return {"prints": np.array(found, dtype=np.uint64).reshape(-1, 2)}

    def boxes(self) -> HeldBoxes:
        """Return this rank's elements of each tensor, as `ranks.HeldBoxes`."""
        rows: list[tuple[int, ...]] = []
        for number, layout in enumerate(self.live.layouts.values()):
            for box in layout.boxes:
                # Elements that are adjacent in the tensor are one row, also if they are not in this rank's storage.
                shape = (1, box.length, box.length) if box.dense else (box.rows, box.row, box.pitch)
                rows.append((number, box.source, *shape))
        return np.array(rows, dtype=np.int64).reshape(-1, 5)

    def commit(self) -> dict[str, Any]:
        """Write the staged elements, all or none. Raises ValueError if nothing is staged."""
        started, staged = time.monotonic(), self.staged
        self.staged = self.undo = None
        if isinstance(staged, WeightWrite):
            self.live.commit(staged)
            self.undo = staged
        elif staged is not None:
            self.live.write_whole(staged)
        else:
            raise ValueError("nothing is staged that could be written")
        return {"apply_ms": 1e3 * (time.monotonic() - started)}

    def take_back(self) -> dict[str, Any]:
        """Undo the last commit. Raises ValueError if there is none that can be undone."""
        undo, self.undo = self.undo, None
        if undo is None:
            raise ValueError("there is no update to undo")
        self.live.take_back(undo)
        return {}
