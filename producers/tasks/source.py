"""Names of tasks, and the tasks for the names that the feeder chooses, drawn from the environments of the run.

A name has the purpose and the index of a task; it is the id of the task and of its group:

    <run>/train/<index>        <run>/eval-before/v<version>/<index>        (also eval-during, eval-after)

Invariants: names are unique, so that a restarted feeder knows from the log alone which tasks it has issued. A training
question is issued once in a run (`feed.epochs` times), also after restarts and changed options, and is never one of the
held-out questions; held-out task `i` is the same in every evaluation, so that evaluations are comparable, and an
evaluation of `size` tasks that issues it again uses the index `i + n * size`. Environments take turns by their weights,
in the same order at every start. A training question that a whole group solved is left out of some epochs
(`feed.solved_one_in`), and of more each time that this happens again.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from tidemill.producers.config import FeedSettings
from tidemill.producers.environments.base import Environment, Split, TaskDraft, TaskError, TaskQuery, split_of
from tidemill.producers.environments.find import options_json
from tidemill.schemas.clock import to_us
from tidemill.schemas.config import CLAIM_CHECK_BYTES, EnvironmentEntry, RunSettings
from tidemill.schemas.records import CloseReason, Group, Mode, Task


class Stage(StrEnum):
    TRAIN = "train"
    EVAL_BEFORE = "eval-before"
    EVAL_DURING = "eval-during"
    EVAL_AFTER = "eval-after"

    @property
    def mode(self) -> Mode:
        return Mode.TRAIN if self is Stage.TRAIN else Mode.EVAL


_EVALUATIONS = "|".join(stage for stage in Stage if stage.mode is Mode.EVAL)
_NUMBER = "[0-9]{1,18}"
_NAME = re.compile(rf"(?P<run>[^/]+)/(?:train|(?P<stage>{_EVALUATIONS})/v(?P<version>{_NUMBER}))/(?P<index>{_NUMBER})")


@dataclass(frozen=True, slots=True, order=True)
class TaskName:
    run_id: str
    stage: Stage
    version: int
    """The version that is evaluated; 0 for training."""
    index: int

    def __str__(self) -> str:
        """Return the id of the task and of its group."""
        middle = self.stage if self.stage is Stage.TRAIN else f"{self.stage}/v{self.version}"
        return f"{self.run_id}/{middle}/{self.index}"


def parse_task_name(text: str) -> TaskName | None:
    """Return the name in `text`, or None if it is not a task's name."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    stage = Stage(found["stage"] or Stage.TRAIN)
    return TaskName(found["run"], stage, int(found["version"] or 0), int(found["index"]))


def training_index(group_id: str, run_id: str) -> int | None:
    """Return the index of the training task with this id in a run; None if it is another name."""
    name = parse_task_name(group_id)
    return name.index if name is not None and group_id == str(TaskName(run_id, Stage.TRAIN, 0, name.index)) else None


class IndexSet:
    """A set of numbers from 0 on, which grows with a run and needs memory only for its gaps."""

    def __init__(self) -> None:
        self._edges: list[int] = []
        """In order, the numbers at which the membership changes: the first member, the first one after it that is no
        member, and so on."""

    def add(self, index: int) -> None:
        if index in self:
            return
        for edge in (index, index + 1):
            at = bisect_left(self._edges, edge)
            if self._edges[at : at + 1] == [edge]:
                del self._edges[at]
            else:
                self._edges.insert(at, edge)

    def __contains__(self, index: int) -> bool:
        return bisect_right(self._edges, index) % 2 == 1

    def __len__(self) -> int:
        return sum(self._edges[1::2]) - sum(self._edges[::2])

    @property
    def first_missing(self) -> int:
        """The smallest number that is not in the set."""
        return self._edges[1] if 0 in self else 0


PATIENCE = 2_000
"""Consecutive drafts without a new question after which an environment counts as exhausted."""
MOST_LEFT_OUT = 15
"""Most consecutive epochs without a question: it is asked again, since the policy can forget how to solve it."""


class TaskSource:
    """Draws the tasks of one run. Raises TaskError at once if an environment has too few held-out questions."""

    def __init__(
        self, environments: Sequence[tuple[EnvironmentEntry, Environment]], run: RunSettings, feed: FeedSettings
    ) -> None:
        self._run, self._feed = run, feed
        self._questions = [Questions(entry, opened, run, feed) for entry, opened in environments]
        self._issued: dict[str, tuple[Questions, str]] = {}
        """Training groups by id: the environment's questions, and the payload of the issued question. Until it has
        closed."""
        self._closed: dict[str, bool] = {}
        """By id of a closed training group: whether all its rollouts succeeded. Until its task was observed."""
        self._counted = IndexSet()
        """Indices of the tasks that were observed with their groups: repeated records of them change nothing."""
        self._turns = take_turns([entry.weight for entry, _ in environments])
        self._order: list[int] = []
        """Index of the environment for each training index so far."""
        evaluated = [each for each in zip(environments, self._questions, strict=True) if each[0][0].evaluate]
        turns = take_turns([entry.weight for (entry, _), _ in evaluated])
        size = max(
            feed.eval_tasks if feed.eval_before or feed.eval_after else 0,
            feed.eval_during_tasks if feed.eval_every else 0,
        )
        chosen = [evaluated[turn][1] for turn in islice(turns, size)]
        self._held_out = [(questions, questions.held_out()) for questions in chosen]

    def observe(self, record: Task | Group) -> None:
        """Process a training task that a feeder issued, or its group, in any order; each counts once."""
        if record.run_id != self._run.run_id or record.mode is not Mode.TRAIN:
            return
        name = record.group_id
        index = training_index(name, self._run.run_id)
        if index is not None and index in self._counted:
            return
        if isinstance(record, Group):
            # A late rollout is the only member of its record.
            if name in self._closed or record.closed_by is CloseReason.LATE:
                return
            whole = len(record.members) == record.expected_size
            self._closed[name] = whole and all(member.success for member in record.members)
        else:
            found = next((each for each in self._questions if each.title == record.environment), None)
            if name in self._issued or found is None or parse_task_name(record.task_id) is None:
                return
            found.issued[record.payload] += 1
            self._issued[name] = (found, record.payload)
        if name in self._issued and name in self._closed:
            questions, payload = self._issued[name]
            questions.close_group(payload, self._closed[name])
            if index is not None:
                del self._issued[name], self._closed[name]
                self._counted.add(index)

    def task(self, name: TaskName, issued_at: int, issued_version: int) -> Task:
        """Return the task to issue as `name`.

        Raises TaskError if its environment has no unused question, or one that does not fit into a record.
        """
        feed, training = self._feed, name.stage.mode is Mode.TRAIN
        index = name.index if training else name.index % evaluation_size(feed, name.stage)
        if training:
            while len(self._order) <= index:
                self._order.append(next(self._turns))
            questions = self._questions[self._order[index]]
            draft = questions.unused()
            self._issued[str(name)] = (questions, draft.payload)
        else:
            questions, draft = self._held_out[index]
        if (size := len(draft.payload.encode())) > CLAIM_CHECK_BYTES:
            raise TaskError(
                f"{questions.title}: the payload of a task has {size} bytes, and a record of the log has room for "
                f"{CLAIM_CHECK_BYTES}: keep the data elsewhere, and let the payload name the place"
            )
        deadline_s = feed.deadline_s if training else feed.eval_deadline_s
        seeded = hashlib.blake2b(f"{self._run.seed}:{name}".encode(), digest_size=8).digest()
        return Task(
            task_id=str(name),
            group_id=str(name),
            run_id=name.run_id,
            environment=questions.title,
            payload=draft.payload,
            mode=name.stage.mode,
            group_size=(questions.group_size or feed.group_size) if training else feed.eval_group_size,
            max_turns=draft.max_turns,
            seed=int.from_bytes(seeded, "little") >> 1,
            issued_at=issued_at,
            deadline_at=issued_at + to_us(deadline_s),
            issued_version=issued_version,
            options=questions.options,
        )

    def close(self) -> None:
        for questions in self._questions:
            questions.close()


class Questions:
    """The questions of one environment: held-out questions in order, and unused training questions."""

    def __init__(self, entry: EnvironmentEntry, opened: Environment, run: RunSettings, feed: FeedSettings) -> None:
        self.title, self.group_size, self.options = entry.title, entry.group_size, options_json(opened.options)
        self._environment, self._query, self._epochs = opened, TaskQuery(run.seed), feed.epochs
        self._solved_one_in = feed.solved_one_in
        self._held_out_one_in = run.held_out_one_in
        self._drafts = self._environment.tasks(self._query)
        self._waiting: dict[Split, deque[TaskDraft]] = {split: deque() for split in Split}
        self._held_out: set[str] = set()
        self._asked: Counter[str] = Counter()
        """Count of each training question: issued by this process, or drawn and found issued before."""
        self.issued: Counter[str] = Counter()
        """Payloads that were issued before and are not drawn yet, with their counts."""
        self._solved: Counter[str] = Counter()
        """By payload: number of consecutive groups that solved it."""
        self._left_out: Counter[str] = Counter()
        """Payloads of solved questions, with the number of further epochs that leave them out."""
        self._epoch = 1

    def close_group(self, payload: str, solved: bool) -> None:
        """Record that the group of a task with this payload closed; `solved`: all its rollouts succeeded."""
        self._solved[payload] = self._solved[payload] + 1 if solved else 0
        self._left_out[payload] = min(self._solved_one_in ** self._solved[payload] - 1, MOST_LEFT_OUT)

    def held_out(self) -> TaskDraft:
        """Return the next held-out question. Raises TaskError."""
        for _ in range(PATIENCE):
            draft = self._next(Split.EVAL)
            if draft is None:
                break
            if draft.asks not in self._held_out:
                self._held_out.add(draft.asks)
                return draft
        raise TaskError(
            f"{self.title} has {len(self._held_out)} held-out questions, and an evaluation needs more: lower "
            "feed.eval_tasks or feed.eval_during_tasks, or allow more by its options"
        )

    def unused(self) -> TaskDraft:
        """Return the next training question. Raises TaskError."""
        misses = 0
        while True:
            draft = self._next(Split.TRAIN)
            if draft is not None and self.issued[draft.payload]:
                self.issued[draft.payload] -= 1
                self._asked[draft.asks] += 1
                misses = 0
                continue
            if draft is not None and self._asked[draft.asks] < self._epoch:
                self._asked[draft.asks] += 1
                if not self._left_out[draft.payload]:
                    return draft
                self._left_out[draft.payload] -= 1
                misses = 0
                continue
            misses += 1
            if draft is None or misses == PATIENCE:
                misses = 0
                if not self._asked or (self._epochs and self._epoch >= self._epochs):
                    raise TaskError(
                        f"{self.title} has no unused training question left after {len(self._asked)}: allow more by "
                        "its options, or let each be asked again (feed.epochs)"
                    )
                self._epoch += 1
                self.close()
                self._drafts = self._environment.tasks(self._query)
                self._waiting = {split: deque() for split in Split}

    def close(self) -> None:
        if close := getattr(self._drafts, "close", None):
            close()

    def _next(self, split: Split) -> TaskDraft | None:
        """Return the next draft of a split; None if no draft is left, or `PATIENCE` drafts had none of this split."""
        waiting = self._waiting[split]
        for _ in range(PATIENCE):
            if waiting:
                return waiting.popleft()
            draft = next(self._drafts, None)
            if draft is None:
                return None
            side = split_of(draft.asks, self._held_out_one_in)
            if side is split or side is Split.TRAIN:  # held-out questions are all drawn before training questions
                self._waiting[side].append(draft)
        return None


def take_turns(weights: Sequence[float]) -> Iterator[int]:
    """Yield indices of `weights` without end, in proportion to the weights and as evenly as possible."""
    credit = [0.0] * len(weights)
    total = sum(weights)
    while True:
        credit = [have + weight / total for have, weight in zip(credit, weights, strict=True)]
        place = max(range(len(credit)), key=lambda each: (round(credit[each], 9), -each))
        credit[place] -= 1.0
        yield place


def evaluation_size(feed: FeedSettings, stage: Stage) -> int:
    """Return the number of held-out tasks of an evaluation."""
    return feed.eval_during_tasks if stage is Stage.EVAL_DURING else feed.eval_tasks
