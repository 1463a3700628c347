"""A range of the log as one file, for a bug report: an Avro object container with the records as they are in the log.

The file's header contains a manifest: the selection, the digest of each partition, the schemas that the values name,
and the objects outside the log that the records refer to. An archive is read whole and checked against its manifest
before any of its records is used. Records are in the order of a replay.

A value in the Confluent wire format names its schema by a number, which means nothing without the registry that gave
it. A reader without this registry gets such a value in single-object encoding: the same body after the schema's
fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from tidemill.consumers.operate import Progress, no_progress, watched
from tidemill.consumers.operate.replay.plan import LanePlan, LogOrigin, Plan, lane_reports
from tidemill.consumers.operate.replay.records import RANK, REFERRING, Lane, RawRecord, parts, references
from tidemill.consumers.operate.replay.selection import Selection
from tidemill.schemas.clock import now_us
from tidemill.schemas.codec import (
    CONFLUENT_FRAME_BYTES,
    RECORD_TYPES,
    SINGLE_OBJECT_MAGIC,
    Codec,
    DecodeError,
    confluent_frame,
    recorded_schemas,
)
from tidemill.schemas.log.consumed import decoded

FORMAT = 1
MANIFEST = "tidemill.manifest"
MANIFEST_SHA256 = "tidemill.manifest.sha256"
_MAYBE_BYTES = ["null", "bytes"]
_HEADER = {
    "type": "record",
    "name": "Header",
    "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": _MAYBE_BYTES}],
}
_SCHEMA = fastavro.parse_schema(
    {
        "type": "record",
        "name": "LogRecord",
        "namespace": "tidemill.archive",
        "fields": [
            {"name": "topic", "type": "string"},
            {"name": "partition", "type": "int"},
            {"name": "offset", "type": "long"},
            {"name": "timestamp_ms", "type": "long"},
            {"name": "key", "type": _MAYBE_BYTES},
            {"name": "value", "type": _MAYBE_BYTES},
            {"name": "headers", "type": {"type": "array", "items": _HEADER}},
        ],
    }
)


class ArchiveError(ValueError):
    """A file that is not a complete archive; the message describes the fault."""


@dataclass(frozen=True, slots=True)
class ArchiveManifest:
    format: int
    made_at: int
    """Microseconds since the Unix epoch."""
    source_prefix: str
    selection: dict[str, Any]
    partitions: dict[str, int]
    """Number of partitions of each topic."""
    lanes: list[dict[str, Any]]
    """As `lane_reports` returns them."""
    records: int
    sha256: str
    """Digest of all records."""
    schemas: dict[str, Any]
    """Schemas with which values were written, by fingerprint (CRC-64-AVRO, hexadecimal)."""
    not_included: dict[str, int]
    """Objects outside the log that records refer to, with their sizes in bytes: they are not in the archive."""
    registry_schemas: dict[str, Any] = field(default_factory=dict)
    """Schemas with which values in the Confluent wire format were written, by their id in the registry. Empty in
    archives from before this field existed."""


def export(
    origin: LogOrigin, file: Path, codec: Codec, progress: Progress = no_progress
) -> tuple[ArchiveManifest, str]:
    """Write the records that an origin selects to a file, atomically: either the complete file exists or none.

    `codec` decodes the records to find the objects that they refer to.

    Returns the manifest and the sha256 of the file. Raises ArchiveError if the log loses records during the export,
    and the errors of `LogOrigin.plan`.
    """
    plan = origin.plan(None, progress)
    schemas, registry_schemas, claims = _named_in((record for _, record in origin.ordered(plan)), codec)
    made = ArchiveManifest(
        format=FORMAT,
        made_at=now_us(),
        source_prefix=origin.prefix,
        selection=asdict(origin.selection),
        partitions=plan.partitions,
        lanes=lane_reports(plan, origin.prefix),
        records=plan.records,
        sha256=plan.sha256(),
        schemas=schemas,
        not_included=claims,
        registry_schemas=registry_schemas,
    )
    written = _empty_plan(made)
    partial = file.with_name(file.name + ".partial")

    def rows() -> Iterator[dict[str, Any]]:
        for _, record in watched(origin.ordered(plan), plan.records, progress):
            written.lanes[record.lane].add(record)
            yield {**asdict(record), "headers": [{"name": name, "value": value} for name, value in record.headers]}

    try:
        with partial.open("wb") as out:
            text = json.dumps(asdict(made), sort_keys=True)
            metadata = {MANIFEST: text, MANIFEST_SHA256: hashlib.sha256(text.encode()).hexdigest()}
            fastavro.writer(out, _SCHEMA, rows(), codec="deflate", metadata=metadata)
            out.flush()
            os.fsync(out.fileno())
        if written.sha256() != made.sha256:
            raise ArchiveError("the log lost records while they were read: export again")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    with file.open("rb") as whole:
        return made, hashlib.file_digest(whole, "sha256").hexdigest()


class ArchiveOrigin:
    """The records of an archive. The whole archive is checked before it is used; `codec` decodes its references.

    Raises ArchiveError if it is damaged, truncated or changed, FileNotFoundError if it does not exist.
    """

    def __init__(self, file: Path, codec: Codec, progress: Progress = no_progress) -> None:
        # One open file for checking and reading: the same bytes are checked and read.
        self._file = file.open("rb")
        try:
            self.manifest = _manifest_of(self._file)
            self._plan = _empty_plan(self.manifest)
            self._frames = _other_frames(self.manifest, codec)
            self._check(codec, progress)
        except BaseException:  # the file is closed after any error
            self._file.close()
            raise
        self.prefix = self.manifest.source_prefix
        self.selection = Selection(topics=tuple(self._plan.partitions))

    def plan(self, ends: Mapping[Lane, int] | None, progress: Progress) -> Plan:
        return self._plan

    def ordered(self, plan: Plan) -> Iterator[tuple[int, RawRecord]]:
        """Yield the records in the order of the archive, with the time reached. A value whose schema only the registry
        of the export knows is in single-object encoding."""
        reached: dict[Lane, int] = {}
        for record in _records(self._file):
            reached[record.lane] = max(record.timestamp_ms, reached.get(record.lane, record.timestamp_ms))
            yield reached[record.lane], self._reframed(record)

    def _reframed(self, record: RawRecord) -> RawRecord:
        value = record.value or b""
        frame = self._frames.get(value[:CONFLUENT_FRAME_BYTES])
        return record if frame is None else replace(record, value=frame + value[CONFLUENT_FRAME_BYTES:])

    def close(self) -> None:
        self._file.close()

    def _check(self, codec: Codec, progress: Progress) -> None:
        plan = self._plan
        for record in watched(_records(self._file), self.manifest.records, progress):
            lane = plan.lanes.get(record.lane)
            if lane is None or not lane.start <= record.offset < lane.end:
                raise ArchiveError(f"{record} is not in the archive's manifest")
            lane.add(record)
            if record.topic in REFERRING:
                plan.referred.update(references(decoded(codec, self._reframed(record).value)[0]))
        for report in self.manifest.lanes:
            lane = plan.lanes[report["topic"].removeprefix(self.manifest.source_prefix), report["partition"]]
            if (len(lane.offsets), lane.sha256) != (report["records"], report["sha256"]):
                raise ArchiveError(
                    f"{report['topic']}[{report['partition']}]: {len(lane.offsets)} of {report['records']} records, "
                    "and they are not those that were exported: the file is damaged or was changed"
                )
        if plan.sha256() != self.manifest.sha256:
            raise ArchiveError("the records are not those that were exported: the file is damaged or was changed")


def _manifest_of(file: BinaryIO) -> ArchiveManifest:
    try:
        metadata = fastavro.reader(file).metadata
        text, digest = metadata[MANIFEST], metadata[MANIFEST_SHA256]
    except Exception as error:  # fastavro raises errors of many types on bytes that are not an archive
        raise ArchiveError(f"this is no archive of Tidemill: {type(error).__name__}: {error}") from error
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ArchiveError("the archive's manifest is damaged or was changed")
    tree = json.loads(text)
    if tree.get("format") != FORMAT:
        raise ArchiveError(f"the archive has format {tree.get('format')}, this version reads {FORMAT}")
    try:
        made = ArchiveManifest(**tree)
    except TypeError as error:  # an unknown field, or a missing one
        raise ArchiveError(f"this version cannot read the archive's manifest: {error}") from error
    unknown = sorted(set(made.partitions) - set(RANK))
    if unknown:
        raise ArchiveError(f"the archive holds topics that this version does not know: {', '.join(unknown)}")
    return made


def _empty_plan(made: ArchiveManifest) -> Plan:
    lanes = (
        LanePlan(lane["topic"].removeprefix(made.source_prefix), lane["partition"], lane["start"], lane["end"])
        for lane in made.lanes
    )
    return Plan(lanes, made.partitions)


def _records(file: BinaryIO) -> Iterator[RawRecord]:
    file.seek(0)
    try:
        for row in fastavro.reader(file):
            headers = tuple((entry["name"], entry["value"]) for entry in row["headers"])
            yield RawRecord(**{**row, "headers": headers})
    except Exception as error:  # fastavro raises errors of many types on damaged blocks
        raise ArchiveError(f"the archive is damaged or cut short: {type(error).__name__}: {error}") from error


def _other_frames(made: ArchiveManifest, codec: Codec) -> dict[bytes, bytes]:
    """Return the first bytes of a value in single-object encoding, by those of a value whose schema id means another
    schema, or none, to this reader."""
    frames = {}
    for number, document in made.registry_schemas.items():
        frame = confluent_frame(int(number))
        try:
            own = codec.registered_schema(frame)
        except DecodeError:
            own = None
        mark = _fingerprint(document)
        if own is None or _fingerprint(own) != mark:
            frames[frame] = SINGLE_OBJECT_MAGIC + bytes.fromhex(mark)
    return frames


def _fingerprint(document: dict[str, Any]) -> str:
    return str(fingerprint(to_parsing_canonical_form(document), "CRC-64-AVRO"))


def _named_in(records: Iterable[RawRecord], codec: Codec) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Return the schemas that values name by fingerprint, those that they name by an id of the registry, and the
    objects outside the log that they refer to."""
    documents = [document for kind in RECORD_TYPES.values() for document in recorded_schemas(kind)]
    known = {_fingerprint(document): document for document in documents}
    schemas: dict[str, Any] = {}
    registered: dict[str, Any] = {}
    objects: dict[str, int] = {}
    for record in records:
        mark = (record.value or b"")[:10]
        if mark[:2] == SINGLE_OBJECT_MAGIC and mark[2:].hex() in known:
            schemas[mark[2:].hex()] = known[mark[2:].hex()]
        with suppress(DecodeError):
            document = codec.registered_schema(record.value or b"")
            if document is not None:
                registered[str(int.from_bytes(mark[1:CONFLUENT_FRAME_BYTES], "big"))] = document
        for part in parts(decoded(codec, record.value)[0]):
            if uri := getattr(part, "uri", None):
                objects[uri] = int(getattr(part, "n_bytes", 0))
    return schemas, registered, dict(sorted(objects.items()))
