"""Records for tests: a test gives the fields that it needs, and every other field has a neutral value.

    build(Manifest, version=3, parent=2)
    member_of(rollout, partition=1, offset=7)

A field that is not given has its own default; otherwise the value that follows from the given fields (`RELATED`: the
parent of version 3 is 2); otherwise the value of `BY_NAME`; otherwise the neutral value of its type: "", 0, 0.0, False,
b"", an empty list or dictionary, None if None is allowed, the first member of an enumeration.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.records import Group, GroupMember, Manifest, Rollout, Task, TensorInfo, TrainStep, WeightAck

if TYPE_CHECKING:
    from tidemill.kernels.weights.bits import WeightLike

R = TypeVar("R")

BY_NAME = {
    "arm": "stable",
    "branch": "main",
    "consent": True,
    "decided_by": "ada",
    "environment": "ledger",
    "finish_reason": "stop",
    "map_version": "m",
    "payload": "{}",
    "pid": 1,
    "propensity": 1.0,
    "region": "local",
    "replica_id": "r",
    "reward_version": "1",
    "run_id": "run",
    "user_id": "u",
    "worker_id": "w",
}

RELATED: dict[type, dict[str, Callable[[dict[str, Any]], Any]]] = {
    Group: {
        "task_id": lambda given: given["group_id"],
        "expected_size": lambda given: len(given["members"]),
    },
    Manifest: {
        "step": lambda given: given["version"],
        "parent": lambda given: given["version"] - 1 if given["version"] else None,
    },
    Rollout: {"task_id": lambda given: given["group_id"]},
    Task: {"group_id": lambda given: given["task_id"]},
    TrainStep: {
        "version": lambda given: given["step"],
        "parent_version": lambda given: given["step"] - 1,
    },
    WeightAck: {"serving_version": lambda given: given["version"]},
}
"""Fields whose values follow from given fields."""


def build(kind: type[R], /, **given: Any) -> R:
    """Return a record of a type from tidemill.schemas.records, with the given fields."""
    related = RELATED.get(kind, {})
    for name, hint in _needed(kind):
        if name not in given:
            given[name] = related[name](given) if name in related else neutral(name, hint)
    return kind(**given)


@functools.cache
def _needed(kind: type) -> list[tuple[str, Any]]:
    """Return the fields without a default, each with its type. Cached: resolving types is slower than one record."""
    hints = get_type_hints(kind)
    needed = [each for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    return [(each.name, hints[each.name]) for each in needed]


def neutral(name: str, hint: Any) -> Any:
    """Return the value of a field that a test does not give."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        assert type(None) in get_args(hint), f"give {name}: there is no neutral {hint}"
        return None
    if name in BY_NAME and isinstance(BY_NAME[name], kind):
        return BY_NAME[name]
    if issubclass(kind, Enum):
        return next(iter(kind))
    assert kind in (str, int, float, bool, bytes, list, dict), f"give {name}: there is no neutral {hint}"
    return kind()


def member_of(played: Rollout, partition: int = 0, offset: int = 0, **given: Any) -> GroupMember:
    """Return a rollout as a group member. Without a reward it has no advantage, otherwise the advantage 0."""
    same = ("rollout_id", "status", "reward", "success", "sampled_tokens", "version_min", "version_max")
    place = {"topic": Topic.ROLLOUTS.value, "partition": partition, "offset": offset}
    advantage = None if played.reward is None else 0.0
    of_rollout = {name: getattr(played, name) for name in same}
    return build(GroupMember, **{"advantage": advantage, **place, **of_rollout, **given})


def tensor_infos(weights: Mapping[str, WeightLike]) -> list[TensorInfo]:
    """Return name, type, shape and fingerprint of each weight, in order."""
    # Not imported with this module: torch takes seconds, and processes that only make records do not need it.
    from tidemill.kernels.fingerprint import TensorKey, fingerprint
    from tidemill.kernels.weights.bits import as_weight

    typed = {name: as_weight(name, value) for name, value in weights.items()}
    return [
        TensorInfo(name, dtype, list(bits.shape), fingerprint(bits, TensorKey.of(name)).hex())
        for name, (dtype, bits) in typed.items()
    ]
