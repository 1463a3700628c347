"""The replica over real HTTP: versions change during requests, and each token is reported with its version.

Its model has experts, and it reports them too; the replicas of test_replica_role.py and of
tests/system/test_serving_updates.py are dense.
"""

import asyncio
import base64
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import numpy as np
import psutil
import pytest

from tests.consumers import engine_driver, expert_driver
from tests.consumers import replica_driver as driver
from tests.consumers.conftest import ROOT
from tests.producers.environments import verifiers_plays
from tests.records import build
from tests.waiting import until
from tidemill.producers.config import RolloutSettings
from tidemill.producers.rollout.policy import RolloutPolicy
from tidemill.producers.sampling.completion import Completion, Sampling
from tidemill.producers.sampling.replicas import ReplicaIdentity, open_replica_client
from tidemill.schemas.chat.format import load_chat_format
from tidemill.schemas.chat.messages import checked_messages, checked_tools
from tidemill.schemas.config import ChatSettings
from tidemill.schemas.expert_ids import unpacked_ids
from tidemill.schemas.records import AckStatus, GateDecision, GateVerdict, VersionSpan, WeightAck

BODY = {"model": "tidemill", "prompt": [5, 6, 7, 8], "logprobs": 0, "return_token_ids": True, "ignore_eos": True}

SETTINGS = {
    "expert_ids": True,
    "vllm_args": {"enable-prompt-tokens-details": True, "allowed_origins": ["http://a.test", "http://b.test"]},
    "http": {"header_timeout_s": 20},
}

DEADLINE_S = 900.0
ATTEMPTS = 20


class Served:
    """A replica process, the log that feeds it, and its output lines."""

    def __init__(self, root):
        self.root, self.version, self.log = root, 0, driver.MemoryLog()
        self.base = engine_driver.make_model(engine_driver.Kind("float32", intermediate=64), root / "v0")
        self.chat = load_chat_format(str(self.base), ChatSettings())
        self.view = driver.view_of(self.base)
        first = driver.publish(self.log, 0, None, self.view, self.base)
        config = {
            "manifest": driver.to_line(first),
            "staging": str(root / "s"),
            "settings": SETTINGS,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.consumers.replica_driver", json.dumps(config)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(root / "log").open("wb"), text=True,
        )  # fmt: skip
        self.lines = queue.Queue()
        threading.Thread(target=lambda: [self.lines.put(line.strip()) for line in self.process.stdout]).start()
        assert self.ack().status is AckStatus.ANCHORED
        self.port = int(self.line().removeprefix("port "))
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=DEADLINE_S)
        until(self.healthy, lambda: (root / "log").read_text()[-4000:], DEADLINE_S)
        self.silent = socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_S)
        """A connection that says nothing, while the other tests run."""

    def healthy(self):
        with suppress(httpx.TransportError):
            return self.http.get("/health").status_code == 200

    def line(self):
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end and (self.process.poll() is None or not self.lines.empty()):
            try:
                return self.lines.get(timeout=0.2)
            except queue.Empty:
                continue
        raise TimeoutError((self.root / "log").read_text()[-4000:])

    def ack(self) -> WeightAck:
        while True:
            line = self.line()
            if line not in ("observed", "flipped"):
                return driver.CODEC.decode(base64.b64decode(line))

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def send(self, anchor=False, fraction=0.01):
        """Publish the next version to the replica."""
        old, at = self.view, len(self.log.located)
        self.version += 1
        self.view = driver.nudged(old, self.version, fraction)
        where = driver.save_view(self.view, self.base, self.root / f"v{self.version}") if anchor else None
        manifest = driver.publish(self.log, self.version, old, self.view, where)
        for record in [located.record for located in self.log.located[at:]] + [manifest]:
            self.tell(driver.to_line(record))
        return manifest

    def updated_during(self, ask, has_both, **how):
        """Return the answer to a request during which the next version is served.

        On a busy machine the version may come before the request or after it: then this is tried again.

        Args:
            has_both: whether an answer has tokens of both versions.
        """
        with ThreadPoolExecutor(1) as pool:
            for _ in range(ATTEMPTS):
                answer = pool.submit(ask)
                self.send(**how)
                assert self.ack().status is AckStatus.PROVED
                if has_both(found := answer.result(DEADLINE_S)):
                    break
            return found

    def decide(self, verdict, version=None):
        """Send a gate decision to the replica."""
        self.tell(
            driver.to_line(build(GateDecision, run_id="test", verdict=verdict, version=version, reason="reward fell"))
        )

    def complete(self, **changes):
        return self.http.post("/v1/completions", json={**BODY, "max_tokens": 8, **changes})

    def close(self):
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.http.close()
        self.silent.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory, vllm):
    replica = Served(tmp_path_factory.mktemp("served"))
    yield replica
    replica.close()


def test_a_completion_reports_its_tokens_logprobs_and_version(served):
    response = served.complete()
    assert response.status_code == 200 and response.headers["x-tidemill-replica"] == "replica-t"
    (choice,) = response.json()["choices"]
    version = served.http.get("/tidemill/status").json()["version"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 8
    assert (choice["weight_versions"], choice["weight_incarnation"]) == ([[version, 0, 8]], driver.INCARNATION)


def test_a_rollout_worker_reads_the_experts_of_transformers(served, tmp_path):
    address = f"http://127.0.0.1:{served.port}"

    async def two_turns():
        async with open_replica_client(RolloutSettings(replicas=[address], expert_ids=True)) as client:
            prompt = [(7 * i) % 190 + 5 for i in range(40)]
            first = await client.complete(address, prompt, Sampling(6, 1.0, expert_ids_from=0))
            asked = [*prompt, *first.token_ids, 9, 10]
            sampling = Sampling(6, 1.0, expert_ids_from=len(asked) - 3)
            second = await client.complete(address, asked, sampling)
            return [*asked, *second.token_ids], [unpacked_ids(made.expert_ids) for made in (first, second)]

    tokens, parts = asyncio.run(two_turns())
    checkpoint = driver.save_view(served.view, served.base, tmp_path / "served")
    assert np.array_equal(np.sort(np.concatenate(parts), -1), expert_driver.chosen(checkpoint, tokens))


CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "t5 t6 t7"}], "logprobs": True, "model": "tidemill"}


def streamed(served, path, body):
    """Return the chunks of a streamed answer."""
    chunks = []
    with served.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
    return chunks


def test_a_chat_answer_has_openais_format_and_reports_its_tokens_and_version(served):
    version = served.http.get("/tidemill/status").json()["version"]
    body = {**CHAT, "max_tokens": 8, "return_token_ids": True, "ignore_eos": True, "top_logprobs": 3}
    response = served.http.post(CHAT_PATH, json=body)
    assert response.status_code == 200 and response.headers["x-tidemill-replica"] == "replica-t"
    answer = response.json()
    (choice,) = answer["choices"]
    assert (answer["object"], answer["model"]) == ("chat.completion", "tidemill") and answer["created"] > 1.7e9
    assert answer["id"].startswith("chatcmpl-") and choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [[version, 0, 8]] and len(choice["token_ids"]) == 8
    assert choice["weight_incarnation"] == driver.INCARNATION
    told, prompt = choice["logprobs"]["content"], answer["prompt_token_ids"]
    assert prompt == served.chat.open(CHAT["messages"]) and answer["usage"]["total_tokens"] == len(prompt) + 8
    assert [one["token"] for one in told] == [served.chat.token(token) for token in choice["token_ids"]]
    for one in told:
        likely = [each["logprob"] for each in one["top_logprobs"]]
        assert len(likely) == 3 and likely == sorted(likely, reverse=True) and one["logprob"] <= likely[0] + 1e-6


def test_an_answer_without_a_requested_length_fills_the_context(served):
    body = {"messages": [{"role": "user", "content": "t9 " * 400}], "ignore_eos": True, "return_token_ids": True}
    answer = served.http.post(CHAT_PATH, json=body).json()
    assert len(answer["prompt_token_ids"]) + len(answer["choices"][0]["token_ids"]) == 512
    full = {"messages": [{"role": "user", "content": "t9 " * 507}]}
    assert len(served.chat.open(full["messages"])) == 512
    assert served.http.post(CHAT_PATH, json=full).status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", CHAT_PATH])
def test_a_streamed_answer_reports_its_tokens_and_where_a_version_begins(served, path):
    body = {**(BODY if path == "/v1/completions" else CHAT), "return_token_ids": True, "ignore_eos": True}
    body["n"] = choices = 2 if path == "/v1/completions" else 1

    def parts_of(chunks, index):
        return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]

    def has_both(chunks):
        return all(len(parts_of(chunks, index)[-1].get("weight_versions", ())) == 2 for index in range(choices))

    chunks = served.updated_during(lambda: streamed(served, path, {**body, "max_tokens": 460}), has_both)
    for index in range(choices):
        parts = parts_of(chunks, index)
        assert sum(len(part.get("token_ids") or []) for part in parts) == 460
        told = [part["weight_versions"] for part in parts if "weight_versions" in part]
        assert all(part.get("weight_incarnation") == driver.INCARNATION for part in parts if "weight_versions" in part)
        (old, start, middle), (new, middle_, end) = told[-1]
        assert (old, new) == (served.version - 1, served.version) and "weight_versions" in parts[-1]
        assert (start, end) == (0, 460) and 0 < middle == middle_ < 460
        assert len(told) == 3 and told[0][0][:2] == [old, 0] and told[1][1][:2] == [new, middle]


class Recorded:
    """A rollout's replica session that replays the replica's answers in a chat and stores the prompts."""

    def __init__(self, turns):
        self.turns, self.identity, self.asked = turns, ReplicaIdentity("r", "here"), []

    async def complete(self, prompt, sampling):
        ids, finish = self.turns[len(self.asked)]
        self.asked.append(list(prompt))
        return Completion(ids, [-0.5] * len(ids), (VersionSpan(0, 0, len(ids)),), finish)


def said_by(answer):
    """Return message, token ids, prompt and finish reason of a whole or a streamed answer, as a client sees them."""
    if isinstance(answer, dict):
        (choice,) = answer["choices"]
        message = choice["message"]
        return message, choice["token_ids"], answer["prompt_token_ids"], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in answer]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    ids = [token for choice in choices for token in choice["token_ids"]]
    message = {"role": "assistant", "content": content}
    return message, ids, answer[0]["prompt_token_ids"], choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_served_as_it_is_trained(served, stream):
    """Whole and cut-off turns of a random model contain template tokens; rendered again, their ids would differ."""
    tool = {"type": "function", "function": {"name": "t50", "parameters": {"type": "object"}}}
    messages, turns, prompts = [{"role": "system", "content": "t20"}], [], []
    for number in range(6):
        messages.append({"role": "user", "content": f"t{30 + number} t31"})
        body = {"messages": messages, "tools": [tool], "return_token_ids": True, "max_tokens": 8 + number,
                "logit_bias": {"1": 1.0 * number, "2": 6.0, "3": 6.0}}  # fmt: skip
        answer = streamed(served, CHAT_PATH, body) if stream else served.http.post(CHAT_PATH, json=body).json()
        message, ids, prompt, finish = said_by(answer)
        messages.append(message)
        turns.append((ids, finish))
        prompts.append(prompt)
    anew = [served.chat.open(messages[: 2 + 2 * number], checked_tools([tool])) for number in range(6)]
    assert anew[0] == prompts[0] and anew[1:] != prompts[1:], "the conversation would be the same if rendered anew"

    async def train():
        session = Recorded(turns)
        policy = RolloutPolicy(
            served.chat, session, RolloutSettings(max_context_tokens=100_000, max_turn_tokens=100), 100
        )
        trained = [{"role": "system", "content": "t20"}]
        for number in range(6):
            trained.append(messages[1 + 2 * number])
            trained.append(dict((await policy.chat(trained, tools=[tool])).message))
        assert session.asked == prompts
        assert checked_messages(trained) == checked_messages(messages)

    asyncio.run(train())


BAD_CHATS = [
    (b'{"messages": [', None),
    (b"[]", None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({**CHAT, "n": 2}, "`n`"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "tool_choice": "required"}, "tool_choice"),
    ({**CHAT, "stream": "yes"}, "stream"),
    ({**CHAT, "chat_template": "x"}, "chat_template"),
    ({**CHAT, "continue_final_message": True}, "continue_final_message"),
    ({**CHAT, "max_tokens": 0}, "max_tokens"),
    ({**CHAT, "temperature": "hot"}, "temperature"),
    ({**CHAT, "temperature": -1}, "temperature"),
    ({**CHAT, "seed": 3}, "seed"),
    ({**CHAT, "model": "other"}, "other"),
    ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": [{"role": "user", "content": "t9 " * 600}]}, "512"),
    ({"messages": [{"role": "user", "content": "t9 " * 500_000}]}, "512"),
]


@pytest.mark.parametrize(("body", "named"), BAD_CHATS)
def test_a_chat_that_cannot_be_served_is_answered_with_an_error_and_the_next_one_is_served(served, body, named):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = served.http.post(CHAT_PATH, content=content, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["message"] and (named or "") in response.text
    assert served.http.post(CHAT_PATH, json={**CHAT, "max_tokens": 2}).status_code == 200


def test_content_cannot_spell_the_templates_tokens(served):
    spelt = {"role": "user", "content": "<|im_end|> <|im_start|> t9"}
    answer = served.http.post(CHAT_PATH, json={"messages": [spelt], "max_tokens": 2, "return_token_ids": True}).json()
    assert (answer["prompt_token_ids"].count(1), answer["prompt_token_ids"].count(2)) == (1, 2)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", {"input": "t5"}), ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3}),
     ("/v1/chat/completions/batch", {"messages": [CHAT["messages"]]}), ("/invocations", CHAT)],
)  # fmt: skip
def test_chat_endpoints_that_would_render_with_other_code_are_not_served(served, path, body):
    response = served.http.post(path, json={"model": "tidemill", **body})
    assert response.status_code in (400, 404, 501) and "weight_versions" not in response.text


def test_a_connection_that_says_nothing_is_closed(served):
    assert served.silent.recv(1) == b""


def test_vllms_own_arguments_reach_vllm(served):
    answer = served.http.post(CHAT_PATH, json={**CHAT, "max_tokens": 2}).json()
    assert "prompt_tokens_details" in answer["usage"]
    response = served.http.get("/health", headers={"origin": "http://b.test"})
    assert response.headers["access-control-allow-origin"] == "http://b.test"


def spans_of(answer):
    """Return the versions of the one choice of an answer."""
    (choice,) = answer.json()["choices"]
    return choice["weight_versions"]


def test_a_version_that_arrives_during_a_request_splits_its_tokens_and_does_not_stop_it(served):
    spans = served.updated_during(lambda: spans_of(served.complete(max_tokens=480)), lambda spans: len(spans) == 2)
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
    # A request for prompt logprobs computes its whole prompt again.
    assert salted == pytest.approx(logprobs(prompt_logprobs=0), abs=1e-5)


def test_a_roll_back_reuses_no_prefix_that_newer_weights_computed(served):
    """A request began with the older version and continued with a newer one, so its cache entries are from both."""
    served.send(anchor=True)
    assert served.ack().status in (AckStatus.PROVED, AckStatus.ANCHORED)
    answer = served.updated_during(
        lambda: served.complete(max_tokens=400, temperature=0), lambda answer: len(spans_of(answer)) == 2, fraction=0.2
    )
    older = served.version - 1
    assert [span[0] for span in spans_of(answer)] == [older, older + 1]
    served.decide(GateVerdict.ROLL_BACK, older)
    back = served.ack()
    assert (back.status, back.serving_version, back.reason) == (
        AckStatus.ANCHORED, older, f"rolled back to version {older} by ada: reward fell"
    )  # fmt: skip

    def logprobs(**changes):
        prompt = [*BODY["prompt"], *answer.json()["choices"][0]["token_ids"]]
        return served.complete(prompt=prompt, temperature=0, **changes).json()["choices"][0]["logprobs"]

    # A request for prompt logprobs computes its whole prompt again.
    assert logprobs()["token_logprobs"] == pytest.approx(logprobs(prompt_logprobs=0)["token_logprobs"][-8:], abs=1e-4)
    served.decide(GateVerdict.RELEASE)
    assert served.ack().serving_version == served.version


@pytest.mark.parametrize("bit", [0, 16], ids=["below bf16", "another bf16 value"])
def test_one_flipped_bit_of_a_live_tensor_fails_the_next_proof_and_is_healed(served, bit):
    served.tell(f"flip model.norm.weight 33 {bit}")
    assert served.line() in ("observed", "flipped")
    served.send()
    refused, healed = served.ack(), served.ack()
    assert refused.status is AckStatus.REFUSED and refused.fingerprint != refused.expected_fingerprint
    assert (healed.status, healed.serving_version) == (AckStatus.ANCHORED, served.version)


@pytest.mark.parametrize("bad", [{"seed": 3}, {"max_tokens": -1}, {"prompt": [5] * 600}, {"model": "other"}])
def test_a_request_that_cannot_be_served_is_answered_with_an_error_and_the_replica_continues(served, bad):
    response = served.complete(**bad)
    assert 400 <= response.status_code < 500 and response.json()["error"]["message"]
    assert served.complete().status_code == 200


@pytest.mark.parametrize("case", verifiers_plays.CASES)
def test_a_taskset_of_verifiers_is_played(served, case, monkeypatch):
    address = str(served.http.base_url).rstrip("/")
    verifiers_plays.check_case(case, address, served.chat, served.version, monkeypatch)


def test_the_engine_core_dies_with_a_killed_server(served):
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children
    served.process.kill()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert not alive
