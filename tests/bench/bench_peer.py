"""Tidemill's loop compared with TRL's GRPOTrainer: the same model, tasks, grader and cores, one after the other.

    python tests/bench/bench_peer.py --out peer.json

TRL runs in its own virtual environment (`--venv`, created if missing, from the versions below). Both draw
`reasoning_gym:chain_sum` from the environment of this repository, with the same training questions, and are scored by
its grader; both evaluate 512 held-out rollouts before and after, with the same sampler settings. The figures, one JSON
line each, are rollouts a second of training, held-out success by rollouts trained, peak memory of all processes, and
the curves over wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trl==1.16.0", "transformers==5.19.0", "torch==2.13.0", "accelerate", "datasets")
RECIPE = tomllib.loads((ROOT / "compose/demo/recipes/smollm2.toml").read_text("utf-8"))
DRAWN = 5_000
"""Questions drawn, of which 200 are different."""


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def questions(seed: int) -> dict[str, list[dict[str, str]]]:
    """Draw training and held-out questions of a seed as the feeder does; return prompt and payload of each."""
    from tidemill.producers.environments.base import Split, TaskQuery, split_of
    from tidemill.producers.environments.find import environment_type

    run = RECIPE["run"]
    (entry,) = run["environments"]
    environment = environment_type(entry["name"]).open(entry["options"])
    found: dict[str, list[dict[str, str]]] = {split.value: [] for split in Split}
    seen: set[str] = set()
    for draft in islice(environment.tasks(TaskQuery(seed)), DRAWN):
        if draft.asks not in seen:
            seen.add(draft.asks)
            side = split_of(draft.asks, run["held_out_one_in"])
            found[side.value].append({"prompt": draft.asks, "payload": draft.payload})
    return {"train": found["train"], "eval": found["eval"][: RECIPE["feed"]["eval_tasks"]]}


class Memory(threading.Thread):
    """Peak resident memory of this process's children; shared pages count once per process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()

    def run(self) -> None:
        # The kernel walks every page to answer: one query a second took a tenth of a core.
        while not self.ended.wait(10.0):
            total = 0
            for each in psutil.Process().children(recursive=True):
                try:
                    total += each.memory_full_info().pss
                except (psutil.Error, AttributeError):
                    continue
            self.most = max(self.most, total)


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds and peak memory in GiB of a command and its children. Raises CalledProcessError."""
    memory, began = Memory(), time.monotonic()
    memory.start()
    subprocess.run(command, check=True, env={**os.environ, **environment}, cwd=ROOT)
    memory.ended.set()
    return time.monotonic() - began, memory.most / 2**30


def ours(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out = folder / "ours.json"
    command = [sys.executable, "-m", "tidemill", "demo", "--recipe", "smollm2", "--seed", str(asked.seed)]
    command += ["--steps", str(asked.steps), "--json", str(out), "--data-dir", str(folder / "demo")]
    sets = [f"rollout.max_turn_tokens={asked.tokens}", f"trainer.length_divisor={asked.tokens}", *asked.set]
    command += ["--model", asked.model, *(part for each in sets for part in ("--set", each))]
    seconds, memory = timed(command, {})
    summary = json.loads(out.read_text())
    return {
        "who": "tidemill",
        "rollouts_per_s": summary["rollouts_per_s"],
        "peak_gib": round(memory, 2),
        "seconds": round(seconds, 1),
        "learning_rate": summary["learning_rate"],
        "curve": summary["held_out"],
    }


def theirs(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    python = Path(asked.venv) / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", asked.venv], check=True)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        subprocess.run([*uv, *PACKAGES], check=True)
    (folder / "questions.json").write_text(json.dumps(questions(asked.seed)))
    out = folder / "theirs.json"
    script = Path(__file__).with_name("trl_peer.py")
    command = [str(python), str(script), asked.model, str(folder / "questions.json"), str(out)]
    command += [str(asked.seed), str(asked.peer_steps), str(asked.peer_learning_rate)]
    command += [str(asked.tokens), str(asked.peer_eval_every)]
    seconds, memory = timed(command, {"OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"})
    return {"who": "trl", "peak_gib": round(memory, 2), "seconds": round(seconds, 1), **json.loads(out.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of the model; default: smollm2, made where it is missing")
    parser.add_argument("--venv", default=str(ROOT / "data" / "trl"), help="virtual environment of TRL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of Tidemill, 64 rollouts each")
    parser.add_argument("--peer-steps", type=int, default=24, help="optimizer steps of TRL, 64 rollouts each")
    parser.add_argument("--peer-learning-rate", type=float, default=1e-5)
    parser.add_argument("--peer-eval-every", type=int, default=12, help="steps of TRL between evaluations")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer, for both")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--only", choices=("tidemill", "trl"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.model is None:
        from tidemill.compose.models_command import get_model

        asked.model = str(get_model("smollm2", ROOT / "data" / "models"))
    found = []
    with tempfile.TemporaryDirectory(prefix="tidemill-peer-") as name:
        for who, run in (("tidemill", ours), ("trl", theirs)):
            if asked.only in (None, who):
                found.append(run(asked, Path(name)))
                say(**{key: value for key, value in found[-1].items() if key != "curve"})
                for point in found[-1]["curve"]:
                    say(who=who, **point)
    if len(found) == 2:
        say(who="ratio", rollouts_per_s=round(found[0]["rollouts_per_s"] / found[1]["rollouts_per_s"], 2))
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
