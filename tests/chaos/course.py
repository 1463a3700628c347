"""What a run under a storm is made of: the roles of an act of the demonstration, and how that act ends.

The roles, their arguments and their settings are the demonstration's own; only sizes are changed, so that a step is
quick. Act two has the feedback gateway beside, over which the simulated users send half of their signals.
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
from tests.second_act import QUICK_SECOND_ACT
from tidemill.compose.config import Act, TidemillSettings
from tidemill.compose.demo.plan import CANARY, CONFIG_NAME, ONLINE_CONFIG_NAME, STABLE, DemoPlan
from tidemill.compose.processes import TIDEMILL
from tidemill.compose.stack.process import pick_ports
from tidemill.producers.product.settings import key_hash

TRAIN_ONLINE, FEED_ONLINE = "train-online", "feed-online"
PROGRAM = (str(Path(observed_users.__file__)),)
NOTES_NAME = "users.jsonl"
EVERY_STEP = (
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
"""Steps take seconds, and checkpoints and anchors are written often enough to be hit."""
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
    "users.interactions_per_second=8",
    "users.concurrency=8",
    "gateway.user_rate=1000",
    "gateway.user_burst=1000",
)
"""A quick second act with slower users, whom the gateway's caps do not meet."""


@dataclass(frozen=True, slots=True)
class Course:
    """A run of one act."""

    act: Act
    roles: tuple[str, ...]
    trainer: str
    feeder: str
    must_end: frozenset[str]
    """Roles that end by themselves when their work is done: then the run is over."""
    keeps_files: frozenset[str]
    """Roles that a full disk can hit: they alone write to one."""
    on_ranks: frozenset[str]
    """Roles that may be of several ranks."""
    later: frozenset[str]
    """Roles that begin when a version is served to everyone."""
    config_name: str
    """The settings file by which the run is audited and its steps are made again."""

    @property
    def renamed(self) -> dict[str, str]:
        """The names of the trainer and the feeder, by the names that they have in the simulated loop."""
        return {TRAIN: self.trainer, FEED: self.feeder}


def course_of(settings: TidemillSettings) -> Course:
    """The course of the act that the settings name."""
    if settings.demo.act is Act.TWO:
        return Course(
            act=Act.TWO,
            roles=(TRAIN_ONLINE, STABLE, CANARY, JOIN, BATCHES, GATE, "rollout-online", FEED_ONLINE, STREAM, ROUTE,
                   GATEWAY, USERS, SINK),
            trainer=TRAIN_ONLINE,
            feeder=FEED_ONLINE,
            # The feeder benches what comes after the last step as well, and has no end of its own.
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
    """The settings of an act that are not the demonstration's."""
    return (*EVERY_STEP, *(FROM_USERS if act is Act.TWO else SIMULATED))


def steps_of(settings: TidemillSettings) -> int:
    """Optimizer steps of the run."""
    return settings.demo.online_batches if settings.demo.act is Act.TWO else settings.run.max_steps


def on_ranks(ranks: int) -> tuple[str, ...]:
    """The command line as a program of so many ranks, by torchrun."""
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return TIDEMILL if ranks == 1 else (*several, *TIDEMILL)


def specs_of(
    plan: DemoPlan, course: Course, environments: Mapping[str, Mapping[str, str]], ranks: int
) -> tuple[RoleSpec, ...]:
    """How each role is started; `environments` have what each finds in its environment beside its keys.

    Args:
        ranks: of the trainer.
    """
    plain = dict(plan.loop_roles()) | {SINK: plan.arguments("sink")}
    programs = {USERS: PROGRAM, course.trainer: on_ranks(ranks)}
    if course.act is Act.ONE:
        return tuple(
            RoleSpec(name, plain[name], environments[name], programs.get(name, TIDEMILL)) for name in course.roles
        )
    (port,), key = pick_ports(1, base_port=0), secrets.token_urlsafe()
    arguments = {**plain, **dict([*plan.online_roles(), plan.router_role(), plan.users_role()])}
    arguments[GATEWAY] = ["gateway", "--config", str(plan.directory / ONLINE_CONFIG_NAME), "--port", str(port)]
    product = {**plan.product_environment(), "TIDEMILL_GATEWAY__API_KEYS": json.dumps({GATEWAY: key_hash(key)})}
    noting = {
        observed_users.NOTES: str(plan.directory / NOTES_NAME),
        observed_users.ADDRESS: f"http://127.0.0.1:{port}",
        observed_users.KEY: key,
    }
    extra: dict[str, Mapping[str, str]] = {ROUTE: product, GATEWAY: product, USERS: {**product, **noting}}
    return tuple(
        RoleSpec(
            name,
            arguments[name],
            {**environments[name], **extra.get(name, {})},
            programs.get(name, TIDEMILL),
        )
        for name in course.roles
    )
