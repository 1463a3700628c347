"""The replica over real HTTP: versions move under running requests, and every token says which one sampled it."""

import base64
import importlib.util
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tidemill.schemas.records import AckStatus, GateDecision, GateVerdict, WeightAck

_PATH = Path(__file__).with_name("replica_driver.py")
_SPEC = importlib.util.spec_from_file_location("replica_driver", _PATH)
driver = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = driver
_SPEC.loader.exec_module(driver)

BODY = {"model": "tidemill", "prompt": [5, 6, 7, 8], "logprobs": 0, "return_token_ids": True, "ignore_eos": True}


class Served:
    """A replica process, the log that it is fed, and what it answered."""

    def __init__(self, root):
        self.root, self.version, self.log = root, 0, driver.MemoryLog()
        self.base = driver.make_checkpoint(root / "v0")
        self.view = driver.view_of(self.base)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        first = driver.publish(self.log, 0, None, self.view, self.base)
        config = {"manifest": driver.to_line(first), "port": self.port, "staging": str(root / "s"), "settings": {}}
        self.process = subprocess.Popen(
            [sys.executable, str(_PATH), "serve", json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(root / "log").open("wb"), text=True,
            env=dict(os.environ),
        )  # fmt: skip
        self.lines = queue.Queue()
        threading.Thread(target=lambda: [self.lines.put(line.strip()) for line in self.process.stdout]).start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=240)
        assert self.ack(deadline_s=240.0).status is AckStatus.ANCHORED
        self.wait_until_healthy()

    def wait_until_healthy(self, deadline_s=60.0):
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                threading.Event().wait(0.05)
        raise TimeoutError((self.root / "log").read_text()[-4000:])

    def line(self, deadline_s=60.0):
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and (self.process.poll() is None or not self.lines.empty()):
            try:
                return self.lines.get(timeout=0.2)
            except queue.Empty:
                continue
        raise TimeoutError((self.root / "log").read_text()[-4000:])

    def ack(self, deadline_s=60.0) -> WeightAck:
        while True:
            line = self.line(deadline_s)
            if line not in ("observed", "flipped"):
                return driver.CODEC.decode(base64.b64decode(line))

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def send(self, corrupt=False, anchor=False, fraction=0.01):
        """Publish the next version to the replica."""
        old, at = self.view, len(self.log.located)
        self.version += 1
        self.view = driver.nudged(old, self.version, fraction)
        where = driver.save_view(self.view, self.base, self.root / f"v{self.version}") if anchor else None
        manifest = driver.publish(self.log, self.version, old, self.view, where)
        if corrupt:
            driver.corrupt(self.log, at)
        for record in [located.record for located in self.log.located[at:]] + [manifest]:
            self.tell(driver.to_line(record))
        return manifest

    def decide(self, verdict, version=None):
        """Hand the replica a gate decision."""
        self.tell(driver.to_line(GateDecision("test", "main", verdict, version, "reward fell", "ada", {}, 0)))

    def complete(self, **changes):
        return self.http.post("/v1/completions", json={**BODY, "max_tokens": 8, **changes})

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.http.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    replica = Served(tmp_path_factory.mktemp("served"))
    yield replica
    replica.close()


def test_a_completion_says_its_tokens_logprobs_and_version(served):
    response = served.complete()
    assert response.status_code == 200 and response.headers["x-tidemill-replica"] == "replica-t"
    (choice,) = response.json()["choices"]
    version = served.http.get("/tidemill/status").json()["version"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 8
    assert (choice["weight_versions"], choice["weight_incarnation"]) == ([[version, 0, 8]], driver.INCARNATION)


CHAT = {"messages": [{"role": "user", "content": "t5 t6 t7"}], "logprobs": True, "model": "tidemill"}


def streamed(served, path, body):
    """The chunks of a streamed answer."""
    chunks = []
    with served.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
    return chunks


def test_a_chat_answer_says_its_tokens_and_version(served):
    version = served.http.get("/tidemill/status").json()["version"]
    body = {**CHAT, "max_tokens": 8, "return_token_ids": True, "ignore_eos": True, "n": 2}
    answer = served.http.post("/v1/chat/completions", json=body).json()
    for choice in answer["choices"]:
        assert choice["weight_versions"] == [[version, 0, 8]] and len(choice["token_ids"]) == 8
        assert choice["weight_incarnation"] == driver.INCARNATION


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_streamed_answer_says_its_tokens_and_where_a_version_begins(served, path):
    body = {**(BODY if path == "/v1/completions" else CHAT), "return_token_ids": True, "ignore_eos": True, "n": 2}
    chunks = []
    running = threading.Thread(target=lambda: chunks.extend(streamed(served, path, {**body, "max_tokens": 460})))
    running.start()
    served.send()
    assert served.ack().status is AckStatus.PROVED
    running.join(240)
    for index in range(2):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert sum(len(part.get("token_ids") or []) for part in parts) == 460
        told = [part["weight_versions"] for part in parts if "weight_versions" in part]
        assert all(part.get("weight_incarnation") == driver.INCARNATION for part in parts if "weight_versions" in part)
        (old, start, middle), (new, middle_, end) = told[-1]
        assert (old, new) == (served.version - 1, served.version) and "weight_versions" in parts[-1]
        assert (start, end) == (0, 460) and 0 < middle == middle_ < 460
        assert len(told) == 3 and told[0][0][:2] == [old, 0] and told[1][1][:2] == [new, middle]


def test_a_version_that_arrives_mid_request_splits_its_tokens_and_stops_nothing(served):
    answers = []
    running = threading.Thread(target=lambda: answers.append(served.complete(max_tokens=480).json()))
    running.start()
    served.send()
    assert served.ack().status is AckStatus.PROVED
    running.join(240)
    (choice,) = answers[0]["choices"]
    spans = choice["weight_versions"]
    assert [span[0] for span in spans] == sorted({span[0] for span in spans}) and len(spans) == 2
    assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == 480


def test_a_hundred_versions_are_proved_by_one_process(served):
    before = served.http.get("/tidemill/status").json()
    created = psutil.Process(before["pid"]).create_time()
    core = [child.pid for child in psutil.Process(before["pid"]).children(recursive=True)]
    for _ in range(100):
        manifest = served.send(fraction=0.002)
        ack = served.ack()
        assert ack.status is AckStatus.PROVED and ack.fingerprint == manifest.fingerprint
        assert ack.pid == before["pid"] and ack.incarnation == before["incarnation"]
    after = served.http.get("/tidemill/status").json()
    assert after["version"] == served.version and after["fingerprint"] == manifest.fingerprint
    assert psutil.Process(before["pid"]).create_time() == created
    assert [child.pid for child in psutil.Process(before["pid"]).children(recursive=True)] == core


def test_a_prefix_computed_by_older_weights_is_not_reused(served):
    def logprobs(**changes):
        prompt = [(3 * i) % 190 + 5 for i in range(100)]
        answer = served.complete(prompt=prompt, temperature=0, **changes).json()
        return answer["choices"][0]["logprobs"]["token_logprobs"]

    old = logprobs()
    assert logprobs() == pytest.approx(old, abs=1e-5)
    served.send(fraction=0.2)
    assert served.ack().status is AckStatus.PROVED
    salted = logprobs(cache_salt="a salt of the client's")
    assert salted != pytest.approx(old, abs=1e-3)
    # A request for prompt logprobs computes its whole prompt anew.
    assert salted == pytest.approx(logprobs(prompt_logprobs=0), abs=1e-5)


def test_a_roll_back_meets_no_prefix_that_newer_weights_computed(served):
    """A request that began under the older version went on under a newer one: what it left in the cache is of both."""
    served.send(anchor=True)
    assert served.ack().status in (AckStatus.PROVED, AckStatus.ANCHORED)
    older, answers = served.version, []
    running = threading.Thread(target=lambda: answers.append(served.complete(max_tokens=400, temperature=0).json()))
    running.start()
    served.send(fraction=0.2)
    assert served.ack().status is AckStatus.PROVED
    running.join(240)
    (choice,) = answers[0]["choices"]
    assert [span[0] for span in choice["weight_versions"]] == [older, older + 1]
    served.decide(GateVerdict.ROLL_BACK, older)
    back = served.ack()
    assert (back.status, back.serving_version, back.reason) == (
        AckStatus.ANCHORED, older, f"rolled back to version {older} by ada: reward fell"
    )  # fmt: skip

    def logprobs(**changes):
        prompt = [*BODY["prompt"], *choice["token_ids"]]
        return served.complete(prompt=prompt, temperature=0, **changes).json()["choices"][0]["logprobs"]

    # A request for prompt logprobs computes its whole prompt anew.
    assert logprobs()["token_logprobs"] == pytest.approx(logprobs(prompt_logprobs=0)["token_logprobs"][-8:], abs=1e-4)
    served.decide(GateVerdict.RELEASE)
    assert served.ack().serving_version == served.version


def test_a_corrupt_chunk_is_refused_and_the_next_anchor_heals_it(served):
    served.send(corrupt=True)
    refused = served.ack()
    assert refused.status is AckStatus.REFUSED and refused.serving_version == served.version - 1
    assert served.complete().json()["choices"][0]["weight_versions"][0][0] == served.version - 1
    served.send(anchor=True)
    healed = served.ack()
    assert (healed.status, healed.serving_version) == (AckStatus.ANCHORED, served.version)
    assert served.complete().json()["choices"][0]["weight_versions"][0][0] == served.version


@pytest.mark.parametrize("bit", [0, 16], ids=["below bf16", "another bf16 value"])
def test_one_flipped_bit_of_a_live_tensor_fails_the_next_proof_and_is_healed(served, bit):
    served.tell(f"flip model.norm.weight 77 {bit}")
    assert served.line() in ("observed", "flipped")
    served.send()
    refused, healed = served.ack(), served.ack()
    assert refused.status is AckStatus.REFUSED and refused.fingerprint != refused.expected_fingerprint
    assert (healed.status, healed.serving_version) == (AckStatus.ANCHORED, served.version)


@pytest.mark.parametrize("bad", [{"seed": 3}, {"max_tokens": -1}, {"prompt": [5] * 600}, {"model": "other"}])
def test_a_request_that_cannot_be_served_is_answered_with_an_error_and_the_replica_lives(served, bad):
    response = served.complete(**bad)
    assert 400 <= response.status_code < 500 and response.json()["error"]["message"]
    assert served.complete().status_code == 200


def test_the_engine_core_dies_with_a_killed_server(served):
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children
    served.process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
