"""What is asked of a run that went through a storm: the audit, and the steps made again.

The audit and the replay are the operator's own commands, run as an operator would.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.course import on_ranks

COMMAND_S = 900.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    status: int
    document: dict[str, Any] | None
    """Its JSON; None where it printed none."""
    text: str
    """The end of everything that it printed."""

    @property
    def clean(self) -> bool:
        """Whether it ended well."""
        return self.status == 0


def tidemill(*arguments: str, ranks: int = 1) -> Answer:
    """Run a command of the command line to its end, on so many ranks."""
    command = [sys.executable, *on_ranks(ranks), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    return Answer(done.returncode, _json(done.stdout), (done.stdout + done.stderr)[-4000:])


def audit(config: Path, last: int) -> Answer:
    """`tidemill audit` of a run that is over with step `last`: every rollout and answer must have its one end."""
    return tidemill("audit", "--config", str(config), "--set", f"run.max_steps={last}", "--json", "--complete")


def steps_again(config: Path, last: int, ranks: int) -> Answer:
    """Every step of the run made again from its recorded inputs, undisturbed, on as many ranks as the trainer had."""
    return tidemill("replay", "steps", f"1..{last}", "--config", str(config), "--json", ranks=ranks)


def _json(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else {"answer": document}
