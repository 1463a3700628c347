"""Archives: an import gives exactly the exported records, or fails."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.consumers.operate.replay_support import group, rollout
from tests.consumers.operate.test_replay_log import records_of, under, without_marks, written_log
from tests.consumers.operate.test_replay_parts import ordered_by_sorting, plan_of
from tidemill.compose.cli import app
from tidemill.compose.cli.replay_copy import selection
from tidemill.compose.config import TidemillSettings
from tidemill.consumers.operate import no_progress
from tidemill.consumers.operate.replay.archive import MANIFEST, MANIFEST_SHA256, ArchiveError, ArchiveOrigin, export
from tidemill.consumers.operate.replay.records import RawRecord
from tidemill.consumers.operate.replay.selection import Selection
from tidemill.schemas.codec import Codec
from tidemill.schemas.log.admin import admin_client
from tidemill.schemas.records import Claim


class Memory:
    """Records of a log that is in memory."""

    def __init__(self, lanes):
        self.prefix, self.selection, self._lanes = "live.", Selection(topics=("rollouts", "groups")), lanes

    def plan(self, ends, progress):
        return plan_of(self._lanes)

    def ordered(self, plan):
        return ordered_by_sorting(self._lanes)

    def close(self):
        """No resource is open."""


def some_records():
    claimed = replace(rollout("r2", "g"), segments=[], claim=Claim("file:///data/store/r2", 1234, "digest"))
    values = [Codec().encode(rollout("r1", "g")), Codec().encode(claimed), None, b"no record"]
    return {
        ("rollouts", 0): [
            RawRecord("rollouts", 0, 3 * n, 1_000 - n, b"g" if n else None, value, (("a", b"1"), ("a", None)))
            for n, value in enumerate(values)
        ],
        ("rollouts", 1): [],
        ("groups", 0): [
            RawRecord("groups", 0, 8, 999, b"g", Codec().encode(group("g", [("rollouts", 0, 0), ("rollouts", 0, 3)])))
        ],
    }


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    file = tmp_path_factory.mktemp("archive") / "a.avro"
    return file, *export(Memory(some_records()), file, Codec())


def test_an_archive_gives_the_records_that_were_written_to_it(archive):
    file, made, _ = archive
    origin = ArchiveOrigin(file, Codec())
    plan = origin.plan(None, lambda _done, _of: None)
    assert list(origin.ordered(plan)) == ordered_by_sorting(some_records())
    assert plan.sha256() == made.sha256 == plan_of(some_records()).sha256()
    assert plan.partitions == {"rollouts": 2, "groups": 1}
    assert not list(plan.outside())
    assert made.not_included == {"file:///data/store/r2": 1234}
    assert sorted(schema["name"] for schema in made.schemas.values()) == ["Group", "Rollout"]
    origin.close()


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_archive_is_refused_or_unharmed(archive, tmp_path_factory, data):
    file, made, _ = archive
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:at]
    else:
        damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    other = tmp_path_factory.getbasetemp() / "damaged.avro"
    other.write_bytes(damaged)
    try:
        origin = ArchiveOrigin(other, Codec())
    except ArchiveError:
        return
    # A byte without effect, such as a space in the header's schema.
    assert origin.plan(None, lambda _done, _of: None).sha256() == made.sha256
    assert list(origin.ordered(plan_of(some_records()))) == ordered_by_sorting(some_records())
    origin.close()


def rewritten(file, into, *, metadata=None, rows=None):
    """Rewrite the archive with changed metadata or rows, in the valid format."""
    with file.open("rb") as opened:
        reader = fastavro.reader(opened)
        old, held = reader.metadata, list(reader)
        with into.open("wb") as out:
            kept = {name: value for name, value in old.items() if name.startswith("tidemill.")}
            fastavro.writer(
                out, reader.writer_schema, (rows or list)(held), codec="deflate", metadata={**kept, **(metadata or {})}
            )


def test_tampering_is_refused(archive, tmp_path):
    file, _, _ = archive
    other = tmp_path / "other.avro"
    rewritten(file, other)
    ArchiveOrigin(other, Codec()).close()
    for change in (
        lambda rows: rows[:-1],
        lambda rows: [*rows, rows[-1]],
        lambda rows: [{**rows[0], "value": b"forged"}, *rows[1:]],
        lambda rows: [{**rows[0], "timestamp_ms": 5}, *rows[1:]],
        lambda rows: [{**rows[0], "topic": "train.steps"}, *rows[1:]],
    ):
        rewritten(file, other, rows=change)
        with pytest.raises(ArchiveError, match=r"not those that were exported|not in the archive's manifest"):
            ArchiveOrigin(other, Codec())
    rewritten(file, other, metadata={MANIFEST: json.dumps({"format": 1})})
    with pytest.raises(ArchiveError, match="manifest is damaged"):
        ArchiveOrigin(other, Codec())


def test_a_file_that_is_not_an_archive_is_refused(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"no archive at all")
    with pytest.raises(ArchiveError, match="no archive of Tidemill"):
        ArchiveOrigin(other, Codec())
    with pytest.raises(FileNotFoundError):
        ArchiveOrigin(tmp_path / "absent", Codec())


def test_an_export_that_fails_leaves_no_file(tmp_path):
    class Losing(Memory):
        def ordered(self, plan):
            return ordered_by_sorting(self._lanes)[1:]

    with pytest.raises(ArchiveError, match="lost records"):
        export(Losing(some_records()), tmp_path / "a.avro", Codec())
    assert list(tmp_path.iterdir()) == []


def test_records_of_a_schema_registry_can_be_read_without_it(tmp_path):
    codec, file = Codec("mock://archive"), tmp_path / "a.avro"
    plain = {lane: [one for one in held if one.offset in (0, 3, 8)] for lane, held in some_records().items()}
    framed = {
        lane: [replace(one, value=codec.encode(Codec().decode(one.value))) for one in held]
        for lane, held in plain.items()
    }
    made, _ = export(Memory(framed), file, codec)
    assert sorted(schema["name"] for schema in made.registry_schemas.values()) == ["Group", "Rollout"]
    assert made.not_included == {"file:///data/store/r2": 1234}
    other = Codec("mock://other")
    other.encode(Codec().decode(plain["groups", 0][0].value))  # its first id names another schema
    for reader, held in ((Codec(), plain), (other, plain), (codec, framed)):
        origin = ArchiveOrigin(file, reader)
        assert list(origin.ordered(origin.plan(None, no_progress))) == ordered_by_sorting(held)
        assert origin.plan(None, no_progress).referred == {("rollouts", 0, 0), ("rollouts", 0, 3)}
        origin.close()


def signed(tree):
    """Return the metadata of an archive with this manifest."""
    text = json.dumps(tree, sort_keys=True)
    return {MANIFEST: text, MANIFEST_SHA256: hashlib.sha256(text.encode()).hexdigest()}


@pytest.mark.parametrize("change", ["more", "less"])
def test_a_manifest_with_other_fields_is_refused(archive, tmp_path, change):
    file, made, _ = archive
    tree = {**asdict(made), "later": 1}
    if change == "less":
        tree = {"format": 1, "partitions": {}}
    rewritten(file, tmp_path / "other.avro", metadata=signed(tree))
    with pytest.raises(ArchiveError, match="cannot read the archive's manifest"):
        ArchiveOrigin(tmp_path / "other.avro", Codec())


def test_an_archive_from_before_it_held_the_schemas_of_a_registry_is_read(archive, tmp_path):
    file, made, _ = archive
    tree = asdict(made)
    del tree["registry_schemas"]
    rewritten(file, tmp_path / "old.avro", metadata=signed(tree))
    origin = ArchiveOrigin(tmp_path / "old.avro", Codec())
    assert (origin.manifest.sha256, origin.manifest.registry_schemas) == (made.sha256, {})
    assert list(origin.ordered(origin.plan(None, no_progress))) == ordered_by_sorting(some_records())
    origin.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["copy", "--topic", "rollouts", "--into", "other.", "--manifest", "no/directory/made.json"],
        ["export", "--topic", "rollouts", "no/directory/a.avro"],
    ],
)
def test_a_file_in_a_directory_that_does_not_exist_is_refused_before_the_log_is_read(arguments):
    refused = CliRunner().invoke(app, ["replay", *arguments, "--bootstrap", "127.0.0.1:9"])
    assert refused.exit_code == 2
    assert "there is no directory no/directory" in refused.output


@pytest.mark.parametrize(("second", "first_ms"), [("01", 1_000), ("01.000001", 1_001), ("01.000999", 1_001)])
def test_the_bounds_of_a_time_between_two_milliseconds_are_the_later_one(second, first_ms):
    options = dict.fromkeys(("offsets", "step", "version", "group")) | {"topic": ["rollouts"], "where": ""}
    bounds = {"since": f"1970-01-01T00:00:{second}", "until": f"1970-01-01T00:01:{second}"}
    chosen = selection({**options, **bounds, "uncommitted": False}, TidemillSettings())
    assert (chosen.from_ms, chosen.to_ms) == (first_ms, 60_000 + first_ms)


def test_a_range_of_a_log_goes_through_a_file_into_another_prefix(kafka, tmp_path, topic_prefix):
    live, into, file = written_log(kafka), f"import{topic_prefix}", tmp_path / "steps.avro"
    where = ["--bootstrap", live.bootstrap, "--topic-prefix", live.topic_prefix]
    run = CliRunner()
    exported = run.invoke(app, ["replay", "export", *where, "--step", "2", "--run-id", "run", str(file), "--json"])
    assert exported.exit_code == 0, exported.output
    said = json.loads(exported.stdout)
    assert said["records"] == 12
    command = ["replay", "import", *where, str(file), "--into", into]
    for bad, why in (
        ([*command[:-1], live.topic_prefix], "live topic"),
        ([*command, "--sha256", "0" * 64], "not the file that was exported"),
    ):
        refused = run.invoke(app, [*bad, "--yes"])
        assert refused.exit_code != 0
        assert why in str(refused.exception)
    whole = file.read_bytes()
    file.write_bytes(whole[:-200])
    refused = run.invoke(app, [*command, "--yes"])
    assert isinstance(refused.exception, ArchiveError)
    admin = admin_client(live)
    assert not [name for name in admin.list_topics(timeout=60).topics if name.startswith(into)], "nothing was written"
    file.write_bytes(whole)
    imported = run.invoke(app, [*command, "--sha256", said["file_sha256"], "--yes", "--json"])
    assert imported.exit_code == 0, imported.output
    assert json.loads(imported.stdout)["written"] == 12
    originals, copies = (
        [
            (record.timestamp_ms, record.key, record.topic, record.value if topic == "rollouts" else b"")
            for topic in ("rollouts", "groups")
            for records in records_of(settings, topic).values()
            for record in records
        ]
        for settings in (live, under(live, into))
    )
    assert len(copies) == 12
    assert set(copies) <= set(originals)
    rollouts = [r for records in records_of(under(live, into), "rollouts").values() for r in records]
    assert all(without_marks(record) == [("made-by", b"test")] for record in rollouts)
