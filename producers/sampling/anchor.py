"""Finds the checkpoint that gives a role its tokenizer and chat template: the run's first anchor."""

from __future__ import annotations

import logging
import threading

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.log.reader import LogReader
from tidemill.schemas.records import Manifest

LOG = logging.getLogger(__name__)
POLL_S = 0.2


def anchor_of_run(kafka: KafkaSettings, run: RunSettings, stop: threading.Event) -> str | None:
    """The address of the run's first anchor, waited for on `weights.manifests`; None when `stop` comes first."""
    LOG.info("waiting for the first anchor of run %s on %s, for its tokenizer", run.run_id, Topic.MANIFESTS)
    with LogReader(kafka, [Topic.MANIFESTS], client_id="tidemill-first-anchor") as reader:
        while not stop.is_set():
            for located in reader.poll(POLL_S):
                record = located.record
                ours = isinstance(record, Manifest) and (record.run_id, record.branch) == (run.run_id, run.branch)
                if ours and isinstance(record, Manifest) and record.anchor is not None:
                    return record.anchor.uri
    return None
