"""The table of the faults that were tried and their outcome, made from the results of test runs.

    python -m tests.chaos.table RESULT.json... > tests/chaos/FAULTS.md

`python -m tests.chaos.run --json` writes the results. The second table needs no results: each fault that the audit
must find is planted in a small sound log when the table is made, and the log is audited.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.rolling import OFFENCES
from tests.chaos.storm import FaultKind
from tests.consumers.operate.audit_support import PLANTED_FAULTS, sound_log

Result = Sequence[Mapping[str, Any]]
"""The figures of one run."""

MEANT = {
    FaultKind.KILL: "SIGKILL",
    FaultKind.RANK_KILL: "SIGKILL of one rank",
    FaultKind.PAUSE: "SIGSTOP, SIGCONT later",
    FaultKind.PARTITION: "cut off from every broker, healed later",
    FaultKind.DISK: "disk quota used up (no file may grow)",
    FaultKind.BROKER_KILL: "SIGKILL of a broker, started again later",
    FaultKind.BROKER_PAUSE: "SIGSTOP of a broker, SIGCONT later",
}
NAMES = frozenset(kind.value for kind in FaultKind)
WORKS_LIKE = {"feed-online": "feed", "rollout-online": "rollout", "train-online": "train", "stable": "replica",
              "canary": "replica"}  # fmt: skip
"""The role of act one that runs the same code, by the role of act two."""
NOTICED = {
    FaultKind.KILL: {
        "feed": "process manager; no new tasks",
        "rollout": "process manager; its lease runs out, a static member comes back to its tasks",
        "stream": "process manager; groups stay open until their deadline",
        "train": "process manager; the step planned in `train.steps` has no record",
        "replica": "process manager; requests fail and are tried again, no acks",
        "sink": "process manager; its tables stop at their watermarks",
        "join": "process manager; interactions wait for their end",
        "batches": "process manager; rewarded interactions wait for a batch",
        "gate": "process manager; no decision comes, and what was promoted goes on being served",
        "route": "process manager; the product's requests fail, and are its own to try again",
        "gateway": "process manager; backends get no 202, and send again under the same event id",
        "users": "process manager; they are the product: nobody asks",
    },
    FaultKind.RANK_KILL: {
        "train": "the other ranks: the job ends and names the rank; torchrun, the process manager",
        "replica": "the engine core: the replica ends and names the rank; process manager",
    },
    FaultKind.PAUSE: {"": "nobody, when short; else consumer session, HTTP time-out, the role's own watchdog"},
    FaultKind.PARTITION: {"": "consumer session; delivery time-out; the role's watchdog: the log does not answer"},
    FaultKind.DISK: {"": "the role ends with the system's error, and its process manager sees it"},
    FaultKind.BROKER_KILL: {"": "controller: its session ends, other replicas lead"},
    FaultKind.BROKER_PAUSE: {"": "controller: its session ends, other replicas lead"},
}


@dataclass(slots=True)
class Row:
    """One kind of fault on one kind of target, over all results."""

    times: int = 0
    clean: int = 0
    """Faults in runs with a clean verdict."""
    ended: int = 0
    """Processes that ended by themselves because of the fault."""
    seconds: list[float] = field(default_factory=list)
    repeated: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def document(results: Iterable[Result]) -> str:
    """Return the whole document. Raises ValueError if an input is not a result."""
    results = list(results)
    storms = [result for result in results if _find(result, "storm")]
    rolled = [result for result in results if _find(result, "brokers_in_turn")]
    parts = [
        "# Faults tried and their outcome",
        "Made by `python -m tests.chaos.table` from the results of `python -m tests.chaos.run`; not written by hand. "
        "A role is everything that one process does; recovery is from the fault (its end, where it lasts) to the "
        "first record, ack or row that the role writes afterwards, in seconds.",
        _runs(storms),
        _faults(storms, rolled),
        *([_brokers(rolled)] if rolled else []),
        _planted(),
    ]
    return "\n\n".join(parts) + "\n"


def kind_of(target: str) -> str:
    """Return the kind of a target: `rollout` for `rollout-1`, `broker` for `broker-3`."""
    return target.rpartition("-")[0] if target[-1:].isdigit() else target


def _runs(results: Sequence[Result]) -> str:
    head = (
        "| act | seed | brokers | faults | steps | rollouts | answers to users | audit | lost | twice "
        "| steps made again | calm run | minutes |"
    )
    lines = [head, "|" + " --- |" * 13]
    for result in results:
        storm, audit, bits = (_need(result, name) for name in ("storm", "audit", "bit_equality"))
        calm = bits["equal_to_an_undisturbed_trainer"]
        product = _find(result, "product")
        cells = [
            storm.get("act", "one"), storm["seed"], storm["brokers"], storm["faults"], storm["steps"],
            storm["rollouts"], product["interactions"] if product else "-",
            "clean" if audit["clean"] else "**not clean**", audit["lost"], audit["twice"],
            "bit-equal" if bits["every_step_made_again_is_equal"] else "**not equal**",
            "-" if calm is None else "bit-equal" if calm else "**not equal**", round(storm["seconds"] / 60, 1),
        ]  # fmt: skip
        lines.append(_line(cells))
    note = "Act one is the simulated loop; in act two users are served, and the model learns from them."
    return "## Runs\n\n" + "\n".join(lines) + f"\n\n{note}"


def _faults(storms: Sequence[Result], rolled: Sequence[Result]) -> str:
    rows: dict[tuple[FaultKind, str], Row] = defaultdict(Row)
    for result in storms:
        _add(rows, result)
    for result in rolled:
        _add_turns(rows, result)
    for kind in FaultKind:
        if not any(tried is kind for tried, _ in rows):
            rows[kind, "any"] = Row()
    head = "| fault | target | times | outcome | how it is noticed | back after, p50 / p95 (s) | repeated work |"
    lines = [head, "|" + " --- |" * 7]
    for (kind, target), row in sorted(rows.items(), key=lambda item: (list(FaultKind).index(item[0][0]), item[0][1])):
        outcome = "nothing lost, nothing twice" if row.clean == row.times else f"**clean in {row.clean}**"
        outcome = outcome if row.times else "**not tried in these runs**"
        noticed = next((NOTICED[kind][name] for name in (target, WORKS_LIKE.get(target), "")
                        if name in NOTICED[kind]), "")  # fmt: skip
        if row.ended:
            outcome += f"; the role ended by itself {row.ended} times and was started again"
        lines.append(_line([MEANT[kind], target, row.times, outcome, noticed, _times(row.seconds), _work(row)]))
    text = "\n".join(lines)
    note = "Repeated work is the role's in the whole run. A broker is back when writes are acknowledged again."
    return f"## Faults\n\n{text}\n\n{note}"


def _add(rows: dict[tuple[FaultKind, str], Row], result: Result) -> None:
    storm = _need(result, "storm")
    clean = bool(_need(result, "verdict")["clean"])
    first: dict[str, FaultKind] = {}
    for name, targets in storm["by_target"].items():
        for target, times in targets.items():
            row = rows[FaultKind(name), kind_of(target)]
            row.times += times
            row.clean += times * clean
            first.setdefault(kind_of(target), FaultKind(name))
    for name, roles in _need(result, "recovery_s")["by_fault_and_role"].items():
        for role, found in roles.items():
            if name in NAMES:
                rows[FaultKind(name), kind_of(role)].seconds += found["seconds"]
    for target, kind in first.items():
        for what, count in _repeated_by(target, result).items():
            rows[kind, target].repeated[what] += count
    for life in _need(result, "ended_by_themselves")["lives"]:
        target = kind_of(life["name"])
        if life["during"] in NAMES:
            rows[FaultKind(life["during"]), target].ended += 1


def _add_turns(rows: dict[tuple[FaultKind, str], Row], result: Result) -> None:
    total = _need(result, "brokers_in_turn")
    clean = not any(total[name] for name in OFFENCES)
    for turn in _turns(result):
        row = rows[FaultKind(turn["kind"]), "broker"]
        row.times += 1
        row.clean += clean
        row.seconds.append(turn["write_stall_s"])


def _turns(result: Result) -> list[Mapping[str, Any]]:
    return [figure for figure in result if figure["figure"] == "broker_returned"]


def _repeated_by(target: str, result: Result) -> dict[str, int]:
    repeated = _need(result, "repeated_work")
    again = (_find(result, "product") or {}).get("written_again", {})
    match WORKS_LIKE.get(target, target):
        case "feed":
            return {"tasks issued twice": repeated["tasks"]}
        case "rollout":
            return {
                "rollouts begun again": sum(repeated["rollouts_begun_again"].values()),
                "of them from a recorded turn": sum(repeated["of_these_from_a_recorded_turn"].values()),
                "written again": sum(repeated["rollouts_written_again"].values()),
            }
        case "stream":
            return {"groups written again, all the same bytes": repeated["groups_written_again"]}
        case "train":
            return {
                "steps begun again": repeated["steps_begun_again"],
                "recorded twice": repeated["steps_recorded_again"],
            }
        case "replica":
            loaded = repeated["versions_loaded_whole_again"].items()
            return {"versions loaded whole again": sum(n for name, n in loaded if kind_of(name) == target)}
        case "sink":
            return {"rows twice": repeated["sink_rows_twice"]}
        case "join":
            return {"outcomes written again, all the same bytes": again["outcomes"]}
        case "batches":
            return {"batches written again, all the same bytes": again["batches"]}
        case "route":
            return {"answers recorded twice": again["interactions"]}
        case "gateway":
            return {"signals sent again under their own id, the SDK's included": again["feedback"]}
        case _:
            return {}


def _brokers(results: Sequence[Result]) -> str:
    head = "| fault | broker | longest gap between acknowledged writes (s) | for a consumer (s) | in sync after (s) |"
    lines = [head, "|" + " --- |" * 5]
    after = []
    for result in results:
        for turn in _turns(result):
            name, which = MEANT[FaultKind(turn["kind"])], f"{turn['broker']} of {turn['brokers']}"
            lines.append(_line([name, which, turn["write_stall_s"], turn["read_stall_s"], turn["in_sync_again_s"]]))
        total = _need(result, "brokers_in_turn")
        after.append(
            f"{total['acknowledged']} rollouts acknowledged meanwhile: {total['lost']} lost, {total['twice']} twice, "
            f"{total['not_consumed']} not consumed; {total['groups']} groups assembled, {total['groups_missing']} "
            f"missing, {total['groups_wrong']} wrong, {total['groups_written_again']} written again."
        )
    return "## Brokers in turn\n\n" + "\n".join(lines) + "\n\n" + "\n".join(after)


def _planted() -> str:
    lines = ["| planted in a sound log | found by the check | first offender named |", "| --- | --- | --- |"]
    for fault in PLANTED_FAULTS:
        log = sound_log()
        fault.plant(log)
        failed = log.audit().failed
        names = ", ".join(check.name for check in failed) or "**nothing**"
        lines.append(_line([fault.name, names, f"`{failed[0].first}`" if failed else "-"]))
    return "## Faults that `tidemill audit` has to find\n\n" + "\n".join(lines)


def _times(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    p50, p95 = np.percentile(seconds, [50, 95])
    return f"{p50:.1f} / {p95:.1f} ({len(seconds)})"


def _work(row: Row) -> str:
    return ", ".join(f"{count} {what}" for what, count in row.repeated.items()) or "-"


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _find(result: Result, figure: str) -> Mapping[str, Any] | None:
    return next((each for each in result if each["figure"] == figure), None)


def _need(result: Result, figure: str) -> Mapping[str, Any]:
    found = _find(result, figure)
    if found is None:
        raise ValueError(f"a result without the figure {figure!r}: is it one of `tests.chaos.run --json`?")
    return found


def main() -> None:
    """Entry point."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.stdout.write(document(json.loads(Path(name).read_text("utf-8")) for name in sys.argv[1:]))


if __name__ == "__main__":
    main()
