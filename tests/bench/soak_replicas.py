"""Many versions under random SIGKILLs of the replicas: at the end, every proof must be of the trainer's weights.

    python tests/bench/soak_replicas.py [--versions 200] [--kills 12] [--replicas 2] [--seed 1] [--interval 1.0]

A trainer publishes versions of a tiny model at a constant rate and does not wait for replicas. The seed selects
versions and replicas: at such a version the replica is killed with SIGKILL and started again at once; it joins from the
cheapest anchor, deltas and skip-deltas. The replicas alternate between an fp32 and a bf16 engine. One JSON line at the
end: `unequal` counts the acknowledged proofs and the final live fingerprints that are not the trainer's, and must be 0.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import scratch_log

from tests.consumers.replica_role import Acks, RoleProcess, Trainer
from tidemill.kernels.weights.config import PublishSettings
from tidemill.schemas.config import KafkaSettings
from tidemill.schemas.records import AckStatus

DTYPES = ("float32", "bfloat16")


def soak(arguments: argparse.Namespace, settings: KafkaSettings, root: Path) -> dict[str, Any]:
    """Run the test and return the values of the JSON line."""
    chosen = random.Random(arguments.seed)
    kills = Counter(chosen.randrange(1, arguments.versions) for _ in range(arguments.kills))
    trainer = Trainer(settings, root, PublishSettings(anchor_every=20, skips=(8,)))
    acks, begun = Acks(settings), time.monotonic()

    def start(number: int) -> RoleProcess:
        dtype = DTYPES[number % len(DTYPES)]
        return RoleProcess(settings, root, f"replica-{number}", dtype=dtype, region=f"region-{number}")

    fleet = [start(number) for number in range(arguments.replicas)]
    names = [replica.replica_id for replica in fleet]
    try:
        acks.until_serving(0, *names, deadline_s=arguments.deadline)
        due = time.monotonic()
        for version in range(1, arguments.versions + 1):
            trainer.step(arguments.fraction)
            for _ in range(kills[version]):
                number = chosen.randrange(arguments.replicas)
                fleet[number].kill()
                fleet[number] = start(number)
            due = max(due + arguments.interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        acks.until_serving(trainer.version, *names, deadline_s=arguments.deadline)
        final = [replica.status() for replica in fleet]
    finally:
        for replica in fleet:
            replica.kill()
        acks.close()
    return _result(arguments, trainer, acks, final, time.monotonic() - begun)


def _result(
    arguments: argparse.Namespace, trainer: Trainer, acks: Acks, final: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    expected = {manifest.version: manifest.fingerprint for manifest in trainer.manifests}
    said = [ack for found in acks.by_replica.values() for ack in found]
    proofs = [ack for ack in said if ack.status is not AckStatus.REFUSED]
    unequal = sum(ack.fingerprint != expected[ack.version] for ack in proofs)
    unequal += sum(status["fingerprint"] != expected[trainer.version] for status in final)
    return {
        "figure": "soak of replicas under SIGKILL", "versions": trainer.version, "kills": arguments.kills,
        "seed": arguments.seed, "replicas": arguments.replicas, "interval_s": arguments.interval,
        "incarnations": len({ack.incarnation for ack in said}), "proofs": len(proofs),
        "refused": len(said) - len(proofs), "final_versions": [status["version"] for status in final],
        "unequal": unequal, "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Replicas under random SIGKILLs prove the trainer's weights.")
    parser.add_argument("--versions", type=int, default=200)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between versions")
    parser.add_argument("--fraction", type=float, default=0.01, help="share of each tensor's elements that change")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for the replicas to come up at an end")
    arguments = parser.parse_args()
    with scratch_log(None) as (bootstrap, root):
        result = soak(arguments, KafkaSettings(bootstrap=bootstrap, topic_prefix="soak."), root)
    print(json.dumps(result), flush=True)
    sys.exit(1 if result["unequal"] else 0)


if __name__ == "__main__":
    main()
