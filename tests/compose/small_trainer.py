"""A trainer of one small tensor, correct or with one fault, for `tidemill trainer check`.

python small_trainer.py KIND BOOTSTRAP TOPIC_PREFIX RUN_ID STORE
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

STEP_S = 0.2
"""Duration of a training step, in seconds."""
VERSIONS = {"short": 2}


def main(kind: str, bootstrap: str, prefix: str, run_id: str, store: str) -> None:
    if kind == "fails":
        sys.exit("no model was found")
    if kind == "hangs":
        time.sleep(600)
    # The two kinds above need none of these imports.
    import numpy as np

    from tidemill.kernels.weights.bits import Weight
    from tidemill.kernels.weights.publish import PublishSettings, WeightPublisher
    from tidemill.schemas.catalogue import Topic
    from tidemill.schemas.config import KafkaSettings, RunSettings, StoreSettings
    from tidemill.schemas.log.producer import RecordProducer

    kafka, run = KafkaSettings(bootstrap=bootstrap, topic_prefix=prefix), RunSettings(run_id=run_id)
    model = Path(store).parent / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    settings, places = PublishSettings(anchor_every=3), StoreSettings(root=store)
    with WeightPublisher.open(kafka, run, places, settings, base_model=model) as publisher:
        for version in range(VERSIONS.get(kind, 5)):
            if kind == "stops early" and run_id == "killed" and publisher.has(version):
                return
            time.sleep(STEP_S)
            bits = np.random.default_rng(version).integers(0, 2**14, (32, 32)).astype(np.uint16)
            manifest = publisher.publish(version, {"weight": Weight("bfloat16", bits)})
    if kind == "lies":
        with RecordProducer(kafka, "small-trainer") as producer:
            producer.send_acked(Topic.MANIFESTS, [(run.branch, replace(manifest, fingerprint="0" * 16))])


if __name__ == "__main__":
    main(*sys.argv[1:])
