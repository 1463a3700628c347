"""Stored objects and claimed bytes come back whole or not at all; a reader takes no more than the record names."""

from __future__ import annotations

import gc
import uuid
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tidemill.schemas.records import Claim
from tidemill.schemas.stored_object import (
    StoredObjectError,
    StoreUnavailableError,
    object_pieces,
    put_object,
    read_object,
    store_claim,
)


@pytest.fixture(params=["directory", "object store"])
def folder(request, tmp_path):
    return str(tmp_path / "store") if request.param == "directory" else f"memory://{uuid.uuid4().hex}"


def overwrite(stored: Claim, data: bytes) -> None:
    filesystem, path = fsspec.core.url_to_fs(stored.uri)
    filesystem.pipe_file(path, data)


@pytest.mark.parametrize("pieces", [[], [b"x"], [b"ab", b"", bytes(range(256)) * 5000]])
def test_round_trip(folder, pieces):
    whole = b"".join(pieces)
    stored = put_object(f"{folder}/a/b", iter(pieces))
    assert stored.n_bytes == len(whole)
    assert read_object(stored) == read_object(store_claim(folder, "c/d", whole)) == whole
    assert all(len(piece) <= 70_000 for piece in object_pieces(stored, 70_000))


def test_a_relative_directory_is_named_absolutely(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored, claim = put_object("store/one", [b"payload"]), store_claim("data/store", "one", b"payload")
    monkeypatch.chdir("/")
    assert read_object(stored) == read_object(claim) == b"payload"


@pytest.mark.parametrize(
    ("damage", "reason"), [(b"payloae", "another digest"), (b"payloa", "truncated"), (b"payload+", "more than")]
)
def test_changed_bytes_are_refused(folder, damage, reason):
    stored = put_object(f"{folder}/one", [b"payload"])
    overwrite(stored, damage)
    with pytest.raises(StoredObjectError, match=reason):
        read_object(stored)


def test_no_more_is_read_than_the_record_names(folder):
    stored = put_object(f"{folder}/one", [b"payload"])
    overwrite(stored, bytes(1 << 20))
    read = []
    with pytest.raises(StoredObjectError, match="more than"):
        read.extend(object_pieces(stored, 4))
    assert sum(map(len, read)) <= stored.n_bytes


def test_a_missing_object_is_reported_as_missing(folder):
    stored = put_object(f"{folder}/one", [b"payload"])
    with pytest.raises(StoredObjectError, match="does not exist"):
        read_object(replace(stored, uri=stored.uri + "-not"))
    with pytest.raises(StoredObjectError, match="does not exist"):
        read_object(replace(stored, uri=stored.uri.rpartition("/")[0]))


def test_a_url_that_no_file_system_serves_is_refused():
    with pytest.raises(StoredObjectError, match="cannot be reached"):
        put_object("nowhere://bucket/one", [b"payload"])
    with pytest.raises(StoredObjectError, match="cannot be reached"):
        read_object(Claim("nowhere://bucket/one", 1, ""))


@pytest.mark.parametrize("error", [TimeoutError("no answer"), ImportError("no answer: no driver")])
def test_a_store_that_fails_is_told_from_an_object_that_is_gone(tmp_path, monkeypatch, error):
    stored = put_object(str(tmp_path / "one"), [b"payload"])
    filesystem, _ = fsspec.core.url_to_fs(stored.uri)

    def failing(*_arguments, **_options):
        raise error

    monkeypatch.setattr(filesystem, "open", failing)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        read_object(stored)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        put_object(stored.uri, [b"payload"])


def test_an_error_of_the_pieces_is_the_caller_s(folder):
    def pieces():
        yield b"a"
        raise ValueError("no more")

    with pytest.raises(ValueError, match=r"^no more$"):
        put_object(f"{folder}/one", pieces())


def test_an_object_is_whole_while_the_same_bytes_are_written_again(tmp_path):
    stored = put_object(f"{tmp_path}/one", [b"pay", b"load"])

    def pieces():
        yield b"pay"
        assert read_object(stored) == b"payload"
        yield b"load"

    assert put_object(f"{tmp_path}/one", pieces()) == stored and read_object(stored) == b"payload"


def test_nothing_is_left_of_an_object_that_was_not_finished(tmp_path):
    def pieces():
        yield b"a"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        put_object(f"{tmp_path}/one", pieces())
    assert list(tmp_path.iterdir()) == []


class Upload(AbstractBufferedFile):
    """A file of `Uploads`."""

    def _initiate_upload(self):
        self.parts = []

    def _upload_chunk(self, final=False):
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)


class Uploads(AbstractFileSystem):
    """A store in memory that completes an upload when its file is closed, as object stores do."""

    protocol = "uploads"
    objects: ClassVar[dict[str, bytes]] = {}

    def _open(self, path, mode="rb", **_options):
        return Upload(self, path, mode, block_size=1)


def test_an_upload_that_was_not_finished_replaces_no_object():
    fsspec.register_implementation("uploads", Uploads, clobber=True)
    put_object("uploads://bucket/one", [b"pay", b"load"])

    def pieces():
        yield b"pay"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        put_object("uploads://bucket/one", pieces())
    gc.collect()
    assert list(Uploads.objects.values()) == [b"payload"]


def test_nothing_is_left_open(tmp_path):
    stored = put_object(str(tmp_path / "one"), [b"payload"])
    read_object(stored)
    held = {Path(link).resolve() for link in Path("/proc/self/fd").iterdir()}
    assert tmp_path / "one" not in held
