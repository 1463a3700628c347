"""The control of the crash test: a simple group assembly over a Faust table. It corrupts groups.

It appends to a list. When the list is full, it sends the group without waiting for the acknowledgement and deletes the
list. After a kill, Faust recovers the table, which is ahead of the committed offsets, and appends records again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import faust
from faust.contrib.asgi import faust_app_running

from tidemill.schemas.catalogue import Names, Topic
from tidemill.schemas.codec import Codec
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.records import Rollout
from tidemill.streams.config import StreamSettings
from tidemill.streams.runner.base import checked_partitions
from tidemill.streams.runner.faust_access import broker_credentials, faust_settings
from tidemill.streams.runner.worker import group_assembly


def naive_app(kafka: KafkaSettings, stream: StreamSettings) -> Any:
    """Use the same Faust, settings and topics; only the state and the order of writes differ."""
    partitions = checked_partitions(kafka, group_assembly(RunSettings(), stream))
    codec, names = Codec(), Names(kafka.topic_prefix)
    settings = faust_settings(kafka, stream, partitions, broker_credentials(kafka))
    app = faust.App(f"{kafka.topic_prefix}naive", **settings)
    raw: dict[str, Any] = {"key_serializer": "raw", "value_serializer": "raw", "partitions": partitions}
    source = app.topic(names.of(Topic.ROLLOUTS), key_type=bytes, value_type=bytes, **raw)
    groups = app.topic(names.of(Topic.GROUPS), key_type=bytes, value_type=bytes, **raw)
    table = app.Table("naive", default=list, partitions=partitions)

    @app.agent(source, concurrency=1)
    async def assemble(records: Any) -> None:
        async for event in records.events():
            rollout = codec.decode(event.value)
            assert isinstance(rollout, Rollout)
            members = [*table[rollout.group_id], rollout.rollout_id]
            table[rollout.group_id] = members
            if len(members) == rollout.group_size:
                group = json.dumps(members).encode()
                await groups.send(key=event.key, value=group, partition=event.message.partition)
                table.pop(rollout.group_id)

    return app


def main() -> None:
    """Run until killed."""
    asyncio.run(work())


async def work() -> None:
    sections = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    stream = StreamSettings(**sections["stream"])
    Path(stream.data_dir).mkdir(parents=True, exist_ok=True)
    async with faust_app_running(naive_app(KafkaSettings(**sections["kafka"]), stream), stop_timeout=20):
        await asyncio.Event().wait()
