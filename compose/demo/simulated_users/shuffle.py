"""The control: votes that say nothing about their answers, though they are as many, as late and as often up."""

from __future__ import annotations

from random import Random


class ThumbShuffle:
    """Exchanges each vote with one among the votes before it."""

    def __init__(self, seed: int, window: int) -> None:
        """`window` is even: the votes before the first ones are half up and half down."""
        self._rng = Random(f"shuffled thumbs {seed}")
        self._held = [1.0, -1.0] * (window // 2)

    def exchange(self, vote: float) -> float:
        """An earlier vote in place of this one, which is kept for a later one."""
        place = self._rng.randrange(len(self._held))
        earlier, self._held[place] = self._held[place], vote
        return earlier
