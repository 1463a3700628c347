"""Figures of the rollout worker, one JSON line each: `python tests/bench/bench_worker.py --bootstrap HOST:PORT`.

- requests: CPU microseconds of one completion request with aiohttp and with httpx, same loopback server, same run;
- episodes: episodes per second of the worker's own processor time and of wall time, five turns an episode, with each
  turn recorded and without. The replica is a separate process that answers after `--turn-ms` and samples nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import aiohttp
import httpx
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.producers.rollout.agents import byte_tokenizer
from tidemill.producers.config import RolloutSettings
from tidemill.producers.rollout import worker
from tidemill.producers.sampling.completion import Sampling, request_body
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.chat.format import CHATML_TOKENS, chatml
from tidemill.schemas.clock import now_us
from tidemill.schemas.config import ChatSettings, KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.log.admin import create_topics
from tidemill.schemas.log.producer import RecordProducer
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Mode, Task

TURNS = 5
BEGIN, END = CHATML_TOKENS[0], CHATML_TOKENS[-1]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 10, "b": 13}}</tool_call>'
GROUP_SIZE = 16
REQUESTS = 2000
AT_ONCE = 32


def http(document: dict) -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def turn(tokenizer: Tokenizer, text: str) -> bytes:
    ids = tokenizer.encode(text + END, add_special_tokens=False).ids
    logprobs = {"token_logprobs": [-0.123456789] * len(ids), "tokens": [f"token_id:{i}" for i in ids]}
    choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "weight_versions": [[0, 0, len(ids)]]}
    return http({"choices": [choice]})


class Replica(asyncio.Protocol):
    """Selects its answer by the number of messages in the prompt: system, user, and two for each turn so far."""

    def __init__(self, tokenizer: Tokenizer, delay_s: float) -> None:
        self.marker = f" {tokenizer.token_to_id(BEGIN)},".encode()
        self.call, self.answer = turn(tokenizer, CALL), turn(tokenizer, "answer 77")
        self.status = http({"replica_id": "r", "region": ""})
        self.delay_s = delay_s
        self.held = b""

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, found, rest = self.held.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        if not found or len(rest) < int(length or 0):
            return
        self.held = b""
        said = self.answer if rest.count(self.marker) >= 2 * TURNS else self.call
        said = self.status if head.startswith(b"GET") else said
        asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, said)


def serve(delay_s: float, port) -> None:
    async def main() -> None:
        tokenizer = byte_tokenizer(CHATML_TOKENS)
        server = await asyncio.get_running_loop().create_server(lambda: Replica(tokenizer, delay_s), "127.0.0.1", 0)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(main())


async def cpu_us_a_request(ask) -> float:
    turns = iter(range(REQUESTS))

    async def one_after_the_other() -> None:
        for _ in turns:
            await ask()

    began = time.process_time()
    await asyncio.gather(*[one_after_the_other() for _ in range(AT_ONCE)])
    return (time.process_time() - began) / REQUESTS * 1e6


async def requests(address: str) -> dict[str, float]:
    url, body = f"{address}/v1/completions", request_body(list(range(200)), Sampling(16, 1.0, (1,)), None)
    async with aiohttp.ClientSession() as session, httpx.AsyncClient(timeout=60) as client:

        async def with_aiohttp() -> None:
            async with session.post(url, data=body) as response:
                await response.read()

        async def with_httpx() -> None:
            (await client.post(url, content=body)).read()

        return {
            "aiohttp_cpu_us": round(await cpu_us_a_request(with_aiohttp), 1),
            "httpx_cpu_us": round(await cpu_us_a_request(with_httpx), 1),
        }


def issue(kafka: KafkaSettings, count: int) -> None:
    now = now_us()
    payload = '{"entries":[10,13,24,30]}'
    with RecordProducer(kafka, "bench") as producer:
        for name in (f"run/train/{index}" for index in range(count)):
            task = Task(name, name, "run", "ledger", payload, Mode.TRAIN, GROUP_SIZE, 8, 0, now, now + 10**10, 0)
            producer.send(Topic.TASKS, task, key=name)


def episodes(kafka: KafkaSettings, address: str, groups: int, at_once: int, record_turns: bool) -> dict[str, float]:
    create_topics(kafka)
    issue(kafka, groups)
    stop, spent = threading.Event(), {}

    def watch() -> None:
        seen = 0
        with LogReader(kafka, [Topic.ROLLOUTS]) as reader:
            while seen < groups * GROUP_SIZE:
                seen += len(reader.poll(0.1))
                spent.setdefault("first", (seen, time.monotonic(), time.process_time())) if seen else None
            spent["last"] = (seen, time.monotonic(), time.process_time())
        stop.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(CHATML_TOKENS).save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "chat_template.jinja").write_text(chatml())
        settings = RolloutSettings(
            replicas=[address],
            tokenizer=folder,
            max_concurrent_episodes=at_once,
            record_turns=record_turns,
            max_context_tokens=8192,
        )
        worker.run(kafka, RunSettings(run_id="run"), StoreSettings(root=folder), settings, ChatSettings(), stop)
    watcher.join()
    count, wall_s, cpu_s = (b - a for a, b in zip(spent["first"], spent["last"], strict=True))
    return {"per_cpu_s": round(count / cpu_s, 1), "per_wall_s": round(count / wall_s, 1), "at_once": at_once,
            "record_turns": record_turns}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--turn-ms", type=float, default=20.0)
    parser.add_argument("--groups", type=int, default=60)
    arguments = parser.parse_args()
    port = multiprocessing.Value("i", 0)
    replica = multiprocessing.Process(target=serve, args=(arguments.turn_ms / 1000, port), daemon=True)
    replica.start()
    while not port.value:
        replica.join(0.01)
    address = f"http://127.0.0.1:{port.value}"
    print(json.dumps({"figure": "requests", **asyncio.run(requests(address))}))
    for at_once, record_turns in itertools.product((16, 64), (True, False)):
        kafka = KafkaSettings(bootstrap=arguments.bootstrap, topic_prefix=f"bench{uuid.uuid4().hex[:8]}.")
        figures = episodes(kafka, address, arguments.groups, at_once, record_turns)
        print(json.dumps({"figure": "episodes", **figures}), flush=True)
    replica.terminate()
    replica.join()


if __name__ == "__main__":
    main()
