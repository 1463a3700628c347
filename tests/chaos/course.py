"""The parts of a run under a storm: the roles of an act of the demonstration, and how that act ends.

The roles, their arguments and their settings are those of the demonstration; only sizes are changed, so that a step is
quick. Act two also runs the feedback gateway, over which the simulated users send half of their signals.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import observed_users
from tests.chaos.keeper import RoleSpec
from tests.chaos.tally import BATCHES, FEED, GATE, GATEWAY, JOIN, ROUTE, SINK, STREAM, TRAIN, USERS
from tests.quick_loop import CALM, QUICK_SECOND_ACT
from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.demo.plan import CANARY, CONFIG_NAME, ONLINE_CONFIG_NAME, STABLE, DemoPlan
from tidemill.compose.processes import TIDEMILL
from tidemill.compose.stack.process import pick_ports
from tidemill.producers.product.settings import key_hash

TRAIN_ONLINE, FEED_ONLINE = "train-online", "feed-online"
PROGRAM = (str(Path(observed_users.__file__)),)
NOTES_NAME = "users.jsonl"
EVERY_STEP = (
    *CALM,
    "sink.http_port=0",
    "run.skip_no_signal=false",
    "feed.deadline_s=90",
    "rollout.episode_timeout_s=60",
    "trainer.checkpoint_every=3",
    "trainer.publish.anchor_every=3",
    f"stream.instance={STREAM}",
    "corpus.documents=3000",
    "midtrain.steps=80",
)
"""Steps take seconds, and checkpoints and anchors are frequent, so that faults hit them."""
SIMULATED = (
    "run.groups_per_step=4",
    "run.max_policy_lag=4",
    "feed.group_size=8",
    "feed.eval_tasks=4",
    "feed.eval_group_size=2",
    "feed.eval_every=0",
)
FROM_USERS = (
    *QUICK_SECOND_ACT,
    "gate.max_seconds=30",
    "gate.promote_without_evidence=true",
    "feed.eval_group_size=4",
    "feed.group_size=8",
    "trainer.online.max_wait_seconds=10",
    "users.interactions_per_second=5",
    "users.concurrency=8",
    "gateway.user_rate=1000",
    "gateway.user_burst=1000",
)
"""A quick second act with slower users, who do not reach the rate limits of the gateway."""


@dataclass(frozen=True, slots=True)
class Course:
    """A run of one act."""

    act: Act
    roles: tuple[str, ...]
    trainer: str
    feeder: str
    must_end: frozenset[str]
    """Roles that end by themselves when their work is done. The run is over when they have ended."""
    keeps_files: frozenset[str]
    """Roles that a full disk can hit: only these write to a disk."""
    on_ranks: frozenset[str]
    """Roles that may have several ranks."""
    later: frozenset[str]
    """Roles that are started when the stable pool serves a version."""
    config_name: str
    """The settings file that the audit and the replay of the steps use."""

    @property
    def renamed(self) -> dict[str, str]:
        """The names of trainer and feeder in this act, by their names in the simulated loop."""
        return {TRAIN: self.trainer, FEED: self.feeder}


def course_of(settings: TidemillSettings) -> Course:
    """Return the course of the act that the settings name."""
    if settings.demo.act is Act.TWO:
        return Course(
            act=Act.TWO,
            roles=(TRAIN_ONLINE, STABLE, CANARY, JOIN, BATCHES, GATE, "rollout-online", FEED_ONLINE, STREAM, ROUTE,
                   GATEWAY, USERS, SINK),
            trainer=TRAIN_ONLINE,
            feeder=FEED_ONLINE,
            # The feeder also benches versions after the last step, and never ends by itself.
            must_end=frozenset({TRAIN_ONLINE}),
            keeps_files=frozenset({TRAIN_ONLINE, SINK}),
            on_ranks=frozenset({TRAIN_ONLINE, STABLE, CANARY}),
            later=frozenset({USERS}),
            config_name=ONLINE_CONFIG_NAME,
        )  # fmt: skip
    replicas = [f"replica-{n}" for n in range(settings.demo.replicas)]
    workers = [f"rollout-{n}" for n in range(settings.demo.workers)]
    return Course(
        act=Act.ONE,
        roles=(FEED, *workers, STREAM, TRAIN, *replicas, SINK),
        trainer=TRAIN,
        feeder=FEED,
        must_end=frozenset({TRAIN, FEED}),
        keeps_files=frozenset({TRAIN, SINK}),
        on_ranks=frozenset({TRAIN, *replicas}),
        later=frozenset(),
        config_name=CONFIG_NAME,
    )


def assignments_of(act: Act) -> tuple[str, ...]:
    """Return the settings of an act that differ from the demonstration's."""
    return (*EVERY_STEP, *(FROM_USERS if act is Act.TWO else SIMULATED))


def steps_of(settings: TidemillSettings) -> int:
    """Return the number of optimizer steps of the run."""
    return settings.demo.online_batches if settings.demo.act is Act.TWO else settings.run.max_steps


def on_ranks(ranks: int) -> tuple[str, ...]:
    """Return the program that runs the command line on `ranks` ranks, by torchrun if there are several."""
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return TIDEMILL if ranks == 1 else (*several, *TIDEMILL)


def specs_of(
    plan: DemoPlan, course: Course, environments: Mapping[str, Mapping[str, str]], ranks: int
) -> tuple[RoleSpec, ...]:
    """Return how each role is started; `environments` contains the variables of each role except its keys.

    Args:
        ranks: of the trainer.
    """
    arguments = dict(plan.loop_roles()) | {SINK: plan.arguments("sink")}
    programs = {USERS: PROGRAM, course.trainer: on_ranks(ranks)}
    extra: dict[str, Mapping[str, str]] = {}
    if course.act is Act.TWO:
        (port,), key = pick_ports(1, base_port=0), secrets.token_urlsafe()
        arguments |= dict([*plan.online_roles(), plan.router_role(), plan.users_role()])
        arguments[GATEWAY] = ["gateway", "--config", str(plan.directory / ONLINE_CONFIG_NAME), "--port", str(port)]
        product = {**plan.product_environment(), "TIDEMILL_GATEWAY__API_KEYS": json.dumps({GATEWAY: key_hash(key)})}
        noting = {
            observed_users.NOTES: str(plan.directory / NOTES_NAME),
            observed_users.ADDRESS: f"http://127.0.0.1:{port}",
            observed_users.KEY: key,
        }
        extra = {ROUTE: product, GATEWAY: product, USERS: {**product, **noting}}
    return tuple(
        RoleSpec(
            name,
            arguments[name],
            {**environments[name], **extra.get(name, {})},
            programs.get(name, TIDEMILL),
        )
        for name in course.roles
    )
