"""Serving through updates: what clients of the router see while versions are published, promoted and applied.

    python tests/bench/bench_serving.py [--bootstrap HOST:PORT]

One replica, one router, clients that stream answers. Quiet phases and phases with updates alternate in one run; in the
latter each version is published, promoted, applied and proved before the next one. A gap is the time between two
chunks of one answer as the client reads them. The trainer's encoding shares this machine's cores with the replica, so
that a third kind of phase publishes versions that are not promoted: what it costs beside a quiet phase is the
trainer's, not the update's. One JSON line a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import uuid
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.system.serving_load import Served, serving
from tidemill.compose.stack.config import StackSettings
from tidemill.compose.stack.kafka import LocalStack
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
    _say("failed requests", failures, answers=answers, recorded=len(served.recorded()))
    p99 = {phase: float(np.percentile(served.load.gaps_ms[phase], 99)) for phase in PHASES}
    for phase in PHASES:
        gaps = served.load.gaps_ms[phase]
        _say(f"gap between tokens, {phase}, p99 ms", p99[phase], p50=float(np.median(gaps)), gaps=len(gaps))
    for phase in PHASES[1:]:
        _say(f"p99 gap, {phase} / quiet", p99[phase] / p99["quiet"], updates=options.updates)


async def _one(served: Served, phase: str) -> None:
    if phase == "updated":
        await served.update()
    elif phase == "published":
        await asyncio.to_thread(served.trainer.step)


def _say(figure: str, value: float, **shape: float) -> None:
    rounded = {name: round(number, 2) for name, number in shape.items()}
    print(json.dumps({"figure": figure, "value": round(value, 3), **rounded}), flush=True)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default=os.environ.get("TIDEMILL_KAFKA__BOOTSTRAP"))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4, help="how often the phases alternate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as name, _log(options.bootstrap, Path(name)) as address:
        kafka = KafkaSettings(bootstrap=address, topic_prefix=f"b{uuid.uuid4().hex[:8]}.")
        asyncio.run(measure(kafka, Path(name), options))


def _log(bootstrap: str | None, root: Path) -> AbstractContextManager[str]:
    return nullcontext(bootstrap) if bootstrap else _OwnLog(root)


class _OwnLog(AbstractContextManager[str]):
    """A broker for the length of the run."""

    def __init__(self, root: Path) -> None:
        self._stack = LocalStack(StackSettings(data_dir=root / "stack", heap_mb=320))

    def __enter__(self) -> str:
        return self._stack.up(lambda _line: None).bootstrap

    def __exit__(self, *_error: object) -> None:
        self._stack.down(lambda _line: None)


if __name__ == "__main__":
    main()
