"""Helpers of the replica's tests: a tiny checkpoint, versions published without Kafka, and a program.

    python -m tests.consumers.replica_driver CONFIG
        one engine with its HTTP server and its subscriber; reads records from standard input and writes
        acknowledgements to standard output, as one base64 line each; its port after the first one

It is a separate process because vLLM reads its environment at import.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from tests.consumers import bit_flip
from tests.records import tensor_infos
from tidemill.consumers.replica.environment import prepare_environment, quick_imports
from tidemill.kernels.elements import TensorChange
from tidemill.kernels.weights.anchor import write_anchor
from tidemill.kernels.weights.bits import total_fingerprint
from tidemill.kernels.weights.checkpoint import bits_in_memory, map_checkpoint, specs_of
from tidemill.kernels.weights.delta_shard import DeltaShard
from tidemill.kernels.weights.mirror import Draft, Mirror
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.format import chatml
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import ChatSettings, RunSettings
from tidemill.schemas.log.consumed import ConsumedRecord, Position
from tidemill.schemas.records import Anchor, DeltaChunk, Manifest, Record, ShardPosition, SkipDelta, WeightAck
from tidemill.trainer.serving_view import ServingView

INCARNATION = "life"
RUN = RunSettings(run_id="test")
CODEC = Codec(None)


def make_checkpoint(directory: Path, *, tied: bool = True, vocabulary: int = 200, seed: int = 0, **size: int) -> Path:
    """Write a random two-layer bf16 Qwen3 with a word-level tokenizer; the engine pads 200 words to 256 rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    size = {"hidden_size": 128, "num_hidden_layers": 2, **size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(
        **{**heads, "intermediate_size": 2 * size["hidden_size"], **size}, vocab_size=vocabulary,
        max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    model.to(torch.bfloat16).save_pretrained(directory)
    marks = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>"]
    named = ["t0", *marks, *(f"t{i}" for i in range(1 + len(marks), vocabulary))]
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(named)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(marks)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=marks[0])
    tokenizer.chat_template = chatml()
    tokenizer.save_pretrained(directory)
    return directory


def view_of(directory: Path) -> ServingView:
    """Return a checkpoint's bf16 bits by tensor name, in the tensors' shapes."""
    tensors = map_checkpoint(directory)
    return {spec.name: bits_in_memory(tensors, spec.name).reshape(spec.shape) for spec in specs_of(tensors)}


def nudged(view: ServingView, seed: int, fraction: float = 0.01) -> ServingView:
    """Return the view with some elements of every tensor replaced by other finite values."""
    random = np.random.default_rng(seed)
    changed = {}
    for name, bits in view.items():
        flat = bits.reshape(-1).copy()
        chosen = random.choice(flat.size, max(1, int(flat.size * fraction)), replace=False)
        flat[chosen] ^= random.integers(1, 128, chosen.size).astype(np.uint16)
        changed[name] = flat.reshape(bits.shape)
    return changed


@dataclass
class MemoryLog:
    """`weights.deltas` as a list; a producer for `DeltaShard` and a log for `ChunkFetcher`."""

    located: list[ConsumedRecord] = field(default_factory=list)
    at: int = 0
    sought: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, record: Record) -> ConsumedRecord:
        """Add a record as the next offset of partition 0."""
        with self.lock:
            found = ConsumedRecord(Topic.DELTAS, 0, len(self.located), 0, None, CODEC.encode(record), record)
            self.located.append(found)
            return found

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Like `RecordProducer.send_acked`."""
        return [self.append(record).position for _, record in records]

    def poll(self, timeout_s: float, max_records: int) -> list[ConsumedRecord]:
        """Like `LogReader.poll`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self.lock:
                found = self.located[self.at : self.at + max_records]
            if found:
                self.at += len(found)
                return found
            threading.Event().wait(0.005)
        return []

    def seek(self, topic: Topic, partition: int, offset: int) -> None:
        """Like `LogReader.seek`."""
        self.at = offset
        self.sought.append(offset)

    def next_offsets(self) -> dict[tuple[Topic, int], int]:
        """Like `LogReader.next_offsets`."""
        return {(Topic.DELTAS, 0): self.at}


def send_delta(
    log: Any, version: int, base: int, old: ServingView, new: ServingView, n_shards: int = 1, store: Path | None = None
) -> tuple[list[ShardPosition], int, int]:
    """Write the delta from `base` to `version` to a log or to `store`; return shards, bytes and changed elements."""
    shards, n_bytes, n_changed = [], 0, 0
    names, limit = list(new), 0 if store else None
    for number in range(n_shards):
        changes = (TensorChange(name, "bfloat16", old[name], new[name]) for name in names[number::n_shards])
        with DeltaShard(version, base, changes, number) as shard:
            shards.append(shard.send(log, RUN, str(store), limit).position)
            n_bytes, n_changed = n_bytes + shard.n_bytes, n_changed + shard.n_changed
    return shards, n_bytes, n_changed


def publish_skip(log: Any, version: int, base: int, old: ServingView, new: ServingView) -> SkipDelta:
    """Write a skip-delta's chunks to `log` and return its record."""
    shards, n_bytes, n_changed = send_delta(log, version, base, old, new)
    return SkipDelta(RUN.run_id, RUN.branch, version, base, n_changed, n_bytes, shards, int(time.time() * 1e6))


def anchored(directory: Path, manifest: Manifest) -> Mirror:
    """Return a mirror that holds the version of an anchor."""
    mirror = Mirror()
    Draft(mirror).load(map_checkpoint(directory).items(), str(directory), manifest)
    return mirror


def anchor_of(directory: Path) -> Anchor:
    """Return the anchor of a checkpoint directory."""
    return Anchor(str(directory), sum(file.stat().st_size for file in directory.iterdir()))


def publish(
    log: Any, version: int, old: ServingView | None, new: ServingView, anchor: Path | None = None,
    *, parent: int | None = None, **how: Any,
) -> Manifest:  # fmt: skip
    """Write a version's chunks to `log` and return its manifest; the default parent is the previous version.

    `how` is passed to `send_delta`.
    """
    shards, n_bytes, n_changed = [], 0, 0
    parent = version - 1 if parent is None else parent
    if old is not None:
        shards, n_bytes, n_changed = send_delta(log, version, parent, old, new, **how)
    tensors = tensor_infos(new)
    return Manifest(
        run_id=RUN.run_id, branch=RUN.branch, version=version, parent=None if old is None else parent,
        step=version, learning_rate=1e-5, n_elements=sum(b.size for b in new.values()), n_changed=n_changed,
        delta_bytes=n_bytes, shards=shards, tensors=tensors, fingerprint=total_fingerprint(tensors).hex(),
        anchor=None if anchor is None else anchor_of(anchor), trained_at=int(time.time() * 1e6),
        published_at=int(time.time() * 1e6), incarnation=INCARNATION,
    )  # fmt: skip


def corrupt(log: MemoryLog, offset: int, *, sealed: bool = False) -> None:
    """Flip one bit of the payload of a chunk in the log; keep its digest, or with `sealed` replace it too."""
    located = log.located[offset]
    payload = bytearray(located.record.payload)
    payload[len(payload) // 2] ^= 1
    digest = xxhash.xxh3_128_hexdigest(payload) if sealed else located.record.digest
    broken = replace(located.record, payload=bytes(payload), digest=digest)
    log.located[offset] = replace(located, record=broken, value=CODEC.encode(broken))


def to_line(record: Record) -> str:
    """Encode a record as a base64 line."""
    return base64.b64encode(CODEC.encode(record)).decode()


def from_line(line: str) -> Record:
    """Decode a line of `to_line`."""
    return CODEC.decode(base64.b64decode(line))


async def _lines() -> Any:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().strip()


async def serve(config: dict[str, Any]) -> None:
    """Run the role without Kafka: standard input is the log."""
    from tidemill.consumers.replica.config import ReplicaSettings
    from tidemill.consumers.replica.role import running_replica
    from tidemill.consumers.replica.staging import StartVersion
    from tidemill.consumers.replica.state import ReplicaState
    from tidemill.kernels.weights.delta_fetch import ChunkFetcher
    from tidemill.schemas.http_connections import bind

    bit_flip.install()
    log, state = MemoryLog(), ReplicaState(RUN.run_id, RUN.branch)
    manifest = from_line(config["manifest"])
    anchor = Path(manifest.anchor.uri)
    settings = ReplicaSettings(port=0, replica_id="replica-t", kv_cache_mb=32, **config["settings"])
    state.observe(manifest)
    joined = StartVersion(manifest, anchored(anchor, manifest), anchor, {})
    chunks = ChunkFetcher(log, settings.fetch_timeout_s)
    outside = (chunks.pieces, lambda record: isinstance(record, WeightAck) and print(to_line(record), flush=True))
    chat, staging = ChatSettings(**config.get("chat", {})), Path(config["staging"])
    async with running_replica(settings, RUN, chat, state, joined, staging, lambda: outside) as (
        engine,
        subscriber,
        server,
    ):
        listener = bind(settings.host, settings.port, "replica.port")
        print("port", listener.getsockname()[1], flush=True)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async for line in _lines():
            await _obey(line, engine, subscriber, log)
        server.should_exit = True
        await serving


async def _obey(line: str, engine: Any, subscriber: Any, log: MemoryLog) -> None:
    if line.startswith("flip "):
        _, name, index, bit = line.split()
        await bit_flip.flip(engine, name, int(index), int(bit))
        print("flipped", flush=True)
        return
    record = from_line(line)
    if isinstance(record, DeltaChunk):
        log.append(record)
    else:
        subscriber.receive(record)
        await subscriber.advance()
        print("observed", flush=True)


def save_view(view: ServingView, base: Path, directory: Path) -> Path:
    """Write a checkpoint directory with these weights and the other files of `base`."""
    write_anchor(str(directory), base, view)
    return directory


if __name__ == "__main__":
    prepare_environment(1)
    with quick_imports():
        import tidemill.consumers.replica.role  # noqa: F401
    asyncio.run(serve(json.loads(sys.argv[1])))
