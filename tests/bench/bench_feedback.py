"""Cost of checks, signatures and HTTP, one JSON line per figure: `python tests/bench/bench_feedback.py`.

Each way writes the same records with the same keys into the same partitions of a local broker and waits for the
acknowledgements. The ways alternate, and a figure is the median of the rounds.

- `raw`: a confluent-kafka producer with the same settings, which gets the encoded records.
- `sdk`: `FeedbackProducer.send` from one thread: tokens verified, values checked, records encoded, partition computed.
- `sdk_asyncio`: `AsyncFeedbackProducer.send`, awaited in groups.
- `gateway_batch`, `gateway_single`: HTTP to a gateway process, from `--clients` connections of this process.

`ratio` is relative to `raw` of the same run; `p50_ms` and `p95_ms` are the times of one request until its answer. The
gateway, its clients and the broker share the machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from confluent_kafka import Producer
from measuring import free_port, log_at, until_up

from tidemill.producers.feedback import AsyncFeedbackProducer, FeedbackProducer
from tidemill.producers.feedback.event import EventFields, FeedbackMaker
from tidemill.producers.product.settings import ProductSettings
from tidemill.producers.product.signing import Pseudonyms, Signer
from tidemill.schemas.catalogue import CATALOGUE, Names, Topic, feedback_key
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.client_settings import producer_settings
from tidemill.schemas.log.producer import partition_of

KEY = "k" * 64
SINGLE_SHARE = 10
"""One event per request is so much slower that a tenth of the events is enough."""
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Number of events, their total seconds, and the seconds of each request."""

    events: int
    seconds: float
    requests: list[float]

    @property
    def rate(self) -> float:
        return self.events / self.seconds


@dataclass(frozen=True, slots=True)
class Load:
    """The events of a run, and the settings to send them with."""

    kafka: KafkaSettings
    product: ProductSettings
    signals: list[tuple[str, EventFields]]
    """Interaction token and fields of each thumb."""
    clients: int
    batch: int

    @classmethod
    def of(cls, kafka: KafkaSettings, events: int, clients: int, batch: int) -> Load:
        product = ProductSettings.with_random_keys()
        signer, pseudonyms, now = Signer(product), Pseudonyms(product), now_us()
        signals: list[tuple[str, EventFields]] = []
        for number in range(events):
            user = f"user-{number % 1000}@example.com"
            interaction = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()
            token = signer.sign(interaction, pseudonyms.of(user))
            signals.append((token, {"user": user, "event_id": f"e-{number}", "observed_at": now}))
        return cls(kafka, product, signals, clients, batch)

    def raw(self) -> Measured:
        maker, codec = FeedbackMaker(self.product), Codec()
        records = [maker.make("bench", now_us(), token, "thumb", 1.0, **fields) for token, fields in self.signals]
        partitions = CATALOGUE[Topic.FEEDBACK].partition_count(self.kafka)
        ready = [
            (codec.encode(r), feedback_key(r.interaction_id, r.event_id), partition_of(r.interaction_id, partitions))
            for r in records
        ]
        topic = Names(self.kafka.topic_prefix).of(Topic.FEEDBACK)
        producer = Producer({**producer_settings(self.kafka, "bench-raw"), "queue.buffering.max.messages": 1_000_000})
        # The first record waits for metadata and the producer's id, here as in the other ways.
        producer.produce(topic, *ready[0])
        assert producer.flush(START_S) == 0
        begun = time.monotonic()
        for value, key, partition in ready:
            producer.produce(topic, value, key, partition)
        assert producer.flush(START_S) == 0
        return Measured(len(ready), time.monotonic() - begun, [])

    def sdk(self) -> Measured:
        with FeedbackProducer(self.kafka, self.product, source="bench", deadline_s=START_S) as feedback:
            feedback.thumbs_up(self.signals[0][0], user=self.signals[0][1]["user"])
            feedback.flush()
            begun = time.monotonic()
            for token, fields in self.signals:
                feedback.send(token, "thumb", 1.0, **fields)
            feedback.flush()
            return Measured(len(self.signals), time.monotonic() - begun, [])

    def sdk_asyncio(self) -> Measured:
        return asyncio.run(self._sdk_asyncio())

    async def _sdk_asyncio(self) -> Measured:
        async with AsyncFeedbackProducer(self.kafka, self.product, source="bench", deadline_s=START_S) as feedback:
            await feedback.thumbs_up(self.signals[0][0], user=self.signals[0][1]["user"])
            begun = time.monotonic()
            for start in range(0, len(self.signals), 1000):
                group = self.signals[start : start + 1000]
                await asyncio.gather(*(feedback.send(token, "thumb", 1.0, **fields) for token, fields in group))
            return Measured(len(self.signals), time.monotonic() - begun, [])

    def gateway_batch(self, url: str) -> Measured:
        events = [body_of(*signal) for signal in self.signals]
        groups = [events[start : start + self.batch] for start in range(0, len(events), self.batch)]
        bodies = [json.dumps({"events": group}).encode() for group in groups]
        return asyncio.run(post_all(f"{url}/v1/feedback/batch", bodies, len(events), self.clients))

    def gateway_single(self, url: str) -> Measured:
        bodies = [json.dumps(body_of(*signal)).encode() for signal in self.signals[::SINGLE_SHARE]]
        return asyncio.run(post_all(f"{url}/v1/feedback", bodies, len(bodies), self.clients))


def body_of(token: str, fields: EventFields) -> dict[str, object]:
    return {"interaction": token, "kind": "thumb", "value": 1.0, "user": fields["user"], "event_id": fields["event_id"]}


async def post_all(url: str, bodies: list[bytes], events: int, clients: int) -> Measured:
    left, took = iter(bodies), []
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    async def client(session: aiohttp.ClientSession) -> None:
        for body in left:
            begun = time.monotonic()
            async with session.post(url, data=body) as answer:
                assert answer.status == 202, await answer.text()
                await answer.read()
            took.append(time.monotonic() - begun)

    async with aiohttp.ClientSession(headers=headers) as session:
        begun = time.monotonic()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return Measured(events, time.monotonic() - begun, took)


@contextmanager
def gateway(load: Load) -> Iterator[str]:
    """Run a gateway process with caps that the load does not reach."""
    port = free_port()
    environment = {
        **os.environ,
        **load.product.environment(),
        "TIDEMILL_GATEWAY__API_KEYS": json.dumps({"bench": hashlib.sha256(KEY.encode()).hexdigest()}),
    }
    free_of_caps = {"key_rate": 1e9, "key_burst": 10**9, "user_rate": 1e9, "user_burst": 10**9,
                    "acknowledge_timeout_s": START_S}  # fmt: skip
    sets = [part for name, value in free_of_caps.items() for part in ("--set", f"gateway.{name}={value}")]
    command = [sys.executable, "-m", "tidemill.compose.cli", "gateway", "--port", str(port), *sets]
    where = ["--bootstrap", load.kafka.bootstrap, "--topic-prefix", load.kafka.topic_prefix]
    process = subprocess.Popen([*command, *where], env=environment, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(until_up(f"http://127.0.0.1:{port}/healthz", process))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def measure(load: Load, rounds: int) -> dict[str, list[Measured]]:
    with gateway(load) as url:
        ways: dict[str, Callable[[], Measured]] = {
            "raw": load.raw,
            "sdk": load.sdk,
            "sdk_asyncio": load.sdk_asyncio,
            "gateway_batch": lambda: load.gateway_batch(url),
            "gateway_single": lambda: load.gateway_single(url),
        }
        found: dict[str, list[Measured]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(way())
        return found


def report(found: dict[str, list[Measured]]) -> Iterator[dict[str, object]]:
    rates = {name: statistics.median(m.rate for m in rounds) for name, rounds in found.items()}
    for name, rounds in found.items():
        line: dict[str, object] = {"figure": name, "events": rounds[0].events, "events_per_s": round(rates[name])}
        line["ratio"] = round(rates[name] / rates["raw"], 4)
        requests = sorted(seconds for measured in rounds for seconds in measured.requests)
        if requests:
            line["p50_ms"] = round(1000 * requests[len(requests) // 2], 1)
            line["p95_ms"] = round(1000 * requests[len(requests) * 95 // 100], 1)
        yield line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="", help="Kafka's address; default: a broker of its own")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=16, help="connections to the gateway")
    parser.add_argument("--batch", type=int, default=100, help="events of one batch request")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, log_at(arguments.bootstrap, Path(directory)) as bootstrap:
        kafka = KafkaSettings(bootstrap=bootstrap, topic_prefix=f"bench{os.getpid()}.")
        create_topics(kafka)
        load = Load.of(kafka, arguments.events, arguments.clients, arguments.batch)
        for line in report(measure(load, arguments.rounds)):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
