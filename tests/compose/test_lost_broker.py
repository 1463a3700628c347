"""A broker that is lost while a command reads the log: one line that says what happened and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from tidemill.compose import cli
from tidemill.compose.config import TidemillSettings
from tidemill.schemas.config import KafkaSettings

NOBODY = "127.0.0.1:9"


def run(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    monkeypatch.setattr("sys.argv", ["tidemill", *command])
    cli.main()


@pytest.mark.parametrize(
    "command",
    [
        ("audit",),
        ("trace", "i0"),
        ("dead-letters", "list"),
        ("replay", "export", "--topic", "tasks", "a.avro"),
        ("users", "show", "ann", "--pseudonym"),
    ],
    ids=lambda command: command[0],
)
def test_a_command_whose_broker_is_lost_ends_in_one_line(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def lost(settings: TidemillSettings) -> TidemillSettings:
        """Return the settings with an address that nobody answers at, as if the broker had just answered."""
        options = {"log_level": "0"}
        kafka = settings.kafka.model_copy(update={"bootstrap": NOBODY, "client_options": options})
        return settings.model_copy(update={"kafka": kafka})

    monkeypatch.chdir(tmp_path)
    for module in ("log_commands", "dead_letters_command", "replay_copy", "users_command"):
        monkeypatch.setattr(f"tidemill.compose.cli.{module}.with_reachable_log", lost)
    for module in ("schemas.log.watermarks", "consumers.operate.replay.records"):
        monkeypatch.setattr(f"tidemill.{module}.METADATA_TIMEOUT_S", 1.0)
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch, *command)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tidemill: Kafka does not answer any more (")
    assert "check that its brokers run, then start this again" in line


def test_a_wrong_value_in_a_flag_is_explained_without_the_librarys_own_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "app", lambda: KafkaSettings(topic_prefix="no/prefix"))
    with pytest.raises(SystemExit, match="1"):
        run(monkeypatch)
    told = capsys.readouterr().err
    assert "  topic_prefix: Value error, topic_prefix 'no/prefix': Kafka allows only" in told
    assert "pydantic" not in told


def test_another_error_of_kafka_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    error = KafkaException(KafkaError(KafkaError._FATAL))

    def refused() -> None:
        raise error

    monkeypatch.setattr(cli, "app", refused)
    with pytest.raises(KafkaException):
        run(monkeypatch)
    error.args = (KafkaError(KafkaError._TRANSPORT),)
    monkeypatch.setenv("TIDEMILL_TRACEBACK", "1")
    with pytest.raises(KafkaException):
        run(monkeypatch)
