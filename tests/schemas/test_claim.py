"""Claimed bytes come back whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.schemas.stored_object import ClaimError, load_claim, store_claim


def test_a_claim_of_a_relative_directory_is_read_from_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    claim = store_claim("data/store", "one", b"payload")
    monkeypatch.chdir("/")
    assert load_claim(claim) == b"payload"


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 5000])
def test_round_trip(tmp_path: Path, payload: bytes):
    assert load_claim(store_claim(str(tmp_path), "a/b", payload)) == payload


def test_any_fsspec_store_will_do():
    assert load_claim(store_claim("memory://claims", "one", b"payload")) == b"payload"


@pytest.mark.parametrize("damage", [b"payloae", b"payloa", b"payload+"])
def test_changed_bytes_are_refused(tmp_path: Path, damage: bytes):
    claim = store_claim(str(tmp_path), "one", b"payload")
    (tmp_path / "one").write_bytes(damage)
    with pytest.raises(ClaimError, match="not the ones stored"):
        load_claim(claim)


@pytest.mark.parametrize(
    ("uri", "said"),
    [("{}/two", "gone"), ("{}", "gone"), ("memory://claims/two", "gone"), ("nowhere://one", "cannot be reached")],
)
def test_bytes_that_are_not_there_are_said_to_be_missing(tmp_path: Path, uri: str, said: str):
    claim = store_claim(str(tmp_path), "one", b"payload")
    with pytest.raises(ClaimError, match=said):
        load_claim(replace(claim, uri=uri.format(tmp_path)))
