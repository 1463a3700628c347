"""Runs a storm on a run, until the run ends.

One loop on one thread: it reads the log, restarts the roles that ended, ends the faults whose time is over, and
injects the next fault when its step is in the log and its delay is over. It waits for nothing else, and fails if the
run takes no step for too long.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from tests.chaos.keeper import Ended, Keeper
from tests.chaos.sink_tables import SinkTables
from tests.chaos.site import Site
from tests.chaos.storm import Fault, FaultKind, Storm
from tests.chaos.tally import SINK, USERS, Tally
from tidemill.compose.config import Act
from tidemill.compose.demo.acts import promote_first
from tidemill.compose.demo.plan import STABLE
from tidemill.compose.processes import Supervisor
from tidemill.consumers.sink.config import SinkSettings
from tidemill.schemas.catalogue import Topic
from tidemill.schemas.log.reader import LogReader

READ = (
    Topic.TASKS,
    Topic.ROLLOUTS,
    Topic.PROGRESS,
    Topic.GROUPS,
    Topic.STEPS,
    Topic.MANIFESTS,
    Topic.ACKS,
    Topic.INTERACTIONS,
    Topic.FEEDBACK,
    Topic.OUTCOMES,
    Topic.ONLINE_BATCHES,
    Topic.GATE,
)
POLL_S = 0.1
ITSELF = "itself"
"""The kind of recovery for a role that ended by itself."""
DISK_HIT_S = 240.0
"""A full disk is freed after this time if its role has not failed because of it."""
SINK_ASKED_EVERY_S = 1.0
OPERATOR = "chaos"


class Wedged(RuntimeError):
    """Raised when the run takes no more steps; the message names what each role did last."""


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was injected, and its observed effect."""

    fault: Fault
    at_s: float
    """When it was injected, in seconds since the epoch."""
    step: int
    """Steps in the log at that time."""
    hit: bool
    """Whether the process ran; for a full disk, whether the role also failed to write."""
    at_work: bool
    """Whether the process had written anything since its start; False for brokers and the sink."""


@dataclass(slots=True)
class Endured:
    """The observations of a run under a storm, up to its end."""

    struck: list[Struck] = field(default_factory=list)
    left_out: int = 0
    """Faults of the storm that were not injected, because its time was over."""
    ended: list[Ended] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    train_starts_s: list[float] = field(default_factory=list)
    """Start times of the trainer's processes."""
    running: frozenset[str] = frozenset()
    """Roles that ran after the last step and the last fault; some of them may have had nothing left to write."""
    seconds: float = 0.0
    """Time until the last step was taken and the last fault was over."""

    def by_itself(self) -> list[Ended]:
        """Return the processes that ended without being killed and before their work was done."""
        return [ended for ended in self.ended if ended.by_itself and ended.status != 0]


class Execution:
    """One storm on one site.

    Args:
        longest_s: no fault is injected later; the run still continues to its end.
        stall_s: a run without a step and without a fault for this many seconds is wedged.
    """

    def __init__(
        self,
        site: Site,
        supervisor: Supervisor,
        reader: LogReader,
        storm: Storm,
        say: Callable[[str], None],
        *,
        longest_s: float,
        stall_s: float,
    ) -> None:
        self._site, self._reader, self._say = site, reader, say
        self._course = site.course
        self.keeper = Keeper(supervisor, site.specs, site.course.must_end, later=site.course.later)
        self._promoted = site.course.act is Act.ONE
        self._left = list(storm.faults)
        self._calm_at = time.monotonic() + longest_s
        self._stall_s = stall_s
        self._earliest = 0.0
        self._undo: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        self._cut: set[str] = set()
        self._full: dict[str, tuple[int, float]] = {}
        """Roles whose disk is full, with the index of the fault in `Endured.struck` and the time at which it ends."""
        self.tables = SinkTables(SinkSettings(path=str(site.plan.sink_directory)))
        self._sink_asked = 0.0
        self._moved = time.monotonic()
        self.result = Endured(tally=Tally(renamed=site.course.renamed))

    def run(self) -> Endured:
        """Run until the storm is over and the run has ended. Raises Wedged, CrashLoop, StackError."""
        began = time.monotonic()
        while not self._over():
            self._listen()
            self.mend()
            self._take_back(time.monotonic())
            self._strike(time.monotonic())
            self._site.brokers.check()
            self._look_for_progress()
        self._site.brokers.settle()
        self.mend()
        self.result.running = frozenset(name for name in self._course.roles if self.keeper.pid(name) is not None)
        self.result.train_starts_s = self.keeper.starts_s[self._course.trainer]
        self.result.seconds = time.monotonic() - began
        if self._course.act is Act.TWO:
            self._let_users_go()
        return self.result

    def _over(self) -> bool:
        waiting = self._left or self._undo or self._full
        return not waiting and self._course.must_end <= self.keeper.done

    def _let_users_go(self) -> None:
        """Stop the users and the feeder, and wait until all started work has ended. Raises Wedged."""
        for name in (USERS, self._course.feeder):
            self.keeper.retire(name)
        since = time.monotonic()
        while still_open := self._still_open():
            self._listen()
            self.mend()
            if time.monotonic() - since > self._stall_s:
                raise Wedged(
                    f"after {self._stall_s:.0f} s there are still {len(still_open)} groups and interactions without "
                    f"an end, {still_open[0]} for one; the roles' logs are in {self._site.plan.log_directory}"
                )

    def _still_open(self) -> list[str]:
        """Return the requested groups and the recorded interactions that have not ended."""
        tally = self.result.tally
        if not (tally.open_groups() or tally.product.unended()):
            # Records written since the last read may have opened something.
            for located in self._reader.read_to_end():
                tally.observe(located)
        return [*sorted(tally.open_groups()), *tally.product.unended()]

    def _listen(self) -> None:
        tally = self.result.tally
        before = tally.step
        for located in self._reader.poll(POLL_S):
            if (back := tally.observe(located)) is not None:
                self._back(*back)
        self._open_the_doors()
        self._ask_sink()
        if tally.step != before:
            self._moved = time.monotonic()
            self._say(f"step {tally.step}, {len(self.result.struck)} faults, {len(self._left)} to come")

    def _open_the_doors(self) -> None:
        """Promote the first version, and start the users when it is served."""
        tally = self.result.tally
        if not self._promoted and 0 in tally.versions:
            self._promoted = True
            promote_first(self._site.settings, 0, OPERATOR)
        if tally.written[STABLE]:
            for name in self._course.later:
                self.keeper.let_begin(name)

    def _back(self, name: str, seconds: float) -> None:
        self._say(f"  {name} is back after {seconds:.1f} s")

    def _ask_sink(self) -> None:
        """Read the sink's progress from its tables: the log does not contain it."""
        waits = SINK in self.result.tally.recoveries.under_way()
        if not waits or time.monotonic() < self._sink_asked + SINK_ASKED_EVERY_S:
            return
        self._sink_asked = time.monotonic()
        took = self.result.tally.recoveries.progress(SINK, self.tables.written_at(self.keeper.pid(SINK)))
        if took is not None:
            self._back(SINK, took)

    def mend(self) -> None:
        """Restart the roles that ended."""
        for ended in self.keeper.mend(excused=self._cut):
            self.result.ended.append(replace(ended, during=self._under(ended.name)))
            if ended.name in self.keeper.done:
                self._moved = time.monotonic()
                self._say(f"  {ended.name} is done")
            elif ended.by_itself:
                self._say(f"  {ended.name} ended by itself with status {ended.status}: {ended.last_words}")
                self._fallen(ended.name, ITSELF)
            if ended.name in self._full and ended.by_itself:
                place, _ = self._full.pop(ended.name)
                self.keeper.set_disk(ended.name, full=False)
                self.result.struck[place] = replace(self.result.struck[place], hit=True)
                self._fallen(ended.name, FaultKind.DISK)

    def _under(self, name: str) -> str:
        """Return the kind of fault that lasts for a role now; empty for none."""
        if name in self._full:
            return FaultKind.DISK
        return FaultKind.PARTITION if name in self._cut else ""

    def _take_back(self, now: float) -> None:
        while self._undo and self._undo[0][0] <= now:
            heapq.heappop(self._undo)[2]()
        for name in [name for name, (_, until) in self._full.items() if until <= now]:
            del self._full[name]
            self.keeper.set_disk(name, full=False)

    def _strike(self, now: float) -> None:
        if self._left and now > self._calm_at:
            self._say(f"the storm has lasted long enough: {len(self._left)} faults are left out")
            self.result.left_out, self._left = len(self._left), []
        if not self._left or self.result.tally.step < self._left[0].after_step:
            return
        fault = self._left[0]
        if not self._earliest:
            self._earliest = now + fault.delay_s
        if now < self._earliest:
            return
        waits = fault.kind is FaultKind.RANK_KILL and fault.target not in self.keeper.done
        if waits and len(self.keeper.ranks(fault.target)) < 2:
            # A restart takes a role far longer than the time between faults.
            return
        self._left.pop(0)
        self._earliest, self._moved = 0.0, now
        at_s, step = time.time(), self.result.tally.step
        self._say(f"  {fault.kind} {fault.target}" + (f" for {fault.lasts_s:.1f} s" if fault.lasts_s else ""))
        at_work = self.result.tally.last_s.get(fault.target, 0.0) > self.keeper.began_s(fault.target)
        self.result.struck.append(Struck(fault, at_s, step, hit=self._apply(fault, now), at_work=at_work))

    def _apply(self, fault: Fault, now: float) -> bool:
        target = fault.target
        match fault.kind:
            case FaultKind.KILL:
                self._fallen(target, FaultKind.KILL)
                return self.keeper.kill(target)
            case FaultKind.RANK_KILL:
                self._fallen(target, FaultKind.RANK_KILL)
                return self.keeper.kill_rank(target, fault.number)
            case FaultKind.PAUSE:
                self._later(now + fault.lasts_s, lambda: self._resume(target))
                return self.keeper.pause(target)
            case FaultKind.PARTITION:
                self._site.links.cut(target)
                self._cut.add(target)
                self._later(now + fault.lasts_s, lambda: self._heal(target))
                return self.keeper.pid(target) is not None
            case FaultKind.DISK:
                self.keeper.set_disk(target, full=True)
                self._full[target] = len(self.result.struck), now + DISK_HIT_S
                return False
            case FaultKind.BROKER_KILL:
                node = int(target.removeprefix("broker-"))
                self._later(now + fault.lasts_s, self._site.brokers.bring_back)
                self._site.brokers.kill(node)
                return True
            case FaultKind.BROKER_PAUSE:
                node = int(target.removeprefix("broker-"))
                self._later(now + fault.lasts_s, lambda: self._site.brokers.go_on(node))
                self._site.brokers.pause(node)
                return True

    def _fallen(self, name: str, kind: str) -> None:
        """Measure how long a role takes to recover, if it had written anything: otherwise it may only have no work."""
        if name == SINK or self.result.tally.written[name]:
            self.result.tally.recoveries.begin(name, kind, time.time())

    def _resume(self, target: str) -> None:
        self.keeper.go_on(target)
        self._fallen(target, FaultKind.PAUSE)

    def _heal(self, target: str) -> None:
        self._site.links.heal(target)
        self._cut.discard(target)
        self._fallen(target, FaultKind.PARTITION)

    def _later(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._undo, (at, next(self._ids), what))

    def _look_for_progress(self) -> None:
        silent = time.monotonic() - self._moved
        if silent < self._stall_s:
            return
        now, tally = time.time(), self.result.tally
        last = ", ".join(f"{name} {now - at:.0f} s ago" for name, at in sorted(tally.last_s.items()))
        raise Wedged(
            f"nothing came after step {tally.step} for {silent:.0f} s; last written by: {last}; not back: "
            f"{sorted(tally.recoveries.under_way())}; the roles' logs are in {self._site.plan.log_directory}"
        )
