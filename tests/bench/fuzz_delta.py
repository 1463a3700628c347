"""Hostile bytes by the million: `python tests/bench/fuzz_delta.py --inputs 1000000 --seed 0`, one JSON line a decoder.

Valid blocks of every encoding and coder, and blocks that several tensors share, are damaged (bits, bytes, lengths,
header fields, pieces of other blocks) and get a correct digest again, as a hostile writer would do. The container is
damaged as a whole. Each input must end in a DeltaError, or in exactly the weights that the undamaged block makes.
Inputs run in their own process: if it crashes or hangs, this is counted and the run continues after the input that
caused it.

    refused     ended in a DeltaError
    accepted    made exactly the right weights
    wrong       made other weights
    escaped     raised another exception
    crashed     ended the process
    hung        took more than a minute
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.process
import os
import random
import sys
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.encoding import encode_delta, encode_tensor
from tidemill.kernels.block import BlockHeader, CodecSettings, CoderChoice, header_size, read_header, write_block
from tidemill.kernels.compiled import Bits
from tidemill.kernels.delta import apply_change, decode_blocks, decode_delta, resolve_all
from tidemill.kernels.elements import BY_CODE, BY_NAME, TensorChange, move
from tidemill.kernels.encoder import DeltaEncoder
from tidemill.kernels.wire import DeltaError

COUNTS = ("refused", "accepted", "wrong", "escaped", "crashed", "hung")
NAME, OTHER_NAME = "w", "v"
HANG_SECONDS = 60.0
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8")
CODERS: dict[str, CoderChoice] = {"rans": "rans", "pcodec": "pcodec", "zstd": "zstd"}
DECODERS = ("raw", "constant", *CODERS, "several", "container")
TELLING = (0, 1, 2, 0x7F, 0x80, 0x81, 0xFE, 0xFF)


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid block, or a valid delta of one tensor, with its old and new weights."""

    data: bytes
    old: Bits
    new: Bits
    other: int = 0
    """Number of elements at the front that belong to another tensor."""

    def tensors(self, bits: Bits) -> dict[str, Bits]:
        """Split the patterns `bits` into weights by name."""
        return {OTHER_NAME: bits[: self.other], NAME: bits[self.other :]} if self.other else {NAME: bits}


def samples(decoder: str) -> list[Sample]:
    """Make valid inputs for one decoder."""
    generator = np.random.default_rng(7)
    return [_sample(decoder, dtype, n, generator) for dtype in DTYPES for n in (64, 700, 12000)]


def _sample(decoder: str, dtype: str, n: int, generator: np.random.Generator) -> Sample:
    kind = BY_NAME[dtype]
    old = generator.integers(0, 1 << kind.width, n, kind.bits)
    if decoder == "raw":
        new = generator.integers(0, 4, n, kind.bits) * kind.bits.type(17)
    elif decoder == "constant":
        new = np.full(n, 3, kind.bits) if n == 700 else move(kind, old, 0)
    else:
        near = generator.random(n) < (0.05 if n < 12000 else 0.3 * (np.arange(n) // 500 % 8 == 1))
        near[n // 2] = True
        new = np.where(near, old + generator.integers(1, 4, n, kind.bits), old).astype(kind.bits)
    settings = CodecSettings(coder=CODERS.get(decoder, "auto"))
    if decoder == "container":
        return Sample(b"".join(encode_delta(1, 0, [TensorChange(NAME, dtype, old, new)], settings)), old, new)
    if decoder == "several":
        return _shared_block(Sample(b"", old, new, n // 3), dtype)
    return Sample(b"".join(encode_tensor(NAME, dtype, old, new, settings=settings)), old, new)


def _shared_block(sample: Sample, dtype: str) -> Sample:
    """Return the sample with a block of both its tensors."""
    sample.new[0] = sample.old[0] ^ 1
    old, new, encoder = sample.tensors(sample.old), sample.tensors(sample.new), DeltaEncoder()
    blocks = [block for name in old for block in encoder.add(name, dtype, old[name], new[name])]
    (block,) = (*blocks, *encoder.finish())
    return replace(sample, data=block.data)


def damaged(decoder: str, valid: list[Sample], seed: int) -> tuple[bytes, Sample]:
    """Make input number `seed` of a decoder: damaged bytes, and the sample from which they were made."""
    chance = random.Random(f"{decoder} {seed}")
    sample, other = chance.choice(valid), chance.choice(valid)
    if decoder == "container":
        return _damaged_bytes(chance, sample.data, other.data), sample
    header = read_header(memoryview(sample.data))
    body = sample.data[header_size(sample.data) :]
    name, payload = body[: header.name_length], body[header.name_length :]
    if decoder == "several" and chance.random() < 0.4:
        name = _damaged_bytes(chance, name, other.data[header_size(other.data) :])
    if chance.random() < 0.2:
        header = _damaged_header(chance, header)
    if chance.random() < 0.9:
        stranger = other.data[header_size(other.data) + header.name_length :]
        payload = _damaged_bytes(chance, payload, stranger)
    return write_block(header, name, payload), sample


def _damaged_bytes(chance: random.Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        near_the_front = int(chance.expovariate(0.05))
        at = min(len(out), near_the_front if chance.random() < 0.5 else chance.randrange(len(out) + 1))
        _damage(chance, out, at, other)
    return bytes(out)


def _damage(chance: random.Random, out: bytearray, at: int, other: bytes) -> None:
    how, length = chance.randrange(7), chance.randrange(1, 9)
    if how < 3 and at < len(out):
        out[at] = (out[at] ^ 1 << chance.randrange(8), chance.randrange(256), chance.choice(TELLING))[how]
    elif how == 3:
        del out[at : at + length]
    elif how == 4:
        out[at:at] = chance.randbytes(length)
    elif how == 5:
        out[at + length :] = b""
    else:
        start = chance.randrange(len(other))
        piece = other[start : start + 4 * length]
        out[at : at + len(piece)] = piece


def _damaged_header(chance: random.Random, header: BlockHeader) -> BlockHeader:
    number = chance.choice((0, 1, 2, header.changed + 1, max(0, header.changed - 1), chance.randrange(1 << 25)))
    numbers = ("tensor_elements", "start", "elements", "changed")
    field = chance.choice(("several", "encoding", "kind", *numbers, "digest_kind"))
    if field == "several":
        return replace(header, several=not header.several)
    if field == "encoding":
        return replace(header, encoding=chance.randrange(5))
    if field == "kind":
        return replace(header, kind=BY_CODE[chance.choice(sorted(BY_CODE))])
    if field == "digest_kind":
        return replace(header, digest_kind=chance.choice(("xxh3", "blake3")))
    return replace(header, **{field: number})


def judge(decoder: str, data: bytes, sample: Sample) -> str:
    """Decode an input and return its result, one of `COUNTS`."""
    held = sample.old.copy()
    try:
        blocks = list(decode_delta([data], 1, 0) if decoder == "container" else decode_blocks(data))
        for block in blocks:
            tensors = sample.tensors(held)
            for change in resolve_all(block, tensors):
                apply_change(change, tensors[change.name])
    except DeltaError:
        return "refused"
    except BaseException:  # noqa: BLE001 - whatever else comes out is what is looked for
        return "escaped"
    return "accepted" if np.array_equal(held, sample.new) else "wrong"


def run(decoder: str, inputs: int, seed: int, on_progress: Callable[[int], None]) -> dict[str, int]:
    """Judge inputs `seed` to `seed + inputs` of a decoder in separate processes, and count the results.

    An interrupt ends the run early; the inputs judged before it count.
    """
    context = multiprocessing.get_context("fork")
    shared = context.Array("q", len(COUNTS) + 1, lock=False)
    shared[len(COUNTS)] = seed
    while shared[len(COUNTS)] < seed + inputs:
        worker = context.Process(target=_work, args=(decoder, seed + inputs, shared))
        worker.start()
        try:
            hung = _watch(worker, shared, on_progress, seed)
        except KeyboardInterrupt:
            worker.kill()
            worker.join()
            break
        if worker.exitcode != 0:
            shared[COUNTS.index("hung" if hung else "crashed")] += 1
            shared[len(COUNTS)] += 1
    return dict(zip(COUNTS, shared, strict=False))


def _watch(
    worker: multiprocessing.process.BaseProcess, shared: Sequence[int], on_progress: Callable[[int], None], seed: int
) -> bool:
    """Wait for the end of a worker. Return whether it hung and was killed."""
    last, since = -1, time.monotonic()
    while worker.is_alive():
        worker.join(0.5)
        on_progress(shared[len(COUNTS)] - seed)
        if shared[len(COUNTS)] != last:
            last, since = shared[len(COUNTS)], time.monotonic()
        elif time.monotonic() - since > HANG_SECONDS:
            worker.kill()
            worker.join()
            return True
    return False


def _work(decoder: str, end: int, shared: MutableSequence[int]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    valid = samples(decoder)
    while shared[len(COUNTS)] < end:
        verdict = judge(decoder, *damaged(decoder, valid, shared[len(COUNTS)]))
        shared[COUNTS.index(verdict)] += 1
        shared[len(COUNTS)] += 1


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="inputs of each decoder")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input")
    parser.add_argument("--decoders", nargs="+", default=list(DECODERS), choices=list(DECODERS))
    chosen = parser.parse_args()
    with Progress(console=Console(stderr=True)) as bar:
        for decoder in chosen.decoders:
            task = bar.add_task(decoder, total=chosen.inputs)
            counts = run(decoder, chosen.inputs, chosen.seed, lambda done, task=task: bar.update(task, completed=done))
            inputs = sum(counts.values())
            print(json.dumps({"figure": "fuzz", "decoder": decoder, "inputs": inputs, **counts}), flush=True)


if __name__ == "__main__":
    main()
