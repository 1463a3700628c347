"""Runs a storm of faults on the simulated loop, or on learning from users, then audits the log.

Prints one JSON line for each figure.

    python -m tests.chaos.run --seed 7 --kills 100 --steps 40
    python -m tests.chaos.run --seed 3 --kills 20 --pauses 7 --partitions 7 --disks 2 --json storm-3.json
    python -m tests.chaos.run --act two --model MODEL --seed 7 --kills 100 --pauses 7 --disks 2
    python -m tests.chaos.run --brokers 3 --kills 20 --broker-kills 3
    python -m tests.chaos.run --ranks 2 --rank-kills 50 --kills 50 --roles train replica-0
    python -m tests.chaos.run --plan data/chaos/.../storm.json
    python -m tests.chaos.run brokers --brokers 3

The first word may be `storm` (the default) or `brokers`: each broker of a stack is killed and restarted in turn, then
paused in turn, under acknowledged load. Each process of a role is started from the current source tree: do not change
it while a storm lasts, or run a copy. Progress is written to standard error. The exit status is 1 if anything was lost,
done twice or is not equal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

from tests.chaos.campaign import Order, endure, figures
from tests.chaos.rolling import OFFENCES, roll
from tests.chaos.storm import FaultKind
from tidemill.compose.config import Act


def main() -> int:
    """Entry point."""
    options = _parser().parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    options.directory.mkdir(parents=True, exist_ok=True)
    if options.what == "brokers":
        found = roll(options.directory, options.brokers, say)
        clean = not any(found[-1][name] for name in OFFENCES)
    else:
        verdict = endure(_order(options), say)
        found, clean = figures(verdict), verdict.clean
    for figure in found:
        print(json.dumps(figure), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0 if clean else 1


def _order(options: argparse.Namespace) -> Order:
    counts = {kind: getattr(options, kind.value) for kind in FaultKind}
    return Order(counts=counts, **{each.name: getattr(options, each.name) for each in fields(Order)
                                   if each.name != "counts"})  # fmt: skip


def _minutes(text: str) -> float:
    """Parse minutes, and return seconds."""
    return 60 * float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("storm", "brokers"), default="storm")
    parser.add_argument("--seed", type=int, default=0, help="of the storm and of the run")
    for kind in FaultKind:
        parser.add_argument(f"--{kind.value}s", dest=kind.value, type=int, default=0, help=f"faults: {kind.value}")
    acts = [act for act in Act if act is not Act.BOTH]
    parser.add_argument("--act", type=Act, choices=acts, default=Act.ONE, help="two: learning from users")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of the run")
    parser.add_argument("--roles", nargs="+", default=[], help="whom faults fall on; default: every role")
    parser.add_argument("--brokers", type=int, choices=(1, 3), default=1)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer (torchrun) and of each replica's engine")
    parser.add_argument("--gap", dest="gap_s", type=float, default=6.0, help="longest delay of a fault, in seconds")
    parser.add_argument("--minutes", dest="longest_s", type=_minutes, default=math.inf,
                        help="no fault comes after so long")  # fmt: skip
    parser.add_argument("--stall-minutes", dest="stall_s", type=_minutes, default="7",
                        help="a run without a step or a fault is wedged")  # fmt: skip
    parser.add_argument("--model", type=Path, help="start from this checkpoint instead of mid-training one")
    parser.add_argument("--plan", type=Path, help="a storm.json of an earlier run, to repeat it")
    parser.add_argument("--in-order", action="store_true", help="deterministic mode, compared with a calm run")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="of the run's settings")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--data-dir", dest="directory", type=Path,
                        default=Path(tempfile.gettempdir()) / "tidemill-chaos")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
