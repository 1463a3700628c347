"""Cost of checks and signatures in the feedback SDK, one JSON line per figure: `python tests/bench/bench_feedback.py`.

Each way writes the same records with the same keys into the same partitions of a local broker and waits for the
acknowledgements. The ways alternate, and a figure is the median of the rounds.

- `raw`: a confluent-kafka producer with the same settings, which gets the encoded records.
- `sdk`: `FeedbackProducer.send` from one thread: tokens verified, values checked, records encoded, partition computed.
- `sdk_asyncio`: `AsyncFeedbackProducer.send`, awaited in groups.

`ratio` is relative to `raw` of the same run. The broker shares the machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import time
from dataclasses import dataclass

from confluent_kafka import Producer
from measuring import scratch_log

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

START_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The events of a run, and the settings to send them with."""

    kafka: KafkaSettings
    product: ProductSettings
    signals: list[tuple[str, EventFields]]
    """Interaction token and fields of each thumb."""

    @classmethod
    def of(cls, kafka: KafkaSettings, events: int) -> Load:
        product = ProductSettings.with_random_keys()
        signer, pseudonyms, now = Signer(product), Pseudonyms(product), now_us()
        signals: list[tuple[str, EventFields]] = []
        for number in range(events):
            user = f"user-{number % 1000}@example.com"
            interaction = hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()
            token = signer.sign(interaction, pseudonyms.of(user))
            signals.append((token, {"user": user, "event_id": f"e-{number}", "observed_at": now}))
        return cls(kafka, product, signals)

    def raw(self) -> float:
        """Return the seconds of a plain producer."""
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
        return time.monotonic() - begun

    def sdk(self) -> float:
        """Return the seconds of the SDK."""
        with FeedbackProducer(self.kafka, self.product, source="bench", deadline_s=START_S) as feedback:
            feedback.thumbs_up(self.signals[0][0], user=self.signals[0][1]["user"])
            feedback.flush()
            begun = time.monotonic()
            for token, fields in self.signals:
                feedback.send(token, "thumb", 1.0, **fields)
            feedback.flush()
            return time.monotonic() - begun

    async def sdk_asyncio(self) -> float:
        """Return the seconds of the SDK for asyncio."""
        async with AsyncFeedbackProducer(self.kafka, self.product, source="bench", deadline_s=START_S) as feedback:
            await feedback.thumbs_up(self.signals[0][0], user=self.signals[0][1]["user"])
            begun = time.monotonic()
            for start in range(0, len(self.signals), 1000):
                group = self.signals[start : start + 1000]
                await asyncio.gather(*(feedback.send(token, "thumb", 1.0, **fields) for token, fields in group))
            return time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="", help="Kafka's address; default: a broker of its own")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with scratch_log(arguments.bootstrap) as (bootstrap, _):
        kafka = KafkaSettings(bootstrap=bootstrap, topic_prefix=f"bench{os.getpid()}.")
        create_topics(kafka)
        load = Load.of(kafka, arguments.events)
        ways = {"raw": load.raw, "sdk": load.sdk, "sdk_asyncio": lambda: asyncio.run(load.sdk_asyncio())}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                found[name].append(way())
    seconds = {name: statistics.median(taken) for name, taken in found.items()}
    for name, taken in seconds.items():
        line = {"figure": name, "events": arguments.events, "events_per_s": round(arguments.events / taken)}
        print(json.dumps({**line, "ratio": round(seconds["raw"] / taken, 4)}), flush=True)


if __name__ == "__main__":
    main()
