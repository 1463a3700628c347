"""Weight versions over a shaped link, one JSON line per figure: `python tests/bench/bench_link.py` (Linux, as root).

- `version`: seconds from the publishing call until the delta is decoded and checked in a region behind a link of
  limited rate, compared with 1.2 * bytes / rate + 1 s. `publish_seconds` is the part of the call itself.
- `link`: all versions over one link, compared with a plain TCP transfer of the same number of bytes over the same link,
  and the traffic of the link while no version is published, into and out of the region. The region reads with a
  replica's default settings.
- `shards`: seconds to fetch and decode one delta in one shard and in four, and in four over four connections, over a
  link with delay, without and with loss. Nothing is read ahead, as for a replica that is behind.

The broker runs on this machine. The region is a network namespace whose link is shaped by the kernel or, if the kernel
cannot, by a process that also uses processor time. Times are wall-clock times: run it on a quiet machine, and twice
after an installation, since the first delta compiles the kernels on both sides.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "system"), str(HERE.parent / "consumers"), str(HERE.parents[1])]
from measuring import say  # noqa: E402
from network.regions import Region, Regions  # noqa: E402 - the helpers are modules beside the tests
from network.shape import LinkShape  # noqa: E402
from weight_log import WeightLog  # noqa: E402

from tidemill.compose.stack.config import StackSettings  # noqa: E402
from tidemill.compose.stack.kafka import LocalStack  # noqa: E402
from tidemill.consumers.replica.config import ReplicaSettings  # noqa: E402
from tidemill.consumers.replica.staging import FOLLOWED, UpdateStaging  # noqa: E402
from tidemill.consumers.replica.state import ReplicaState  # noqa: E402
from tidemill.kernels.weights.config import PublishSettings  # noqa: E402
from tidemill.kernels.weights.delta_fetch import open_fetcher  # noqa: E402
from tidemill.kernels.weights.mirror import Mirror  # noqa: E402
from tidemill.kernels.weights.publish import WeightPublisher  # noqa: E402
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings  # noqa: E402
from tidemill.schemas.log.admin import create_topics  # noqa: E402
from tidemill.schemas.log.reader import LogReader  # noqa: E402
from tidemill.schemas.records import Manifest  # noqa: E402

TIMEOUT_S = 120.0
CHUNK_BYTES = (1 << 20) - 4096
IDLE_S = 5.0
DEFAULTS = ReplicaSettings()
PARTITIONS = 10
"""The smallest number of partitions with which the keys of four shards are in four partitions."""


@dataclass(frozen=True, slots=True)
class Place:
    """A broker and the region that reads from it."""

    regions: Regions
    kafka: KafkaSettings
    outside: str
    """The broker's address, as the region sees it."""
    directory: Path


@contextmanager
def a_broker(directory: Path) -> Iterator[Place]:
    """Start a hub without regions, and a broker that regions can reach."""
    with Regions() as regions:
        with socket.socket() as free:
            free.bind((regions.hub, 0))
            host, port = free.getsockname()
        stack = LocalStack(StackSettings(data_dir=directory / "stack", network_listeners=(f"{host}:{port}",)))
        try:
            kafka = KafkaSettings(bootstrap=stack.up().bootstrap, partitions=PARTITIONS)
            yield Place(regions, kafka, f"{host}:{port}", directory)
        finally:
            stack.down()


class Reader:
    """The reading half of a replica, in a region: joins version 0, then prepares every version and reports when."""

    def __init__(
        self,
        place: Place,
        region: Region,
        kafka: KafkaSettings,
        run: RunSettings,
        *,
        ahead: bool,
        connections: int,
    ) -> None:
        config = {"bootstrap": place.outside, "topic_prefix": kafka.topic_prefix, "run_id": run.run_id}
        config |= {"directory": str(place.directory / region.name), "ahead": ahead, "connections": connections}
        self._process = region.start(
            [str(Path(__file__).resolve()), "--read", json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.next()["ready"]

    def next(self) -> dict[str, Any]:
        """Return the next version that it decoded."""
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reader in the region ended with status {self._process.wait()}")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def read(config: dict[str, Any]) -> None:
    """Run the program inside the region, until standard input ends."""
    kafka = KafkaSettings(bootstrap=config["bootstrap"], topic_prefix=config["topic_prefix"])
    state, mirror = ReplicaState(config["run_id"], "main"), Mirror()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with ExitStack() as stack:
        records = stack.enter_context(LogReader(kafka, FOLLOWED))
        kept = stack.enter_context(staging(kafka, config)) if config["ahead"] else None
        while not ended.is_set():
            for located in records.poll(0.02):
                if isinstance(located.record, Manifest):
                    state.observe(located.record)
            while (move := state.plan()) is not None:
                with nullcontext(kept) if kept is not None else staging(kafka, config) as used:
                    begun = time.monotonic()
                    prepared = used.prepare(move, mirror)
                    seconds = time.monotonic() - begun
                prepared.draft.keep()
                state.proved(move.target.version)
                said = {"version": move.target.version, "at": time.time(), "seconds": seconds}
                said["fetch_seconds"] = prepared.fetch_ms / 1e3
                print(json.dumps({"ready": True, **said}), flush=True)


@contextmanager
def staging(kafka: KafkaSettings, config: dict[str, Any]) -> Iterator[UpdateStaging]:
    """Open the fetching and decoding of deltas. A fetcher reads earlier deltas only when they are requested."""
    with (
        open_fetcher(kafka, TIMEOUT_S, config["connections"], "bench-link", DEFAULTS.fetch_bytes) as fetcher,
        closing(UpdateStaging(fetcher, Path(config["directory"]))) as made,
    ):
        yield made


def plain_transfer(hub: str, region: Region, n_bytes: int) -> float:
    """Return the seconds for this many bytes over a plain TCP connection from hub to region, as the baseline."""
    program = "import socket, sys, time\nbegun = time.monotonic()\n"
    program += "with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as link:\n"
    program += "    while link.recv(1 << 16): pass\nprint(time.monotonic() - begun)\n"
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script, socket.create_server((hub, 0)) as server:
        script.write(program)
        script.flush()
        address = server.getsockname()
        client = region.start([script.name, address[0], str(address[1])], stdout=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(n_bytes))
        return float(client.communicate()[0])


def measure_rate(place: Place, link: LinkShape, elements: int, versions: int) -> None:
    """Measure versions over a link of limited rate."""
    rate = link.bits_per_second
    region = place.regions.add(f"rate{rate:.0f}", link)
    kafka, run = fresh(place), RunSettings(run_id="link")
    settings = PublishSettings(anchor_every=1000, anchor_bytes_ratio=1000.0)
    (base := place.directory / "base").mkdir(exist_ok=True)
    (base / "config.json").write_text('{"model_type": "qwen3"}')
    store = StoreSettings(root=str(place.directory / f"store{rate:.0f}"))
    random, arrivals = np.random.default_rng(0), []
    with WeightPublisher.open(kafka, run, store, settings, base_model=base) as publisher:
        bits = random.integers(0, 1 << 14, (elements // 1024, 1024), dtype=np.uint16)
        publisher.publish(0, {"w": bits})
        with closing(Reader(place, region, kafka, run, ahead=True, connections=DEFAULTS.fetch_connections)) as reader:
            idle = idle_bits_per_second(region)
            for version in range(1, versions + 1):
                bits = replaced(bits, random, 0.05)
                arrivals.append(arrival(publisher, version, bits, reader, rate))
    n_bytes = int(statistics.median(each.n_bytes for each in arrivals))
    say(
        "link", backend=place.regions.backend, bits_per_second=rate, round_trip_ms=2 * link.delay_ms,
        delta_bytes=n_bytes, versions=versions, seconds=statistics.median(each.seconds for each in arrivals),
        worst_seconds=max(each.seconds for each in arrivals), bound_seconds=bound_seconds(n_bytes, rate),
        worst_ratio=max(each.ratio for each in arrivals), outside=sum(each.ratio > 1 for each in arrivals),
        plain_tcp_seconds=plain_transfer(place.regions.hub, region, n_bytes), idle_bits_per_second=idle,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """One version that arrived over a link."""

    n_bytes: int
    seconds: float
    ratio: float
    """Measured seconds divided by the bound."""


def arrival(publisher: WeightPublisher, version: int, bits: np.ndarray, reader: Reader, rate: float) -> Arrival:
    """Publish a version and wait until the region has decoded it."""
    begun = time.time()
    n_bytes = publisher.publish(version, {"w": bits}).delta_bytes
    published = time.time()
    said = reader.next()
    seconds, bound = said["at"] - begun, bound_seconds(n_bytes, rate)
    say(
        "version", bits_per_second=rate, version=version, delta_bytes=n_bytes, seconds=seconds, bound_seconds=bound,
        ratio=seconds / bound, publish_seconds=published - begun, fetch_seconds=said["fetch_seconds"],
    )  # fmt: skip
    return Arrival(n_bytes, seconds, seconds / bound)


def bound_seconds(n_bytes: int, rate: float) -> float:
    """Return the longest time that a version may take over a link of this many bits a second."""
    return 1.2 * 8 * n_bytes / rate + 1.0


def idle_bits_per_second(region: Region) -> list[int]:
    """Return the bits a second into and out of the region while no version is published."""
    before = carried(region)
    time.sleep(IDLE_S)
    return [round(8 * (now - then) / IDLE_S) for now, then in zip(carried(region), before, strict=True)]


def carried(region: Region) -> list[int]:
    """Return the bytes received and sent by the region so far."""
    lines = Path(f"/proc/{region.holder.pid}/net/dev").read_text().splitlines()[2:]
    devices = [line.split(":")[1].split() for line in lines if not line.strip().startswith("lo:")]
    return [sum(int(device[column]) for device in devices) for column in (0, 8)]


def measure_shards(place: Place, link: LinkShape, elements: int, versions: int) -> None:
    """Measure the same deltas in one shard and in four, over one link."""
    region = place.regions.add(f"delay{link.delay_ms:.0f}loss{100 * link.loss:.0f}", link)
    shape = (elements // 4 // 1024, 1024)
    random = np.random.default_rng(1)
    first = {f"w{n}": random.integers(0, 1 << 14, shape, dtype=np.uint16) for n in range(4)}
    one = 0.0
    for shards, connections in ((1, 1), (4, 1), (4, 4)):
        kafka, run = fresh(place), RunSettings(run_id=f"shards{shards}-{connections}")
        log = WeightLog(kafka, run, place.directory / region.name / f"{shards}-{connections}", CHUNK_BYTES)
        log.publish(0, first, None, anchor=True)
        decoded, sizes, partitions = [], [], set()
        with closing(Reader(place, region, kafka, run, ahead=False, connections=connections)) as reader:
            for version in range(1, versions + 1):
                view = {name: replaced(bits, random, 0.2) for name, bits in log.views[version - 1].items()}
                manifest = log.publish(version, view, version - 1, shards=shards)
                partitions |= {position.partition for position in manifest.shards}
                sizes.append(manifest.delta_bytes)
                decoded.append(reader.next())
        seconds = statistics.median(said["seconds"] for said in decoded)
        one = one or seconds
        say(
            "shards", backend=place.regions.backend, round_trip_ms=2 * link.delay_ms, loss=link.loss,
            shards=shards, connections=connections,
            partitions=len(partitions), delta_bytes=int(statistics.median(sizes)), seconds=seconds,
            times_one_shard=seconds / one, fetch_seconds=statistics.median(said["fetch_seconds"] for said in decoded),
            plain_tcp_seconds=plain_transfer(place.regions.hub, region, int(statistics.median(sizes))),
        )  # fmt: skip


def replaced(bits: np.ndarray, random: np.random.Generator, density: float) -> np.ndarray:
    """Replace some patterns with random ones, which no codec can predict."""
    others = random.integers(0, 1 << 14, bits.shape, dtype=np.uint16)
    return np.where(random.random(bits.shape) < density, others, bits)


def fresh(place: Place) -> KafkaSettings:
    """Create new topics."""
    kafka = place.kafka.model_copy(update={"topic_prefix": f"b{uuid.uuid4().hex[:8]}."})
    create_topics(kafka)
    return kafka


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[4e6, 16e6, 50e6], help="bits a second")
    parser.add_argument("--rate-delay-ms", type=float, default=2.0, help="one way, of the links of limited rate")
    parser.add_argument("--delay-ms", type=float, default=50.0, help="one way, of the link for shards")
    parser.add_argument("--elements", type=int, default=1 << 24, help="bf16 elements of the model")
    parser.add_argument("--versions", type=int, default=10, help="versions of each figure")
    parser.add_argument("--only", choices=["rates", "shards"], help="one kind of figure alone")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read:
        read(json.loads(chosen.read))
        return
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-link-")))
        place = stack.enter_context(a_broker(directory))
        for rate in [] if chosen.only == "shards" else chosen.rates:
            link = LinkShape(delay_ms=chosen.rate_delay_ms, bits_per_second=rate)
            measure_rate(place, link, chosen.elements, chosen.versions)
        for loss in () if chosen.only == "rates" else (0.0, 0.01):
            measure_shards(place, LinkShape(chosen.delay_ms, loss), chosen.elements, chosen.versions)


if __name__ == "__main__":
    main()
