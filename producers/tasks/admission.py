"""Admission control: bounds the training tasks that may be issued now, so that no work starts that would be too stale.

The formula is AReaL's capacity, (eta + v + 1) * B - (accepted + running), counted in groups:

    capacity = (eta + 1) * B - outstanding,    outstanding = issued - trained - excluded

`eta` is the allowed policy lag, `B` the number of groups of a step. Invariants:

- a group counts once, for any order and any number of copies of its records: the state is a set, rebuilt from the log;
- a trained group frees its capacity when the version that it made is *served*, not when it is trained: a group issued
  in between would start on tokens already one version older than the bound assumes;
- a group that cannot be trained frees its capacity as soon as that is certain: when it closes and is not
  `trainable`, or when the policy lag of its oldest token exceeds the bound. The trainer records exclusions only with
  its next step; if the feeder waited for that record, the trainer would wait forever for the groups of that step;
- problems that only the trainer sees (such as a rollout that the log no longer has) cannot block the run: if every
  outstanding group has closed and no step follows, spare capacity for one step is added until the next step;
- with eta = 0 this is the synchronous loop: the groups of a step are trained and served before the next are issued.
"""

from __future__ import annotations

from tidemill.producers.config import FeedSettings
from tidemill.producers.tasks.source import IndexSet, training_index
from tidemill.schemas import records as r
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.clock import to_us
from tidemill.schemas.config import RunSettings


def trainable(group: r.Group, run: RunSettings) -> bool:
    """Return whether the trainer can train on a closed group, judged by the group's record alone."""
    completed = (member for member in group.members if member.status is r.RolloutStatus.COMPLETED)
    rewards = [member.reward for member in completed if member.reward is not None]
    if len(rewards) < run.min_completed:
        return False
    return not run.skip_no_signal or max(rewards) > min(rewards)


class AdmissionController:
    """State machine over the records of one run and branch; the caller filters out other records."""

    def __init__(self, run: RunSettings, feed: FeedSettings) -> None:
        self._run, self._replicas, self._overdue_us = run, feed.replicas, to_us(feed.overdue_s)
        self._max_policy_lag = 0 if feed.sync else run.max_policy_lag
        self._open: dict[str, int] = {}
        self._ended = IndexSet()
        """Indices of the groups that use no capacity any more: repeated and late records of them change nothing."""
        self._ended_others: set[str] = set()
        """The same groups by id, if their tasks are not the feeder's."""
        self._unserved: dict[int, set[str]] = {}
        self._steps = IndexSet()
        self._closed: dict[str, int] = {}
        """Closed groups that use capacity, with the version of the oldest token of their completed members; -1 if none
        completed."""
        self._trainer_version = 0
        self._moved_at = 0
        self._spare = 0
        self._silence_us = to_us(feed.replica_silence_s)
        self._serving: dict[str, int] = {}
        """The newest proved version of each replica that is not silent."""
        self._reached: dict[str, int] = {}
        """When each replica began to serve its version."""
        self.ready = False
        """Whether enough replicas have served a proved version; never reset."""
        self.newest_version = -1
        """The newest version known from steps and manifests; -1 if there is none."""

    def observe(self, record: r.Record) -> None:
        """Process one record of `tasks`, `groups`, `train.steps`, `weights.manifests` or `weights.acks`.

        Records of other types change nothing.
        """
        match record:
            case r.Task(mode=r.Mode.TRAIN):
                if not self._has_ended(record.group_id):
                    self._open[record.group_id] = record.deadline_at
            case r.Group(mode=r.Mode.TRAIN):
                if record.closed_by is not r.CloseReason.LATE and not self._has_ended(record.group_id):
                    completed = [m.version_min for m in record.members if m.status is r.RolloutStatus.COMPLETED]
                    self._closed[record.group_id] = min(completed, default=-1)
                    self._moved_at = max(self._moved_at, record.closed_at)
                    if not trainable(record, self._run):
                        self._end(record.group_id)
                    self._end_stale()
            case r.TrainStep():
                self._steps.add(record.step)
                self._moved_at = max(self._moved_at, record.finished_at)
                self._spare = 0
                self.newest_version = max(self.newest_version, record.version)
                for exclusion in record.exclusions:
                    if exclusion.topic == Topic.GROUPS and exclusion.reason not in (
                        *r.SECOND_RECORDS,
                        r.Exclusion.EVAL,
                    ):
                        self._end(exclusion.group_id)
                self._unserved[record.version] = {
                    entry.group_id for entry in record.inputs if entry.topic == Topic.GROUPS
                }
                self._trainer_version = max(self._trainer_version, record.version)
                self._end_stale()
                self._release()
            case r.Manifest():
                self.newest_version = max(self.newest_version, record.version)
            case r.WeightAck(replica_id=replica, serving_version=version):
                # Of a replica's acks the newest counts; before its first proof it serves no version.
                if record.at >= self._reached.get(replica, 0) and version >= 0:
                    if version != self._serving.get(replica):
                        self._reached[replica] = record.at
                    self._serving[replica] = version
                self.ready = self.ready or len(self._serving) >= self._replicas
                self._release()

    def expire(self, now_us: int) -> tuple[list[str], list[str]]:
        """Stop waiting for overdue groups and silent replicas, and return both.

        A group is overdue if it has not closed within `overdue_s` after its deadline. A replica is silent if it is
        behind `replica_silence_s` after another one served the newest version; it counts again with its next ack.
        """
        limit = now_us - self._overdue_us
        overdue = [g for g, due in self._open.items() if due < limit and g not in self._closed]
        for group in overdue:
            self._end(group)
        newest = max(self._serving.values(), default=-1)
        leaders = [name for name, version in self._serving.items() if version == newest]
        since = min((self._reached[name] for name in leaders), default=now_us)
        late = now_us - since > self._silence_us
        silent = [name for name, version in self._serving.items() if late and version < newest]
        for name in silent:
            del self._serving[name]
        self._release()
        starved = self.untrained > 0 and self.unclosed == 0 and not self.finished
        if starved and self.capacity() == 0 and self._moved_at < limit:
            self._spare = self._run.groups_per_step
        return overdue, silent

    def capacity(self) -> int:
        """Return the number of training tasks that may be issued now."""
        step = self._run.groups_per_step
        free = (self._max_policy_lag + 1) * step + self._spare - len(self._open)
        needed = (self._run.max_steps - self.steps) * step + self._spare - self.untrained
        return max(0, min(free, needed)) if self.ready else 0

    @property
    def untrained(self) -> int:
        """The number of groups that use capacity and are not trained yet."""
        return len(self._open.keys() - self._trained())

    @property
    def unclosed(self) -> int:
        """The number of groups that use capacity and are neither closed nor trained in the records seen."""
        return len(self._open.keys() - self._closed.keys() - self._trained())

    @property
    def steps(self) -> int:
        """The number of recorded optimizer steps."""
        return len(self._steps)

    @property
    def finished(self) -> bool:
        """Whether every step of the run is recorded."""
        return self.steps >= self._run.max_steps

    @property
    def served_version(self) -> int:
        """The oldest version that a live replica serves; -1 if none does."""
        return min(self._serving.values(), default=-1)

    def _trained(self) -> set[str]:
        return set().union(*self._unserved.values())

    def _end_stale(self) -> None:
        limit = self._trainer_version - self._run.max_policy_lag
        trained = self._trained()
        for group in [g for g, oldest in self._closed.items() if oldest < limit and g not in trained]:
            self._end(group)

    def _release(self) -> None:
        served = self.served_version
        for version in [v for v in self._unserved if v <= served]:
            for group in self._unserved.pop(version):
                self._end(group)

    def _end(self, group: str) -> None:
        self._open.pop(group, None)
        self._closed.pop(group, None)
        index = training_index(group, self._run.run_id)
        if index is None:
            self._ended_others.add(group)
        else:
            self._ended.add(index)

    def _has_ended(self, group: str) -> bool:
        index = training_index(group, self._run.run_id)
        return group in self._ended_others if index is None else index in self._ended
