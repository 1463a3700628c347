"""A trainer of one small tensor, for `tidemill trainer check`.

python small_trainer.py BOOTSTRAP TOPIC_PREFIX RUN_ID STORE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from tidemill.kernels.weights.bits import Weight
from tidemill.kernels.weights.publish import PublishSettings, WeightPublisher
from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
from tidemill.schemas.records import Manifest

STEP_S = 0.1
"""Duration of a training step, in seconds."""
VERSIONS = 5


def train(kafka: KafkaSettings, run: RunSettings, store: Path, versions: int, step_s: float = 0.0) -> Manifest:
    """Publish this many versions, from 0 on; return the last manifest."""
    model = store.parent / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    settings, places = PublishSettings(anchor_every=3), StoreSettings(root=str(store))
    with WeightPublisher.open(kafka, run, places, settings, base_model=model) as publisher:
        for version in range(versions):
            time.sleep(step_s)
            bits = np.random.default_rng(version).integers(0, 2**14, (32, 32)).astype(np.uint16)
            manifest = publisher.publish(version, {"weight": Weight("bfloat16", bits)})
    return manifest


if __name__ == "__main__":
    bootstrap, prefix, run_id, store = sys.argv[1:]
    kafka = KafkaSettings(bootstrap=bootstrap, topic_prefix=prefix)
    train(kafka, RunSettings(run_id=run_id), Path(store), VERSIONS, STEP_S)
