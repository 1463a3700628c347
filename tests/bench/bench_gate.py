"""The gate's operating figures: false alarms, power, the cost of evidence, and the two reward hacks.

    python tests/bench/bench_gate.py [--runs 2000] [--users 800] [--only aa|users|power|cost|hacks]

One JSON line per figure. Alarms are counted over simulated tests that are checked after every user. For comparison with
the gate's betting, the same data are tested with a two-sample t-test made for a single check and with a mixture SPRT
with an estimated variance; both are in common use.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from measuring import say

from tests.streams.gate.gate_support import (
    QUICK,
    Product,
    arrivals,
    exact_first_passage,
    most_observations,
    peeked_t_test,
)
from tests.streams.gate.hack_toy import MAPS, course
from tidemill.streams.gate.sequential import CANDIDATE, Capital, Side, TwoArms, difference

ALPHA = 0.05
MIXTURE_SCALE = 0.2
"""Standard deviation of the normal mixture over effects, for the mixture SPRT."""
Draw = Callable[[np.random.Generator, int], np.ndarray]


def bet(arms: Sequence[int], values: np.ndarray, share: float, side: Side) -> int | None:
    """Return the number of users until there is evidence; None if there never is. Rewards are in [-1, 1]."""
    capital = Capital(0.0, side)
    two = TwoArms(share, difference(2.0), (capital,))
    for number, (arm, value) in enumerate(zip(arms, values, strict=True)):
        two.observe(arm, str(number), float(value))
        if capital.log_evidence >= -math.log(ALPHA):
            return number + 1
    return None


def mixture_sprt(candidate: np.ndarray, baseline: np.ndarray) -> int | None:
    """Return the pairs until a two-sided mixture SPRT of their differences alarms, with a running variance estimate."""
    pairs = min(len(candidate), len(baseline))
    apart, n = candidate[:pairs] - baseline[:pairs], np.arange(1, pairs + 1)
    mean = np.cumsum(apart) / n
    spread = np.maximum(np.cumsum(apart**2) / n - mean**2, 1e-9)
    both = spread + n * MIXTURE_SCALE**2
    logs = 0.5 * np.log(spread / both) + n**2 * MIXTURE_SCALE**2 * mean**2 / (2 * spread * both)
    over = np.flatnonzero(logs[10:] >= -math.log(ALPHA))
    return int(over[0]) + 11 if len(over) else None


def thumbs(chance: float) -> Draw:
    return lambda random, n: np.where(random.random(n) < chance, 1.0, -1.0)


def rare(chance: float) -> Draw:
    """Draw no thumb in most cases, and a bad one with the given chance."""
    return lambda random, n: np.where(random.random(n) < chance, -1.0, 0.0)


def false_alarms(runs: int, users: int) -> None:
    for name, draw, share in (
        ("thumbs", thumbs(0.5), 0.5),
        ("thumbs", thumbs(0.8), 0.2),
        ("rare", rare(0.03), 0.5),
        ("rare", rare(0.03), 0.1),
    ):
        random = np.random.default_rng(20261121)
        counted = dict.fromkeys(("worse", "better", "t_test_peeked", "mixture_sprt"), 0)
        for _ in range(runs):
            arms = [arm for arm, _ in zip(arrivals(share, random), range(users), strict=False)]
            values = draw(random, users)
            counted["worse"] += bet(arms, values, share, Side.BELOW) is not None
            counted["better"] += bet(arms, values, share, Side.ABOVE) is not None
            one, other = (values[np.array(arms) == arm] for arm in (0, 1))
            counted["t_test_peeked"] += peeked_t_test(one, other)
            counted["mixture_sprt"] += mixture_sprt(one, other) is not None
        rates = {key: value / runs for key, value in counted.items()}
        say("a/a alarms", rewards=name, share=share, runs=runs, users=users, alpha=ALPHA, **rates)


def clustering(runs: int, people: int = 60, answers: int = 8) -> None:
    """Run A/A tests with users of different taste: by user, as the gate does, and answer by answer."""
    random, counted = np.random.default_rng(5), {"by_user": 0, "by_answer": 0}
    for _ in range(runs):
        taste = np.where(random.random(people) < 0.5, 0.8, 0.2)
        rewards = np.where(random.random((people, answers)) < taste[:, None], 1.0, -1.0)
        arms = [person % 2 for person in range(people)]
        counted["by_user"] += any(bet(arms, rewards.mean(1), 0.5, side) is not None for side in Side)
        flat = [arm for arm in arms for _ in range(answers)]
        counted["by_answer"] += any(bet(flat, rewards.reshape(-1), 0.5, side) is not None for side in Side)
    rates = {key: value / runs for key, value in counted.items()}
    say("a/a alarms, users differ", runs=runs, users=people, answers=answers, alpha_both_sides=2 * ALPHA, **rates)


def power(runs: int) -> None:
    """Compare thumbs up `high` with `low`, in blocks of one and one: measured, exact, and the formula's bound."""
    for high, low, users in ((0.6, 0.5, 1200), (0.7, 0.5, 400), (0.8, 0.5, 200), (0.9, 0.5, 120)):
        random, stops = np.random.default_rng(9), []
        for _ in range(runs):
            arms = [number % 2 for number in range(users)]
            chances = np.where(np.array(arms) == CANDIDATE, high, low)
            stop = bet(arms, np.where(random.random(users) < chances, 1.0, -1.0), 0.5, Side.ABOVE)
            stops += [] if stop is None else [stop / 2]
        up, down = high * (1 - low), (1 - high) * low
        passed, just = exact_first_passage(up, down, 0.0, users // 2, ALPHA)
        exact = float((just * np.arange(len(just))).sum() / passed[-1])
        bound = most_observations([(1.0, up), (-1.0, down), (0.0, 1 - up - down)], 0.0, ALPHA)
        error = math.sqrt(passed[-1] * (1 - passed[-1]) / runs)
        say(
            "power",
            thumbs_up=[high, low],
            blocks=users // 2,
            runs=runs,
            measured=len(stops) / runs,
            exact=round(float(passed[-1]), 4),
            standard_error=round(error, 4),
            mean_blocks_measured=round(float(np.mean(stops)), 1),
            mean_blocks_exact=round(exact, 1),
            mean_blocks_bound=round(bound, 1),
        )


def cost(outcomes: int = 20_000) -> None:
    """Measure microseconds of CPU per outcome in the whole machine, and for an update of one capital alone."""
    product = Product(QUICK.model_copy(update={"min_users": 10 * outcomes, "outcomes_per_user": 4}))
    product.start()
    began = time.process_time()
    for number in range(outcomes):
        arm, version = (("canary", 1), ("stable", 0))[number % 2]
        product.serve(arm, version, 1.0 if number % 3 else -1.0, f"u{number // 8}-{number % 2}")
    whole = (time.process_time() - began) / outcomes
    capital, began = Capital(0.0, Side.ABOVE), time.process_time()
    for number in range(outcomes):
        capital.bet(0.1 if number % 2 else -0.1)
    say("cost", outcomes=outcomes, us_an_outcome=1e6 * whole, us_a_bet=1e6 * (time.process_time() - began) / outcomes)


def hacks() -> None:
    for name, reward_map in MAPS.items():
        for point, alerts in course(reward_map):
            say("reward hack", accounting=name, step=point.step, hard=point.on_hard, alerts=[a.name for a in alerts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2_000, help="simulated tests a figure")
    parser.add_argument("--users", type=int, default=800, help="users of each A/A test")
    parser.add_argument("--only", choices=("aa", "users", "power", "cost", "hacks"))
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "aa": lambda: false_alarms(options.runs, options.users),
        "users": lambda: clustering(options.runs),
        "power": lambda: power(options.runs),
        "cost": cost,
        "hacks": hacks,
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


if __name__ == "__main__":
    main()
