"""The run that the page's tests show: records of every kind, with consistent numbers and positions.

Six steps of the simulated loop, then one that learned from users. One rollout of the last group is hostile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.consumers import product_support as product
from tests.consumers.sink_support import PREFIX, START_US, rows_of
from tests.producers.rollout.agents import byte_tokenizer
from tests.records import build, member_of
from tidemill.consumers.sink.rows import DeadLetter, Row
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic

SECOND = product.SECOND
STEPS = 6
ONLINE_STEP = STEPS + 1
REPLICAS = ("replica-0", "replica-1")
TENSORS = 1000
HOSTILE = (
    '<script>document.title = "taken"</script><img src=x onerror="document.title=\'taken\'">'
    "{{ 7 * 7 }} \x1b[31mred\x1b[0m \u202eevil\u202c \u2066x\u2069 \x00 '); DROP TABLE rollouts --"
)
"""Markup, a template, a terminal's codes, bidirectional marks, a zero byte and SQL."""
LONG = "unbroken" * 2**17
"""A megabyte without a space."""
TOKENIZER = byte_tokenizer()


def segment(parts: Sequence[tuple[str, bool, int]]) -> r.Segment:
    """Return a segment with one token per byte: each text, whether it was sampled, and by which version."""
    ids: list[int] = []
    mask: list[int] = []
    spans = []
    for text, sampled, version in parts:
        tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
        if sampled:
            spans.append(r.VersionSpan(version, len(ids), len(ids) + len(tokens)))
        ids += tokens
        mask += [int(sampled)] * len(tokens)
    n = len(ids)
    logprobs = np.where(np.array(mask, bool), -np.abs(np.sin(np.arange(n))), 0.0)
    packed = (np.array(ids, "<u4"), np.array(mask, "u1"), logprobs.astype("<f4"))
    return r.Segment(n, *(each.tobytes() for each in packed), spans)


def conversation(question: str, call: str, output: str, answer: str, versions: tuple[int, int]) -> r.Segment:
    """Return a question, a tool call, its output and the answer, in ChatML."""
    return segment(
        [
            (f"<|im_start|>system\nYou add numbers.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n", False, 0),
            ("<|im_start|>assistant\n", False, 0),
            (f"<tool_call>{call}</tool_call><|im_end|>", True, versions[0]),
            (f"\n<|im_start|>tool\n{output}<|im_end|>\n<|im_start|>assistant\n", False, 0),
            (f"{answer}<|im_end|>", True, versions[1]),
        ]
    )


def rollout(
    group: str, index: int, version: int, reward: float | None, at: int, mode: r.Mode, answer: str = "It is 12."
) -> r.Rollout:
    """Return a rollout that took a second; without a reward it failed."""
    failed = reward is None
    versions = (max(0, version - index % 2), version)
    call = '{"name": "calculator", "arguments": {"sum": "5 + 7"}}'
    return build(
        r.Rollout,
        rollout_id=f"{group}-{index}",
        group_id=group,
        mode=mode,
        index=index,
        group_size=4,
        status=r.RolloutStatus.FAILED if failed else r.RolloutStatus.COMPLETED,
        failure="replica gone" if failed else "",
        segments=[] if failed else [conversation(f"5 + 7? ({group})", call, "12", answer, versions)],
        rewards=[] if failed else [r.RewardComponent("correct", reward or 0.0, 0.9), r.RewardComponent("tidy", 1, 0.1)],
        reward=None if failed else round(0.9 * (reward or 0.0) + 0.1, 3),
        success=None if failed else reward == 1.0,
        turns=2,
        prompt_tokens=60,
        sampled_tokens=0 if failed else 90,
        version_min=versions[0],
        version_max=versions[1],
        replica_id=REPLICAS[index % 2],
        started_at=at,
        finished_at=at + SECOND,
        deadline_at=at + 60 * SECOND,
    )


def group(members: Sequence[r.Rollout], offset: int, at: int) -> r.Group:
    """Return the group of rollouts stored from `offset` on."""
    rewards = [one.reward for one in members if one.reward is not None]
    mean = sum(rewards) / len(rewards)
    return build(
        r.Group,
        group_id=members[0].group_id,
        mode=members[0].mode,
        closed_by=r.CloseReason.SIZE,
        members=[
            member_of(one, offset=offset + place, advantage=None if one.reward is None else one.reward - mean)
            for place, one in enumerate(members)
        ],
        mean_reward=mean,
        opened_at=at,
        closed_at=at + SECOND,
    )


class SimulatedLoop:
    """Makes the records of one step after the other, and tracks their offsets."""

    def __init__(self) -> None:
        self.rollouts = self.groups = 0

    def members(self, name: str, rewards: Sequence[float | None], version: int, mode: r.Mode) -> list[r.Record]:
        """Return a task, its rollouts and their group. The hostile rollout is the second of the group `g5-0`."""
        at = START_US + version * 10 * SECOND
        hostile = {1: HOSTILE, 2: LONG} if name == "g5-0" else {}
        played = [
            rollout(name, index, version, reward, at, mode, hostile.get(index, "It is 12."))
            for index, reward in enumerate(rewards)
        ]
        task = build(r.Task, task_id=name, mode=mode, group_size=4, max_turns=4, issued_at=at, issued_version=version)
        closed = group(played, self.rollouts, at)
        self.rollouts += len(played)
        self.groups += 1
        return [task, *played, closed]

    def step(self, number: int) -> list[r.Record]:
        """Return two trained groups, a stale one, a held-out one, the step, its version and the acknowledgements."""
        before, first = number - 1, self.groups
        at = START_US + number * 10 * SECOND
        solved = [1.0 if place < 1 + number // 2 else 0.0 for place in range(4)]
        records = [
            *self.members(f"g{before}-0", solved, before, r.Mode.TRAIN),
            *self.members(f"g{before}-1", [1.0, 0.0, 0.0, None], before, r.Mode.TRAIN),
            *self.members(f"g{before}-2", [1.0, 0.0, 1.0, 0.0], max(0, before - 3), r.Mode.TRAIN),
            *self.members(f"e{before}", solved, before, r.Mode.EVAL),
        ]
        places = [one for one in records if isinstance(one, r.Group)]
        inputs = [r.StepInput(one.group_id, Topic.GROUPS.value, 0, first + n) for n, one in enumerate(places[:2])]
        exclusions = [
            r.StepExclusion(places[2].group_id, Topic.GROUPS.value, 0, first + 2, "stale", 4),
            r.StepExclusion(places[3].group_id, Topic.GROUPS.value, 0, first + 3, "eval", 4),
        ]
        return [*records, *self.taken(number, inputs, exclusions, at)]

    def taken(
        self, number: int, inputs: list[r.StepInput], exclusions: list[r.StepExclusion], at: int
    ) -> list[r.Record]:
        """Return a step on given inputs, its version and the replicas' acknowledgements."""
        step = build(
            r.TrainStep,
            step=number,
            inputs=inputs,
            exclusions=exclusions,
            objective="composer2",
            learning_rate=0.001 / number,
            metrics={"policy_lag_bound": 4.0, "loss": 1.0 / number, "mismatch_kl": 0.001 * number},
            lag=[r.LagCount(0, 600 - 50 * number), r.LagCount(1, 40 * number), r.LagCount(2, 10 * number)],
            rollouts=8,
            tokens=630,
            fingerprint=f"f{number}",
            parent_fingerprint=f"f{number - 1}",
            started_at=at,
            finished_at=at + 2 * SECOND,
        )
        plan = build(r.StepPlan, step=number, parent_version=number - 1, inputs=inputs, trainer="t", at=at)
        return [plan, step, *version_of(number, at + 2 * SECOND)]


def version_of(number: int, at: int) -> list[r.Record]:
    """Return a version's manifest and chunk, a skip-delta for some versions, and the replicas' acknowledgements."""
    anchor = r.Anchor(f"file:///store/anchors/v{number}", 4 * TENSORS) if number % 3 == 0 else None
    shards = [r.ShardPosition(0, "weights.deltas", 0, [number], 300, "d")] if number else []
    manifest = build(
        r.Manifest,
        version=number,
        learning_rate=0.001 / max(1, number),
        n_elements=TENSORS,
        n_changed=100 + number if number else 0,
        delta_bytes=80 + number if number else 0,
        shards=shards,
        tensors=[r.TensorInfo("w", "bfloat16", [10, 100], f"f{number}")],
        fingerprint=f"f{number}",
        anchor=anchor,
        trained_at=at,
        published_at=at + SECOND // 10,
    )
    records: list[r.Record] = [manifest]
    if shards:
        records.append(build(r.DeltaChunk, version=number, total=1, digest="d", payload=b"x" * (80 + number)))
    if number and number % 3 == 0:
        records.append(build(r.SkipDelta, version=number, base=number - 3, n_changed=200, n_bytes=150))
    for place, replica in enumerate(REPLICAS):
        refused = number == 4 and place == 1
        records.append(
            build(
                r.WeightAck,
                replica_id=replica,
                version=number,
                serving_version=number - refused,
                status=r.AckStatus.REFUSED if refused else r.AckStatus.PROVED,
                reason="digest of shard 0" if refused else "",
                fingerprint="" if refused else f"f{number}",
                expected_fingerprint=f"f{number}",
                pid=100 + place,
                incarnation=f"life-{place}",
                pause_ms=4.0 + number,
                apply_ms=2.0,
                step_to_served_ms=900.0 + place,
                at=at + SECOND * (1 + place),
            )
        )
        serving = number - refused
        records.append(
            build(
                r.Staleness,
                replica_id=replica,
                stage="serve",
                step=number,
                version=serving,
                lag=[r.LagCount(number - serving, 3)],
                at=at + SECOND * (1 + place),
            )
        )
    return records


def users(loop: SimulatedLoop) -> list[r.Record]:
    """Return interactions, feedback, their outcomes, a batch, the step that trained on it, and the gate's decisions."""
    served = [
        replace(
            product.interaction(f"i{n}", f"user{n}", arm="canary" if n > 3 else "stable", version=STEPS),
            segments=[
                segment(
                    [
                        (f"<|im_start|>user\nhow do I add {n} and 1?<|im_end|>\n<|im_start|>assistant\n", False, 0),
                        (HOSTILE if n == 3 else f"{n + 1}, have a nice day<|im_end|>", True, STEPS),
                    ]
                )
            ],
            served_at=START_US + (70 + n) * SECOND,
        )
        for n in range(7)
    ]
    thumbs = {0: 1.0, 1: -1.0, 4: 1.0, 6: 1.0}
    events = [product.feedback(f"t{n}", f"i{n}", f"user{n}", value) for n, value in thumbs.items()]
    ends = {
        n: product.outcome(
            served[n],
            value,
            signals=[replace(product.use(f"t{n}", value), offset=place)],
            place=(0, n),
        )
        for place, (n, value) in enumerate(thumbs.items())
    }
    excluded = [product.outcome(served[n], None, why, place=(0, n)) for n, why in ((2, "no_signal"), (3, "bot"))]
    batch = product.online_batch(0, [product.member(ends[n], (0, n)) for n in thumbs], version=STEPS)
    inputs = [r.StepInput(batch.batch_id, Topic.ONLINE_BATCHES.value, 0, 0)]
    left_out = [r.StepExclusion("i1", Topic.INTERACTIONS.value, 0, 1, "stale", 1)]
    numbers = {"share": 0.1, "success": 0.8, "e_value": 30.0}
    verdicts = ((r.GateVerdict.CANARY, "on trial"), (r.GateVerdict.ADMIT, "floor"), (r.GateVerdict.PROMOTE, "better"))
    at = START_US + 100 * SECOND
    return [
        *served,
        *events,
        *ends.values(),
        *excluded,
        batch,
        *loop.taken(ONLINE_STEP, inputs, left_out, at),
        *(
            replace(product.decision(verdict, ONLINE_STEP, why, numbers), at=at + (n + 4) * SECOND)
            for n, (verdict, why) in enumerate(verdicts)
        ),
        product.request("user5", r.UserWish.OPT_OUT, at),
    ]


def page_rows(loop: SimulatedLoop) -> list[Row]:
    """Return the rows of the whole run; `loop` can continue after it."""
    records: list[r.Record] = [
        build(r.Document, document_id="d0", source="synthetic", text="5 + 7 = 12"),
        *version_of(0, START_US),
        *(record for number in range(1, STEPS + 1) for record in loop.step(number)),
        build(r.Dispatch, task_id="g9", group_id="g9", worker_id="worker", indexes=[0, 1], resumed_turns=[0, 0]),
        build(r.Turn, rollout_id="g9-0", group_id="g9", task_id="g9", n_tokens=0, turn=0),
        build(r.Task, task_id="g9", mode=r.Mode.TRAIN, group_size=4, max_turns=4, issued_at=START_US + 60 * SECOND),
        build(r.Tick, source="stream", at=START_US),
        *users(loop),
    ]
    letter = DeadLetter(
        source_topic=f"{PREFIX}rollouts",
        source_partition=3,
        source_offset=17,
        source_timestamp_ms=START_US // 1000,
        reason=f"unreadable: {HOSTILE}",
        found_by="tidemill-stream",
        value=b"\x00\xff" + HOSTILE.encode(),
    )
    dead = Row(f"{PREFIX}rollouts.dlq", 0, 0, START_US // 1000, b"key", letter, 100)
    return [*rows_of(records), dead]
