"""Figures of the kernels, one JSON line each: `python tests/bench/bench_kernels.py`.

With a GPU, every kernel is first compared with its twin on the CPU, byte for byte, and then timed next to `torch`'s
copy of the same tensor in the same run. Without a GPU, the lines say so, and time the CPU twins next to numpy's copy.

    bytes       the least that the kernel must move: `old` and `new` of a comparison, and the indices that it writes; a
                copy reads and writes, so it moves twice its tensor
    gb_s        those bytes per second, the median of several runs; `dense_gb_s`: the tensor's own bytes
    of_copy     gb_s divided by the copy's

`quantise` and `dequantise` of each block format read or write f4 values on one side and codes with scales on the other.

On a GPU, a run is timed by events around several launches, after the caches were overwritten. For a kernel that waits
for its result, as the comparison does for its count, the time includes the wait. `split_classes` is timed with and
without the copy of its streams to the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import cpu_seconds, say

from tests.kernels.encoding import encode_delta
from tidemill.kernels.backend import CPU_BACKEND, KernelBackend, triton_obstacle
from tidemill.kernels.classes import ClassTable, all_active
from tidemill.kernels.elements import BY_NAME, ElementType, TensorChange
from tidemill.kernels.fingerprint import TensorKey
from tidemill.kernels.payload import choose_table
from tidemill.kernels.quantise import BLOCK_FORMATS, dequantise, quantise

KEY = TensorKey.of("model.layers.0.mlp.down_proj.weight")
INDEX_BYTES = 8
STREAM_BYTES = 8
"""A gap and a step."""
CHECKED = 1_000_003
"""Elements of the tensors that are compared with the CPU's results before the timing; not a multiple of a tile."""


@dataclass(frozen=True, slots=True)
class Step:
    """A block before and after a training step, on the host."""

    kind: ElementType
    old: np.ndarray
    new: np.ndarray
    indices: np.ndarray
    table: ClassTable
    active: np.ndarray

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return len(self.indices) / len(self.old)


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel on given arrays: the minimum bytes that it moves, and the call."""

    name: str
    n_bytes: int
    run: Callable[[], Any]


def make_step(kind: ElementType, n: int, density: float, seed: int) -> Step:
    """Make patterns of Gaussian weights, about `density` of which move one step up or down, small ones more often."""
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.standard_normal(n, dtype=np.float32) * np.float32(0.02))
    typed = values.to(getattr(torch, kind.name)) if kind.exponent_bits else (values * 1600).to(torch.int8)
    old = typed.contiguous().view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[kind.bits.itemsize]).numpy()
    # The chance that an update of a given size crosses a rounding boundary halves with each binade of the weight.
    chance = 1 / np.maximum(np.abs(values.numpy()), np.float32(1e-6))
    moved = generator.random(n, dtype=np.float32) < chance * (density / chance.mean())
    up = generator.random(n, dtype=np.float32) < 0.5
    new = np.where(moved, np.where(up, old + kind.bits.type(1), old - kind.bits.type(1)), old).astype(kind.bits)
    indices = CPU_BACKEND.changed_elements(old, new)[0]
    counted = CPU_BACKEND.count_exponents(kind, old), CPU_BACKEND.count_exponents(kind, old[indices])
    return Step(kind, old, new, indices, choose_table(*counted), all_active(n))


def works(kernels: KernelBackend, step: Step, place: Callable[[np.ndarray], Any]) -> Iterator[Work]:
    """Yield every kernel on the arrays of a step; `place` moves them to the backend's device."""
    old, new, indices = place(step.old), place(step.new), place(step.indices)
    old_at, new_at = place(step.old[step.indices]), place(step.new[step.indices])
    dense, n, size = step.old.nbytes, len(step.indices), step.kind.bits.itemsize
    written = n * (INDEX_BYTES + 2 * size)
    yield Work("changed_elements", 2 * dense + written, lambda: kernels.changed_elements(old, new))
    yield Work("fingerprint", dense, lambda: kernels.fingerprint(old, KEY))
    yield Work(
        "fingerprint_change",
        n * (INDEX_BYTES + 2 * size),
        lambda: kernels.fingerprint_change(KEY, indices, old_at, new_at),
    )
    yield Work("fingerprint_at", n * (INDEX_BYTES + size), lambda: kernels.fingerprint_at(new_at, KEY, indices))
    yield Work("count_exponents", dense, lambda: kernels.count_exponents(step.kind, old))
    yield Work(
        "split_classes",
        dense + n * (INDEX_BYTES + size + STREAM_BYTES),
        lambda: kernels.split_classes(step.kind, old, old_at, new_at, indices, step.table, step.active),
    )


def split_on_device(step: Step, place: Callable[[np.ndarray], Any]) -> Work:
    """Return the class split without the copy of its streams to the host."""
    from tidemill.kernels import triton_split

    at = step.indices
    arrays = [place(array) for array in (step.old, step.old[at], step.new[at], at)]
    n_bytes = step.old.nbytes + len(step.indices) * (INDEX_BYTES + step.kind.bits.itemsize + STREAM_BYTES)
    split = partial(triton_split.split_classes, step.kind, *arrays, step.table, step.active)
    return Work("split_on_device", n_bytes, split)


def same(array: np.ndarray) -> np.ndarray:
    """Return the array unchanged: the CPU's kernels work on the host."""
    return array


def as_arrays(made: Any) -> list[np.ndarray]:
    """Convert a kernel's result to host arrays, for comparison."""
    if made is None:
        return []
    if isinstance(made, torch.Tensor):
        return [made.cpu().numpy()]
    if isinstance(made, np.ndarray):
        return [made]
    if isinstance(made, tuple):
        return [array for part in made for array in as_arrays(part)]
    return [np.array([made.lo, made.hi], np.uint64)]


def check(kernels: KernelBackend, step: Step, place: Callable[[np.ndarray], Any]) -> None:
    """Compare every kernel with its twin on the CPU. Raises AssertionError."""
    pairs = zip(works(kernels, step, place), works(CPU_BACKEND, step, same), strict=True)
    for mine, twin in pairs:
        for found, expected in zip(as_arrays(mine.run()), as_arrays(twin.run()), strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=f"{mine.name} of {step.kind.name}")


def check_stream(step: Step, place: Callable[[np.ndarray], Any]) -> None:
    """Check that a delta of GPU tensors equals that of numpy arrays. Raises AssertionError."""
    expected = list(encode_delta(1, 0, [TensorChange("w", step.kind.name, step.old, step.new)]))
    found = list(encode_delta(1, 0, [TensorChange("w", step.kind.name, place(step.old), place(step.new))]))
    assert found == expected, f"the delta of {step.kind.name} differs"


def check_far_offsets(kernels: KernelBackend) -> None:
    """Check elements beyond 2**32 in a tensor of bytes: comparison and fingerprint."""
    n = (1 << 32) + 4099
    old, new = (torch.zeros(n, dtype=torch.uint8, device="cuda") for _ in range(2))
    places = torch.tensor([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, n - 1], device="cuda")
    patterns = torch.arange(1, 7, dtype=torch.uint8, device="cuda")
    empty = kernels.fingerprint(old, KEY)
    new[places] = patterns
    found, _, there = kernels.changed_elements(old, new)
    np.testing.assert_array_equal(found.cpu().numpy(), places.cpu().numpy())
    np.testing.assert_array_equal(there.cpu().numpy(), patterns.cpu().numpy())
    change = CPU_BACKEND.fingerprint_change(KEY, places.cpu().numpy(), np.zeros(6, np.uint8), patterns.cpu().numpy())
    assert kernels.fingerprint(new, KEY) - empty == change, "fingerprint beyond 2**32"


def quantise_works(values: torch.Tensor) -> Iterator[tuple[str, Work]]:
    """Yield quantise and dequantise of every block format, with its name, on f4 `values` on their device."""
    for name, form in BLOCK_FORMATS.items():
        held = quantise(values, form)
        outer_bytes = 0 if held.outer is None else held.outer.nbytes
        n_bytes = values.nbytes + held.codes.nbytes + held.scales.nbytes + outer_bytes
        yield name, Work("quantise", n_bytes, lambda form=form: quantise(values, form))
        yield name, Work("dequantise", n_bytes, lambda held=held: dequantise(held))


def check_block_formats(values: torch.Tensor) -> None:
    """Compare codes, scales and values on the GPU with those of the twins on the CPU. Raises AssertionError."""
    for form in BLOCK_FORMATS.values():
        mine, twin = quantise(values.cuda(), form), quantise(values, form)
        assert torch.equal(mine.codes.cpu(), twin.codes), f"codes of {form.name}"
        assert torch.equal(mine.scales.cpu(), twin.scales), f"scales of {form.name}"
        again = dequantise(mine).cpu().view(torch.int32)
        assert torch.equal(again, dequantise(twin).view(torch.int32)), f"values of {form.name}"


def measure_block_formats(device: str, values: torch.Tensor, timed: Callable[[Callable[[], object]], float]) -> None:
    """Print the figure of each block format next to a copy of its values."""
    target = torch.empty_like(values)
    copy_speed = 2 * values.nbytes / timed(lambda: target.copy_(values)) / 1e9
    for name, work in quantise_works(values):
        seconds = timed(work.run)
        speed = work.n_bytes / seconds / 1e9
        say(work.name, device=device, format=name, elements=values.numel(), bytes=work.n_bytes,
               milliseconds=seconds * 1e3, gb_s=speed, copy_gb_s=copy_speed, of_copy=speed / copy_speed)  # fmt: skip


def matrix(elements: int) -> torch.Tensor:
    """Make about this many Gaussian f4 weights, in rows of at most 4096."""
    columns = min(4096, elements)
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((elements // columns, columns), np.float32))
    return values.mul_(0.02)


def seconds_on_gpu(run: Callable[[], object], runs: int, repeat: int, scratch: torch.Tensor) -> float:
    """Return the median time of a launch after two warm-up launches. Caches are overwritten before each timing."""
    run()
    run()
    taken = []
    for _ in range(runs):
        scratch.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(repeat):
            run()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last) / 1e3 / repeat)
    return statistics.median(taken)


def measure(device: str, todo: list[Work], step: Step, timed: Callable[[Callable[[], object]], float]) -> None:
    """Print the figure of the copy, which comes first, and each kernel's relative to it."""
    copy_speed = 0.0
    for work in todo:
        seconds = timed(work.run)
        speed = work.n_bytes / seconds / 1e9
        copy_speed = copy_speed or speed
        say(
            work.name,
            device=device,
            dtype=step.kind.name,
            elements=len(step.old),
            density=step.density,
            bytes=work.n_bytes,
            milliseconds=seconds * 1e3,
            gb_s=speed,
            dense_gb_s=step.old.nbytes / seconds / 1e9,
            copy_gb_s=copy_speed,
            of_copy=speed / copy_speed,
        )


def on_gpu(chosen: argparse.Namespace) -> None:
    """Check and time Triton's kernels."""
    from tidemill.kernels.backend import triton_backend

    kernels, device = triton_backend(), torch.cuda.get_device_name()
    say("device", name=device, torch=torch.__version__, memory_gb=torch.cuda.mem_get_info()[1] / 1e9)

    def place(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).cuda()

    for name in chosen.dtypes:
        for density in (0.0005, 0.01, 0.3):
            step = make_step(BY_NAME[name], CHECKED, density, chosen.seed)
            check(kernels, step, place)
            check_stream(step, place)
    say("equal_to_cpu", device=device, elements=CHECKED, dtypes=chosen.dtypes, equal=True)
    if torch.cuda.mem_get_info()[0] > 24e9 and not chosen.near:
        check_far_offsets(kernels)
        say("equal_beyond_2**32", device=device, equal=True)
    scratch = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")

    def timed(run: Callable[[], object]) -> float:
        return seconds_on_gpu(run, chosen.runs, chosen.repeat, scratch)

    for name in chosen.dtypes:
        for density in chosen.densities:
            step = make_step(BY_NAME[name], chosen.elements, density, chosen.seed)
            source, target = place(step.old), place(step.new)
            copy = Work("torch_copy", 2 * step.old.nbytes, lambda t=target, s=source: t.copy_(s))
            measure(device, [copy, *works(kernels, step, place), split_on_device(step, place)], step, timed)
    check_block_formats(matrix(CHECKED))
    say("block_formats_equal_to_cpu", device=device, elements=CHECKED, formats=list(BLOCK_FORMATS), equal=True)
    measure_block_formats(device, matrix(chosen.elements).cuda(), timed)


def on_cpu(chosen: argparse.Namespace, reason: str) -> None:
    """Time the compiled loops."""

    def timed(run: Callable[[], object]) -> float:
        return cpu_seconds(run, chosen.runs)

    say("no_gpu", reason=reason, note="Triton's kernels are not timed; these are their twins on the CPU")
    for name in chosen.dtypes:
        for density in chosen.densities:
            step = make_step(BY_NAME[name], chosen.elements, density, chosen.seed)
            source, target = step.old, step.new.copy()
            copy = Work("memcpy", 2 * step.old.nbytes, lambda t=target, s=source: np.copyto(t, s))
            measure("cpu, 1 thread", [copy, *works(CPU_BACKEND, step, same)], step, timed)
    torch.set_num_threads(1)
    measure_block_formats("cpu, 1 thread", matrix(chosen.elements), timed)


def main() -> None:
    """Measure and print. Exits with an error if there is a GPU but Triton does not run on it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, help="elements of a timed tensor (GPU: 2**27; CPU: 2**24)")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.003, 0.01, 0.06], help="shares that change")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float8_e4m3fn", "float32"], help="element types")
    parser.add_argument("--runs", type=int, default=7, help="timed runs of each figure")
    parser.add_argument("--repeat", type=int, default=3, help="launches of a run on a GPU")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--near", action="store_true", help="leave out the check of elements beyond 2**32")
    chosen = parser.parse_args()
    gpu = torch.cuda.is_available()
    chosen.elements = chosen.elements or (1 << 27 if gpu else 1 << 24)
    obstacle = triton_obstacle()
    if not gpu:
        on_cpu(chosen, obstacle or "Triton runs in its interpreter")
    elif obstacle is None:
        on_gpu(chosen)
    else:
        sys.exit(f"a GPU is here, but Triton does not run: {obstacle}")


if __name__ == "__main__":
    main()
