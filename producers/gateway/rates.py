"""Rate caps: a token bucket for each key, and no memory of who has been quiet long enough to be full again.

Pure: the time is given. Invariant: in any span of `t` seconds a key is granted at most `burst + rate * t`.
"""

from __future__ import annotations

from collections import OrderedDict


class TokenBuckets:
    """Buckets by key, all of one rate and burst.

    Args:
        rate: tokens that come back a second.
        burst: tokens of a full bucket.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: str, count: int, now_s: float) -> float:
        """Take tokens; 0 when they were there, otherwise nothing is taken and it is the seconds until they are.

        Args:
            count: at most `burst`.
            now_s: any clock that does not go back.

        Raises:
            ValueError: more tokens than a bucket ever holds.
        """
        if count > self._burst:
            raise ValueError(f"{count} tokens at once from buckets of {self._burst:g}")
        self._forget_full(now_s)
        tokens = self._tokens(key, now_s)
        if tokens < count:
            return (count - tokens) / self._rate
        self._buckets[key] = (tokens - count, now_s)
        self._buckets.move_to_end(key)
        return 0.0

    def _tokens(self, key: str, now_s: float) -> float:
        tokens, at = self._buckets.get(key, (self._burst, now_s))
        return min(self._burst, tokens + max(0.0, now_s - at) * self._rate)

    def _forget_full(self, now_s: float) -> None:
        while self._buckets:
            oldest = next(iter(self._buckets))
            if self._tokens(oldest, now_s) < self._burst:
                return
            del self._buckets[oldest]
