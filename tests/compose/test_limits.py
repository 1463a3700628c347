"""The statements of docs/limits.md that a test can check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidemill.compose.config import TidemillSettings
from tidemill.compose.stack.config import StackSettings
from tidemill.consumers.sink import http_api as sink_server

ROOT = Path(__file__).resolve().parent.parent.parent


def test_midtraining_is_one_process_on_a_cpu():
    for name in ("midtrain.py", "midtrain_config.py"):
        source = (ROOT / "trainer" / name).read_text("utf-8")
        assert not re.search(r"cuda|device|torch\.distributed|[Rr]anks", source), name


def test_ranks_share_no_sequences():
    for path in (ROOT / "trainer").rglob("*.py"):
        assert not re.search(r"context_parallel", path.read_text("utf-8")), path


def test_defaults_stay_on_this_machine():
    settings = TidemillSettings()
    assert sink_server.LOOPBACK == settings.replica.host == "127.0.0.1"
    assert (StackSettings().brokers, settings.kafka.replication_factor) == (1, 1)
    with pytest.raises(ValueError, match="1 or 3 brokers"):
        StackSettings(brokers=4)
