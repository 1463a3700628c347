"""Finds the tokenizer that a worker's harness uses: the configured one, or that of the run's first anchor."""

from __future__ import annotations

import logging
import threading

import fsspec
from tokenizers import Tokenizer

from tidemill.schemas.catalogue import Topic
from tidemill.schemas.config import KafkaSettings, RunSettings
from tidemill.schemas.reader import LogReader
from tidemill.schemas.records import Manifest

LOG = logging.getLogger(__name__)
TOKENIZER_FILE = "tokenizer.json"
POLL_S = 0.2


def load_tokenizer(uri: str) -> Tokenizer:
    """The tokenizer of a checkpoint directory (path or fsspec URL). Raises FileNotFoundError, ValueError."""
    name = uri if uri.endswith(".json") else f"{uri.rstrip('/')}/{TOKENIZER_FILE}"
    filesystem, path = fsspec.core.url_to_fs(name)
    text = filesystem.cat_file(path).decode("utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for every defect of the file
        raise ValueError(f"{name} is not a tokenizer: {error}") from error


def wait_for_anchor(kafka: KafkaSettings, run: RunSettings, stop: threading.Event) -> str | None:
    """The address of the run's first anchor, waited for on `weights.manifests`; None when `stop` comes first."""
    LOG.info("waiting for the first anchor of run %s on %s, for its tokenizer", run.run_id, Topic.MANIFESTS)
    with LogReader(kafka, [Topic.MANIFESTS], client_id="tidemill-rollout-tokenizer") as reader:
        while not stop.is_set():
            for located in reader.poll(POLL_S):
                uri = _anchor_of(located.record, run)
                if uri is not None:
                    return uri
    return None


def _anchor_of(record: object, run: RunSettings) -> str | None:
    if not isinstance(record, Manifest) or (record.run_id, record.branch) != (run.run_id, run.branch):
        return None
    return None if record.anchor is None else record.anchor.uri
