"""Who stands still although there is work. Pure: the caller says what moved, what waits, and what time it is.

A wait for something that has not come yet is never a stall: only what could move and does not is told.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

Place = tuple[str, int]
"""Full name of a topic, and a partition of it."""
LOOKS_PER_TIMEOUT = 4


class Stillness(Generic[K]):
    """Since when each of several things has not moved while it had reason to.

    Args:
        timeout: how long is too long, in the unit of every `now`.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: dict[K, tuple[object, float]] = {}

    def observe(self, key: K, position: object, waiting: bool, now: float) -> float | None:
        """One look at `key`: where it is, and whether something waits for it to move.

        Returns how long it has stood still when that is the time-out or more; then its time begins anew, so that it is
        told once a time-out.
        """
        last, since = self._seen.get(key, (position, now))
        if not waiting or last != position:
            since = now
        still = now - since
        told = still >= self._timeout
        self._seen[key] = (position, now if told else since)
        return still if told else None

    def forget(self) -> None:
        """Begin anew: nobody could move meanwhile."""
        self._seen.clear()


@dataclass(frozen=True, slots=True)
class Stall:
    """A partition with records that nobody reads."""

    place: Place
    position: int
    end: int
    seconds: float

    def __str__(self) -> str:
        topic, partition = self.place
        return (
            f"{topic}[{partition}] is stalled: {self.end - self.position} records wait at offset {self.position} and "
            f"none was read for {self.seconds:.0f} s (`kafka.stall_timeout_s` sets how long is too long)"
        )


class ReadingWatch:
    """The progress of one consumer's partitions. Times are seconds of any monotonic clock.

    Standing still counts only while the consumer is polled and the log answers.

    Args:
        timeout_s: how long is too long; 0 looks at nothing.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / LOOKS_PER_TIMEOUT
        self._still: Stillness[Place] = Stillness(timeout_s)
        self._polled_at_s = self._looked_at_s = self._answered_at_s = now_s
        self._told_silence = False

    def due(self, now_s: float) -> bool:
        """A poll; whether it is time to ask for the ends of the partitions."""
        if not self._timeout_s:
            return False
        if now_s - self._polled_at_s > self._interval_s:
            # Whoever polls was busy elsewhere: the partitions could not move.
            self._still.forget()
            self._answered_at_s = now_s
        self._polled_at_s = now_s
        if now_s - self._looked_at_s < self._interval_s:
            return False
        self._looked_at_s = now_s
        return True

    def rest(self) -> None:
        """Nothing is read on purpose."""
        self._still.forget()

    def observe(self, place: Place, position: int, end: int, now_s: float) -> Stall | None:
        """The log answered: a partition's next offset to read, and its end."""
        seconds = self._still.observe(place, position, end > position, now_s)
        return None if seconds is None else Stall(place, position, end, seconds)

    def answered(self, now_s: float) -> float | None:
        """The log answered for every partition; how long it had not, when that was told."""
        self._polled_at_s = now_s
        silent_s, told = now_s - self._answered_at_s, self._told_silence
        self._answered_at_s, self._told_silence = now_s, False
        return silent_s if told else None

    def unanswered(self, now_s: float) -> float | None:
        """The log did not answer; how long it has not, when that is the time-out or more and was not told yet."""
        self._still.forget()
        # The asking took its time.
        self._polled_at_s = now_s
        silent_s = now_s - self._answered_at_s
        if self._told_silence or silent_s < self._timeout_s:
            return None
        self._told_silence = True
        return silent_s
