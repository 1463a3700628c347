"""How the tokens of a rollout may be coloured: classes of the style sheet, and a legend in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

COLOURS = {
    "": "none",
    "mask": "loss mask",
    "version": "weight version",
    "logprob": "logprob",
    "mismatch": "difference to the trainer",
    "advantage": "advantage",
}
"""What tokens may be coloured by: the value in the address, and its words."""
BOUNDS = ((0.9, "0.9 or more"), (0.5, "0.5 to 0.9"), (0.1, "0.1 to 0.5"), (0.01, "0.01 to 0.1"), (0.0, "below 0.01"))
"""Least probability of each class, and its words."""
DIFFERENCES = ((2.0, "2 or more"), (1.0, "1 to 2"), (0.5, "0.5 to 1"), (0.0, "below 0.5"))
"""Least difference of logprobs of each class, in nats, and its words."""
HUES = 6
"""Colours of the style sheet for versions; the seventh version has the first one's colour again."""


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Tokens [start, end), counted through all segments, that one version sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Coloured:
    """The class and the title of each token, and the words for the classes that there are."""

    looks: list[str]
    titles: list[str]
    legend: list[tuple[str, str]]


def version_ranges(
    lengths: Sequence[int], segments: Sequence[int], versions: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> list[VersionRange]:
    """The version spans of all segments; `starts` and `ends` count within a segment."""
    before = list(accumulate(lengths, initial=0))
    return [
        VersionRange(version, before[segment] + start, before[segment] + end)
        for segment, version, start, end in zip(segments, versions, starts, ends, strict=True)
        if 0 <= segment < len(lengths)
    ]


def plain(mask: Sequence[int]) -> Coloured:
    """No colours."""
    return Coloured([""] * len(mask), [""] * len(mask), [])


def by_mask(mask: Sequence[int]) -> Coloured:
    """What the policy sampled, and is trained on."""
    looks = ["hue0" if sampled else "" for sampled in mask]
    return Coloured(looks, [""] * len(mask), [("hue0", "sampled, in the loss"), ("", "given, not in the loss")])


def by_version(mask: Sequence[int], first: int, ranges: Sequence[VersionRange]) -> Coloured:
    """The version that sampled each token; `first`: the place of the first of these tokens."""
    versions = sorted({each.version for each in ranges})
    looks = [""] * len(mask)
    for each in ranges:
        look = f"hue{versions.index(each.version) % HUES}"
        for place in range(max(each.start, first), min(each.end, first + len(mask))):
            looks[place - first] = look if mask[place - first] else ""
    legend = [(f"hue{n % HUES}", f"version {version}") for n, version in enumerate(versions)]
    return Coloured(looks, [""] * len(mask), legend)


def by_logprob(mask: Sequence[int], logprobs: Sequence[float | None]) -> Coloured:
    """How probable each sampled token was when it was sampled."""
    looks, titles = list[str](), list[str]()
    for sampled, logprob in zip(mask, logprobs, strict=True):
        known = sampled and logprob is not None
        looks.append(f"odds{_class(math.exp(min(0.0, logprob)))}" if known and logprob is not None else "")
        titles.append(f"logprob {logprob:.4f}" if known else "")
    return Coloured(looks, titles, [(f"odds{n}", f"probability {words}") for n, (_least, words) in enumerate(BOUNDS)])


def by_mismatch(n: int, first: int, lengths: Sequence[int], worst: Sequence[Sequence[float]]) -> Coloured:
    """How far the trainer's logprob is from the sampler's, where the log says it: on the worst tokens of each step.

    Args:
        n: number of the tokens.
        first: place of the first of them, counted through all segments.
        worst: segment, position in it, the sampler's logprob and the trainer's, a row a token.
    """
    looks, titles = [""] * n, [""] * n
    before = list(accumulate(lengths, initial=0))
    known = 0
    for segment, position, sampler, trainer in worst:
        known += 1
        place = before[int(segment)] + int(position) - first if 0 <= segment < len(lengths) else -1
        if 0 <= place < n:
            apart = abs(trainer - sampler)
            at = next(number for number, (least, _words) in enumerate(DIFFERENCES) if apart >= least or least == 0)
            looks[place] = f"odds{len(DIFFERENCES) - at}"
            titles[place] = f"sampler {sampler:.4f}, trainer {trainer:.4f}"
    legend = [(f"odds{len(DIFFERENCES) - at}", f"difference {words}") for at, (_, words) in enumerate(DIFFERENCES)]
    told = f"{known} of its tokens are among the worst of their step; the log has no others"
    return Coloured(looks, titles, [*legend, ("", told)])


def by_advantage(mask: Sequence[int], advantage: float | None) -> Coloured:
    """The advantage of the rollout within its group, on each token that it weights."""
    if advantage is None:
        return Coloured([""] * len(mask), [""] * len(mask), [("", "no advantage: failed, or in no group yet")])
    sign = "up" if advantage > 0 else "down" if advantage < 0 else ""
    words = {"up": "made more probable", "down": "made less probable", "": "left as they are"}[sign]
    legend = [(sign, f"advantage {advantage:+.4g}: sampled tokens are {words}")]
    return Coloured([sign if sampled else "" for sampled in mask], [""] * len(mask), legend)


def _class(probability: float) -> int:
    return next((n for n, (least, _words) in enumerate(BOUNDS) if probability >= least), len(BOUNDS) - 1)
