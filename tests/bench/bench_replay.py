"""Replay of a whole demonstration, twice: the same groups, byte for byte, and the same steps, bit for bit.

One demonstration of the simulated loop is run to its end (or a finished one is given), its Kafka is started again on
its data, and all figures come from `tidemill replay`, as an operator would run it. One JSON line per figure:

- `replay.groups`: group assembly over the log, compared with the recorded groups, and two replays with each other;
- `replay.steps`: every optimizer step taken again, twice, compared with the recorded fingerprints;
- `replay.changed_rule`: the same with one line of the assembly rule changed: the first group that differs;
- `replay.deadline`, `replay.staleness`: counterfactuals without a code change.

    python tests/bench/bench_replay.py --seed 0 --steps 6
    python tests/bench/bench_replay.py --demo DIRECTORY --last 12
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import demonstration, log_at

SMALL = (
    "midtrain.steps=80",
    "corpus.documents=3000",
    "feed.eval_tasks=8",
    "feed.eval_every=0",
    "run.groups_per_step=8",
    "run.skip_no_signal=false",
)
"""Settings of a fast demonstration: no figure here depends on how much is learnt."""

LEFT_S = 3.0
"""Time that a task has with the earlier deadline."""
CHANGED_LINE = "group_assembly._mean = lambda rewards, least: max((r for r in rewards if r is not None), default=None)"
"""The assembly rule with one line changed: a group's best reward instead of its mean."""
CHANGED_RULE = f"""
from tidemill.compose.cli import main
from tidemill.streams.assembly import group_assembly
{CHANGED_LINE}
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstration")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of the demonstration")
    parser.add_argument("--demo", type=Path, help="directory of a demonstration that has ended, in place of a new one")
    parser.add_argument("--last", type=int, help="replay steps up to this one; default: all")
    parser.add_argument("--data-dir", type=Path, help="where a new demonstration keeps its data")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemill-bench-") as scratch:
        directory = options.demo or played(options.data_dir or Path(scratch), options.seed, options.steps)
        settings = tomllib.loads((directory / "settings.toml").read_text("utf-8"))
        about = {"run_id": settings["run"]["run_id"], "seed": settings["run"]["seed"]}
        shift_s = LEFT_S - settings["feed"]["deadline_s"]
        with log_at(None, directory / "kafka") as bootstrap:
            replay = Replay(directory / "settings.toml", bootstrap)
            for line in figures(replay, options.last, shift_s):
                print(json.dumps({**line, **about}), flush=True)


def played(data_dir: Path, seed: int, steps: int) -> Path:
    """Run a demonstration and return its directory."""
    data_dir.mkdir(parents=True, exist_ok=True)
    assignments = [part for setting in SMALL for part in ("--set", setting)]
    options = ("--act", "one", "--seed", str(seed), "--steps", str(steps), *assignments)
    return Path(demonstration(data_dir, "demo", *options)["data_dir"])


class Replay:
    """`tidemill replay` on one log."""

    def __init__(self, config: Path, bootstrap: str) -> None:
        self._common = ["--config", str(config), "--bootstrap", bootstrap]

    def ask(self, *arguments: object, program: tuple[str, ...] = ("-m", "tidemill.compose.cli")) -> dict[str, Any]:
        """Return the JSON document of a command, with the seconds that it took."""
        begun = time.monotonic()
        command = [sys.executable, *program, "replay", *map(str, arguments), "--json", *self._common]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1) or not done.stdout:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return {**json.loads(done.stdout), "command_seconds": round(time.monotonic() - begun, 1)}

    def changed(self, *arguments: object) -> dict[str, Any]:
        """Return the document of the command with the changed line."""
        return self.ask(*arguments, program=("-c", CHANGED_RULE))


def figures(replay: Replay, last: int | None, shift_s: float) -> Iterator[dict[str, Any]]:
    """Yield every figure of a log."""
    prefixes = [f"bench-{uuid.uuid4().hex[:8]}." for _ in range(3)]
    first, second = (replay.ask("stage", "assembly", "--into", prefix) for prefix in prefixes[:2])
    same = replay.ask("diff", *prefixes[:2], "--topic", "groups")
    yield {
        "figure": "replay.groups",
        "rollouts": first["records"],
        "groups": first["there"],
        **{f"identical_{name}": f"{found['identical']} of {found['total']}" for name, found in named(first, second)},
        "identical_to_each_other": f"{same['identical']} of {same['total']}",
        "same_order": same["out_of_order"] is None,
        "repeated_in_the_log": first["repeated_there"],
        "seconds": first["command_seconds"],
    }
    staleness = replay.ask("staleness", "--max-policy-lag", 0)
    steps = last or len(staleness["steps"])
    once, twice = (replay.ask("steps", f"1..{steps}") for _ in range(2))
    made = [[step["replayed"] for step in found["steps"]] for found in (once, twice)]
    yield {
        "figure": "replay.steps",
        "steps": steps,
        **{f"identical_{name}": f"{found['identical']} of {found['total']}" for name, found in named(once, twice)},
        "identical_to_each_other": made[0] == made[1],
        "distinct_fingerprints": len(set(made[0])),
        "last_fingerprint": made[0][-1],
        "step_seconds": sorted(step["seconds"] for step in once["steps"])[len(once["steps"]) // 2],
        "seconds": once["command_seconds"],
    }
    changed = replay.changed("stage", "assembly", "--into", prefixes[2])
    between = replay.ask("diff", prefixes[0], prefixes[2], "--topic", "groups")
    yield {
        "figure": "replay.changed_rule",
        "line": CHANGED_LINE,
        **counts(changed),
        "first": first_of(changed),
        "first_between_replays": first_of(between),
    }
    earlier = replay.ask("stage", "assembly", "--deadline", shift_s)
    yield {"figure": "replay.deadline", "shift_s": shift_s, **counts(earlier), "first": first_of(earlier)}
    moved = [group for step in staleness["steps"] for group in step["moved"]]
    yield {
        "figure": "replay.staleness",
        "recorded_bound": staleness["steps"][0]["bound"],
        "bound": 0,
        "first_differing_step": staleness["first_differing_step"],
        "groups_excluded": sum(group["moved"] == "excluded" for group in moved),
        "groups_trained": sum(step["trained"] for step in staleness["steps"]),
    }


def named(first: dict[str, Any], second: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return two replays with the names that a figure uses for them."""
    return ("once", first), ("twice", second)


def counts(found: dict[str, Any]) -> dict[str, Any]:
    """Count the equal and the different records."""
    return {name: found[name] for name in ("total", "identical", "changed", "only_there", "only_here")}


def first_of(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first record that differs: its name, its position, and the fields that differ."""
    first = found["first"]
    return first and {**{name: first[name] for name in ("name", "kind", "there")}, "fields": first["fields"][:3]}


if __name__ == "__main__":
    main()
