"""`tidemill models get`: two processes that want the same model."""

from __future__ import annotations

import threading
from pathlib import Path

import huggingface_hub
import pytest

from tidemill.compose.models_command import get_model


def test_a_model_that_two_processes_want_is_made_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[bool] = []
    downloads = 0

    def want() -> None:
        found.append((get_model("team/model", tmp_path) / "model.safetensors").is_file())

    other = threading.Thread(target=want)

    def download(_name: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        nonlocal downloads
        downloads += 1
        (local_dir / "config.json").write_text("{}")
        if not other.ident:
            other.start()
            other.join(0.3)  # time enough to interfere
        (local_dir / "model.safetensors").write_text("")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    want()
    other.join()
    assert found == [True, True] and downloads == 1
