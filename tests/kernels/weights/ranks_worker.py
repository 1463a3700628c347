"""The program that the tests of publication from ranks run, and the weights that both sides create.

    python -m tests.kernels.weights.ranks_worker JOBS    JOBS: a file with a list of `Job`

A job is a list of scenarios, run in order in the same processes, one for each rank. Each rank writes the result of a
scenario to `<scenario>-<rank>.json` in the directory of JOBS, and its output to `<ranks>-<rank>.log`. The exit statuses
of the ranks are in `<ranks>.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.forked_ranks import run_ranks
from tidemill.kernels.weights import anchor
from tidemill.kernels.weights.commit import read_versions
from tidemill.kernels.weights.config import PublishSettings
from tidemill.kernels.weights.graph import VersionError
from tidemill.kernels.weights.process_group import ProcessGroupRanks
from tidemill.kernels.weights.publish import ForkPoint, WeightPublisher
from tidemill.kernels.weights.ranks import Ranks, RanksLostError, open_ranks
from tidemill.kernels.weights.tensor_parts import TensorPart
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.consumed import Position
from tidemill.schemas.log.fenced_producer import FencedProducer
from tidemill.schemas.log.producer import DeliveryError, RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import DeltaChunk, Manifest, Record
from tidemill.trainer.serving_view import local_parts

CHAIN_LENGTH = 5
SETTINGS = PublishSettings(anchor_every=3, anchor_bytes_ratio=1e9, skips=())
TWO_SHARDS = SETTINGS.model_copy(update={"shards": 2})
TIMEOUT_S = 120.0
SHORT_TIMEOUT_S = 6.0
LARGE_TENSORS, LARGE_SHAPE = 32, (1024, 2048)
TRAINED_VERSIONS = 4


@dataclass(frozen=True)
class Job:
    """The scenarios of some ranks, and the addresses of the log and the store."""

    ranks: int
    scenarios: list[str]
    bootstrap: str
    prefix: str
    run_id: str
    store: str
    base: str


class Uneven(nn.Module):
    """Weights that no number of ranks divides evenly, one with a single row, a tied one, and an unsharded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, 16)
        self.up = nn.Linear(16, 33)
        self.down = nn.Linear(33, 1, bias=False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(16, 67, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def sharded(self, mesh: DeviceMesh) -> Uneven:
        """Shard the model over the ranks of a mesh."""
        fully_shard(self.up, mesh=mesh)
        return fully_shard(self, mesh=mesh)


class Large(nn.Module):
    """Many weights of equal size, each small compared with the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(LARGE_SHAPE)) for _ in range(LARGE_TENSORS))


def first_weights() -> Uneven:
    """Return the same model in every process."""
    torch.manual_seed(0)
    return Uneven()


@torch.no_grad()
def advance(model: nn.Module, version: int) -> None:
    """Add the change of version `version` to every weight: whole tensors are created and split like the weight."""
    for name, weight in model.state_dict(keep_vars=True).items():
        if name == "head.weight":
            continue
        generator = torch.Generator().manual_seed(xxhash.xxh32_intdigest(f"{name}/{version}".encode()))
        change = 1e-3 * torch.randn(weight.shape, generator=generator)
        if isinstance(weight, DTensor):
            mesh = weight.device_mesh
            rows = -(-weight.shape[0] // mesh.size(mesh.ndim - 1))
            first = mesh.get_local_rank(mesh.ndim - 1) * rows
            weight.to_local().add_(change[first : first + rows])
        else:
            weight.add_(change)


def whole_experts() -> torch.Tensor:
    """Return a weight of eight experts."""
    return torch.arange(24.0).reshape(8, 3)


def expert_parts(mesh: DeviceMesh, placements: list[Placement], rows: slice | list[int]) -> dict[str, TensorPart]:
    """Return this rank's part of the experts' weight: `rows`."""
    module = nn.Module()
    local = DTensor.from_local(whole_experts()[rows], mesh, placements, run_check=False, shape=(8, 3), stride=(3, 1))
    module.weight = nn.Parameter(local)
    return local_parts(module, first=mesh.get_rank() == 0)


def mark(version: int) -> dict[str, Any]:
    """Return the manifest fields of a version that follows the version before it."""
    return {"parent": version - 1 if version else None, "learning_rate": 1e-4, "trained_at": version}


class FaultyProducer(RecordProducer):
    """Refuses the chunks of deltas if `refuse` is set; kills its process after the first chunk if `kill` is set."""

    refuse = False
    kill = False

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Send like the base class, with the fault."""
        if self.refuse and topic is Topic.DELTAS:
            raise DeliveryError("the broker is gone")
        positions = super().send_acked(topic, records)
        if self.kill and topic is Topic.DELTAS:
            os.kill(os.getpid(), signal.SIGKILL)
        return positions


class LostAcknowledgement(RecordProducer):
    """Reports the next record as not acknowledged if `lose` is set; the log contains it if `keep` is set."""

    lose = keep = False

    def send_acked(self, topic: Topic, records: Sequence[tuple[str, Record]]) -> list[Position]:
        """Send like the base class, with the fault."""
        positions = super().send_acked(topic, records) if self.keep or not self.lose else []
        if self.lose:
            raise DeliveryError("no acknowledgement came")
        return positions


def raised(work: Callable[[], object]) -> list[str]:
    """Return class and message of the error that `work` raises, or an empty list."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the test compares it
        return [type(error).__name__, str(error)]
    return []


class Worker:
    """The scenarios of one rank."""

    def __init__(self, job: Job, out: Path) -> None:
        self.job, self.out = job, out
        self.kafka = KafkaSettings(bootstrap=job.bootstrap, topic_prefix=job.prefix)
        self.rank = dist.get_rank()
        self.ranks = open_ranks(TIMEOUT_S)
        self.world = DeviceMesh("cpu", list(range(dist.get_world_size())))

    def publisher(
        self,
        suffix: str,
        ranks: Ranks | None = None,
        producer: RecordProducer | None = None,
        settings: PublishSettings | None = None,
        branch: str = "main",
        **options: Any,
    ) -> WeightPublisher:
        """Open a publisher of the run `<run_id>-<suffix>`, as after a start or a restart."""
        made = WeightPublisher.open(
            self.kafka,
            RunSettings(run_id=f"{self.job.run_id}-{suffix}", branch=branch),
            StoreSettings(root=self.job.store),
            settings or SETTINGS,
            base_model=Path(self.job.base),
            ranks=ranks or self.ranks,
            **options,
        )
        if producer is not None:
            made._producer = producer
        return made

    def chain(self) -> dict[str, Any]:
        """Publish the same versions from each number of ranks up to all ranks; two ranks write two shards each."""
        found = {}
        for size in range(1, dist.get_world_size() + 1):
            members = list(range(size))
            mesh, group = DeviceMesh("cpu", members), dist.new_group(members, backend="gloo")
            if self.rank in members:
                publisher = self.publisher(
                    f"chain{size}", ProcessGroupRanks(group), settings=TWO_SHARDS if size == 2 else SETTINGS
                )
                found[str(size)] = list(self._publish_chain(publisher, first_weights().sharded(mesh)))
        return found

    def _publish_chain(self, publisher: WeightPublisher, model: nn.Module, length: int = CHAIN_LENGTH) -> Iterator[str]:
        for version in range(length):
            if version:
                advance(model, version)
            yield publisher.publish(version, self.parts(model), **mark(version)).fingerprint

    def parts(self, model: nn.Module) -> dict[str, Any]:
        """Return this rank's parts."""
        return local_parts(model, first=self.rank == 0)

    def replicated(self) -> dict[str, Any]:
        """Every rank holds the whole model: the mesh replicates over its first dimension and shards over its second."""
        ranks = [[rank] for rank in range(dist.get_world_size())]
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("copies", "shards"))
        publisher, model = self.publisher("replicated"), first_weights().sharded(mesh)
        held = sum(part.bits.size for part in self.parts(model).values())
        return {"held": held, "versions": list(self._publish_chain(publisher, model, 2))}

    def failing(self) -> dict[str, Any]:
        """One rank fails, in each possible way; then the same version is published."""
        producer = FaultyProducer(self.kafka, "test-sharded")
        publisher, model = self.publisher("failing", producer=producer), first_weights().sharded(self.world)
        found = {"v0": publisher.publish(0, self.parts(model), **mark(0)).fingerprint}
        advance(model, 1)
        producer.refuse = self.rank == 1
        found["log"] = self._failure(publisher, 1, model)
        producer.refuse = False
        found["v1"] = publisher.publish(1, self.parts(model), **mark(1)).fingerprint
        advance(model, 2)
        found["drift"] = self._drifted(publisher, model)
        found["v2"] = publisher.publish(2, self.parts(model), **mark(2)).fingerprint
        advance(model, 3)
        found["anchor"] = self._full_disk(publisher, model)
        found["v3"] = publisher.publish(3, self.parts(model), **mark(3)).fingerprint
        return found

    def _failure(self, publisher: WeightPublisher, version: int, model: nn.Module) -> list[Any]:
        """Return the error that the ranks receive, and the newest version in the log after it."""
        try:
            publisher.publish(version, self.parts(model), **mark(version))
        except (DeliveryError, VersionError, OSError) as error:
            chain = read_versions(self.kafka, RunSettings(run_id=f"{self.job.run_id}-failing"))
            return [type(error).__name__, str(error), chain.newest_version]
        raise AssertionError("a version was published that one rank failed at")

    def _drifted(self, publisher: WeightPublisher, model: nn.Module) -> list[Any]:
        """One element of rank 1's old weights differs from what it published."""
        bits = publisher._held.parts["up.weight"].bits
        bits[5] ^= self.rank
        try:
            return self._failure(publisher, 2, model)
        finally:
            bits[5] ^= self.rank

    def _full_disk(self, publisher: WeightPublisher, model: nn.Module) -> list[Any]:
        """Rank 1 cannot write its file of the anchor."""
        put_object = anchor.put_object

        def full(uri: str, pieces: Any) -> Any:
            next(pieces)
            raise OSError("no space left on device")

        anchor.put_object = full if self.rank == 1 else put_object
        try:
            return self._failure(publisher, 3, model)
        finally:
            anchor.put_object = put_object

    def going_back(self) -> dict[str, Any]:
        """Go back to an older version and continue from there; then a new publisher must rebuild the head."""
        publisher = self.publisher("back")
        list(self._publish_chain(publisher, first_weights().sharded(self.world), 4))
        older = first_weights().sharded(self.world)
        refused = raised(lambda: publisher.go_back(1, self.parts(older)))
        advance(older, 1)
        publisher.go_back(1, self.parts(older))
        advance(older, 7)
        other = publisher.publish(4, self.parts(older), parent=1)
        advance(older, 8)
        restarted = self.publisher("back", settings=TWO_SHARDS)
        confirmed = restarted.publish(0, iter(self.parts(first_weights().sharded(self.world)).items()))
        last = restarted.publish(5, iter(self.parts(older).items()))
        return {
            "refused": refused,
            "parents": [other.parent, last.parent],
            "confirmed": confirmed.fingerprint,
            "held": sum(part.bits.size for part in restarted._held.parts.values()),
            "mine": sum(part.bits.size for part in self.parts(older).values()),
        }

    def forking(self) -> dict[str, Any]:
        """A branch begins with a version in the middle of another branch."""
        model = first_weights().sharded(self.world)
        list(self._publish_chain(self.publisher("fork"), model, 3))
        forked = self.publisher("fork", branch="again", fork_from=ForkPoint("main", 1))
        found = [forked.versions.newest.fingerprint, forked.publish(2, self.parts(model)).fingerprint]
        again = self.publisher("fork", branch="again", fork_from=ForkPoint("main", 1))
        advance(model, 3)
        return {"versions": [*found, again.publish(3, self.parts(model)).fingerprint]}

    def doubting(self) -> dict[str, Any]:
        """The acknowledgement of a manifest is lost, once with the manifest in the log and once without it."""
        model = first_weights().sharded(self.world)
        manifests = LostAcknowledgement(self.kafka, "test-ranks")
        publisher, found = self.publisher("doubt", manifests=manifests), []
        publisher.publish(0, self.parts(model), **mark(0))
        for version, kept in ((1, True), (2, False)):
            advance(model, version)
            manifests.lose, manifests.keep = True, kept
            found.append(raised(lambda version=version: publisher.publish(version, self.parts(model), **mark(version))))
            manifests.lose = False
            publisher.publish(version, self.parts(model), **mark(version))
        return {"told": found, "versions": [publisher.versions.newest.version, publisher.versions.newest.fingerprint]}

    def fenced(self) -> dict[str, Any]:
        """Another process begins to write manifests under the first rank's name: no rank can publish any more."""
        model, name = first_weights().sharded(self.world), f"{self.job.prefix}trainer.fenced"
        fenced = FencedProducer(self.kafka, "test-ranks", name) if self.rank == 0 else None
        publisher = self.publisher("fenced", manifests=fenced)
        publisher.publish(0, self.parts(model), **mark(0))
        self.ranks.on_first(lambda: FencedProducer(self.kafka, "test-ranks", name))
        advance(model, 1)
        told = raised(lambda: publisher.publish(1, self.parts(model), **mark(1)))
        newest = read_versions(self.kafka, RunSettings(run_id=f"{self.job.run_id}-fenced")).newest_version
        return {"told": told, "newest": newest}

    def refusing(self) -> dict[str, Any]:
        """Publish parts and versions that are refused."""
        model = first_weights().sharded(self.world)
        publisher, parts = self.publisher("refusing"), self.parts(model)
        publisher.publish(0, parts)
        advance(model, 1)
        fewer = {name: part for name, part in self.parts(model).items() if self.rank == 0 or name != "norm.bias"}
        shifted = dict(parts)
        if self.rank == 1:
            part = parts["up.weight"]
            shifted["up.weight"] = replace(part, start=part.start - 1)
        return {
            "version": raised(lambda: publisher.publish(1 + self.rank, self.parts(model))),
            "missing": raised(lambda: publisher.publish(1, fewer)),
            "cut": raised(lambda: publisher.publish(1, shifted)),
            "twice": raised(lambda: publisher.publish(0, shifted)),
            "then": publisher.publish(1, self.parts(model)).fingerprint,
        }

    def experts(self) -> dict[str, Any]:
        """A weight on a two-dimensional mesh, as in expert parallelism with FSDP; alternating rows are refused."""
        over, under = DeviceMesh("cpu", [[0, 1]]), DeviceMesh("cpu", [[0], [1]])
        half, turns = slice(4 * self.rank, 4 * self.rank + 4), [2 * self.rank + row for row in (0, 1, 4, 5)]
        publisher = self.publisher("experts")
        in_turn = expert_parts(over, [Shard(0), _StridedShard(0, split_factor=2)], turns)
        told = raised(lambda: publisher.publish(0, in_turn))
        dealt = publisher.publish(0, expert_parts(over, [_StridedShard(0, split_factor=2), Shard(0)], half))
        cut = publisher.publish(0, expert_parts(under, [_StridedShard(0, split_factor=1), Shard(0)], half))
        return {"told": told, "versions": [dealt.fingerprint, cut.fingerprint]}

    def skipping(self) -> dict[str, Any]:
        """Both ranks write skip-deltas: from copies in memory, and after a restart from the log."""
        model, settings = first_weights().sharded(self.world), SETTINGS.model_copy(update={"skips": (2,)})
        found: list[int] = []
        for versions in (range(3), range(3, CHAIN_LENGTH)):
            with self.publisher("skipping", settings=settings) as publisher:
                for version in versions:
                    if version:
                        advance(model, version)
                    publisher.publish(version, self.parts(model), **mark(version))
                    publisher.skips.wait()
                found += [publisher.skips.published, publisher.skips.dropped]
        return {"counts": found}

    def hanging(self) -> dict[str, Any]:
        """Rank 1 does not take part in a collective operation for which rank 0 waits."""
        # Both ranks must begin to connect the new group within its timeout.
        self.ranks.gather(lambda: None)
        ranks, told = open_ranks(SHORT_TIMEOUT_S), self.out / "told"
        if self.rank == 1:
            deadline = time.monotonic() + TIMEOUT_S
            while not told.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            return {}
        begun = time.monotonic()
        try:
            ranks.gather(lambda: None)
        except RanksLostError as error:
            told.touch()
            return {"error": str(error), "seconds": time.monotonic() - begun}
        raise AssertionError("a rank that did not come was not missed")

    def training(self) -> dict[str, Any]:
        """FSDP2 steps of a Qwen3, each rank on its own batch; every step is a version."""
        torch.manual_seed(0)
        shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=101, hidden_size=48, intermediate_size=80, tie_word_embeddings=True, **shape)
        )
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.world)
        fully_shard(model, mesh=self.world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        publisher, torch_seed = self.publisher("training"), torch.Generator().manual_seed(self.rank)
        found = [publisher.publish(0, self.parts(model), **mark(0)).fingerprint]
        for version in range(1, TRAINED_VERSIONS):
            tokens = torch.randint(101, (2, 16), generator=torch_seed)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(publisher.publish(version, self.parts(model), **mark(version)).fingerprint)
        return {"versions": found}

    def killed(self) -> dict[str, Any]:
        """Rank 1 is killed when the log contains its first chunk of version 2."""
        producer = FaultyProducer(self.kafka, "test-sharded")
        publisher, model = self.publisher("killed", producer=producer), first_weights().sharded(self.world)
        publisher.publish(0, self.parts(model), **mark(0))
        advance(model, 1)
        publisher.publish(1, self.parts(model), **mark(1))
        advance(model, 2)
        producer.kill = self.rank == 1
        publisher.publish(2, self.parts(model), **mark(2))
        raise AssertionError("a version was published without a rank that was killed")

    def resumed(self) -> dict[str, Any]:
        """Another number of ranks continues the run of `killed` from the weights of version 1."""
        with LogReader(self.kafka, [Topic.MANIFESTS, Topic.DELTAS]) as reader:
            records = [located.record for located in reader.read_to_end()]
        of_run = [record for record in records if record.run_id == f"{self.job.run_id}-killed"]
        left = [sorted({r.version for r in of_run if isinstance(r, kind)}) for kind in (Manifest, DeltaChunk)]
        publisher, model = self.publisher("killed"), first_weights().sharded(self.world)
        advance(model, 1)
        found = [publisher.publish(1, self.parts(model), **mark(1)).fingerprint]
        advance(model, 2)
        found.append(publisher.publish(2, self.parts(model), **mark(2)).fingerprint)
        return {"left": left, "versions": found}

    def memory(self) -> dict[str, Any]:
        """Measure the memory of a publication, without model and snapshot, and of a gather of all weights, in bytes."""
        with torch.device("meta"):
            model = fully_shard(Large(), mesh=self.world)
        model.to_empty(device="cpu")
        torch.manual_seed(self.rank)
        with torch.no_grad():
            for weight in model.parameters():
                weight.to_local().normal_()
        publisher = self.publisher("memory")
        parts = self.parts(model)
        first = peak_of(lambda: publisher.publish(0, parts, **mark(0)))
        parts = None
        with torch.no_grad():
            for weight in model.parameters():
                weight.to_local()[::50].mul_(1.01)
        second = peak_of(lambda: publisher.publish(1, self.parts(model), **mark(1)))
        planted = peak_of(lambda: [weight.full_tensor().to(torch.bfloat16) for weight in model.parameters()])
        held = sum(part.bits.nbytes for part in publisher._held.parts.values())
        return {"anchor": first, "delta": second, "planted": planted, "held": held}


def peak_of(work: Callable[[], object]) -> int:
    """Return how many bytes the process's resident memory grows while `work` runs."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    held = work()
    peak = resident("VmHWM") - before
    del held
    return peak


def resident(field: str) -> int:
    """Return a field of the process's memory status, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def run_rank(job: Job, rank: int, out: Path) -> None:
    """Run the scenarios of a job on one rank."""
    dist.init_process_group("gloo")
    worker = Worker(job, out)
    for scenario in job.scenarios:
        begun = time.monotonic()
        found = getattr(worker, scenario)()
        print(f"{scenario}: {time.monotonic() - begun:.1f} s, {time.process_time():.1f}", flush=True)
        (out / f"{scenario}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Run all jobs, one after the other."""
    jobs = Path(sys.argv[1])
    out = jobs.parent
    torch.set_num_threads(1)
    for job in (Job(**given) for given in json.loads(jobs.read_text())):
        work, log_of = partial(run_rank, job, out=out), lambda rank, ranks=job.ranks: out / f"{ranks}-{rank}.log"
        (out / f"{job.ranks}.json").write_text(json.dumps(run_ranks(job.ranks, work, log_of)))


if __name__ == "__main__":
    main()
