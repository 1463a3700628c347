"""Serving during updates: gaps that clients of the router see while versions are published, promoted and applied.

    python tests/bench/bench_serving.py [--bootstrap HOST:PORT]

One replica, one router, clients that stream answers. Quiet phases and phases with updates alternate in one run; in the
latter each version is published, promoted, applied and proved before the next one. A gap is the time between two
chunks of one answer as the client reads them. The trainer's encoding uses the same cores as the replica. Therefore a
third kind of phase publishes versions without promoting them: its cost compared with a quiet phase is the trainer's,
not the update's. One JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import uuid
from pathlib import Path

import numpy as np
from measuring import say, scratch_log

from tests.system.serving_load import Served, serving
from tidemill.schemas.config import KafkaSettings

PHASES = ("quiet", "published", "updated")


async def measure(kafka: KafkaSettings, root: Path, options: argparse.Namespace) -> None:
    """Run every phase and print the figures."""
    async with serving(kafka, root, options.clients) as served:
        for _ in range(options.rounds):
            for phase in PHASES:
                served.load.phase = phase
                for _ in range(options.updates // options.rounds):
                    await _one(served, phase)
                    await served.load.until(options.clients)
    failures, answers = len(served.load.failures), len(served.load.interactions)
    say("failed requests", value=failures, answers=answers, recorded=len(served.recorded()))
    p99 = {phase: float(np.percentile(served.load.gaps_ms[phase], 99)) for phase in PHASES}
    for phase in PHASES:
        gaps = served.load.gaps_ms[phase]
        say(f"gap between tokens, {phase}, p99 ms", value=p99[phase], p50=float(np.median(gaps)), gaps=len(gaps))
    for phase in PHASES[1:]:
        say(f"p99 gap, {phase} / quiet", value=p99[phase] / p99["quiet"], updates=options.updates)


async def _one(served: Served, phase: str) -> None:
    if phase == "updated":
        await served.update()
    elif phase == "published":
        await asyncio.to_thread(served.trainer.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default=os.environ.get("TIDEMILL_KAFKA__BOOTSTRAP"))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="how often the phases alternate")
    options = parser.parse_args()
    with scratch_log(options.bootstrap) as (address, root):
        kafka = KafkaSettings(bootstrap=address, topic_prefix=f"b{uuid.uuid4().hex[:8]}.")
        asyncio.run(measure(kafka, root, options))


if __name__ == "__main__":
    main()
