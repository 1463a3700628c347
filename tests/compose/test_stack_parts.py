"""The pure parts of the local stack, and its command line without a broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from tests.waiting import until
from tidemill.compose.cli import app
from tidemill.compose.cli.stack_commands import stack_app
from tidemill.compose.stack.cluster import Cluster, load_cluster, new_cluster, render, save_cluster, server_properties
from tidemill.compose.stack.config import StackError, StackSettings
from tidemill.compose.stack.jars import POM, find_java, jars_dir, parse_java_release, report_downloads, resolve_jars
from tidemill.compose.stack.kafka import LocalStack, NodeState
from tidemill.compose.stack.process import DetachedProcess, check_free, exclusive, pick_ports, stop_all

CHOICES = (
    "--bootstrap",
    "TIDEMILL_KAFKA__BOOTSTRAP",
    "docker compose -f compose/docker-compose.yml up",
    "install Java",
)


def ignore(message: str) -> None:
    """Ignore a progress message."""


def sleeper(marker: str) -> list[str]:
    """Return a command that runs until it is stopped and has a marker argument."""
    return [sys.executable, "-c", "import signal; signal.pause()", marker]


@pytest.mark.parametrize(
    ("banner", "release"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ("no such thing", None),
    ],
)
def test_java_release_is_read_from_the_banner(banner: str, release: int | None) -> None:
    assert parse_java_release(banner) == release


@pytest.mark.parametrize("banner", ['openjdk version "11.0.2"', "gibberish"])
def test_an_unusable_java_names_the_three_choices(banner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{banner}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(StackError) as raised:
        find_java()
    assert all(choice in str(raised.value) for choice in CHOICES)


def test_missing_java_is_told_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(stack_app, ["up", "--data-dir", str(tmp_path / "stack")])
    assert result.exit_code == 1 and isinstance(result.exception, StackError)
    assert "Java is not installed" in str(result.exception)
    assert all(choice in str(result.exception) for choice in CHOICES)
    assert not (tmp_path / "stack").exists()


def test_maven_is_missed_only_while_the_jars_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StackError, match="Maven is not installed") as raised:
        resolve_jars(tmp_path, ignore)
    assert all(choice in str(raised.value) for choice in CHOICES)
    jars_dir(tmp_path).mkdir()
    assert resolve_jars(tmp_path, ignore) == jars_dir(tmp_path)


def test_the_jars_are_looked_for_where_the_settings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maven is missing; the Java script here only prints its version."""
    java, cache, config = tmp_path / "bin" / "java", tmp_path / "cache", tmp_path / "tidemill.toml"
    java.parent.mkdir()
    java.write_text('#!/bin/sh\necho \'version "17"\'\n[ "$1" = -version ]\n')
    java.chmod(0o755)
    jars_dir(cache).mkdir(parents=True)
    config.write_text(f"[stack]\ncache_dir = '{cache}'\n")
    monkeypatch.setenv("PATH", str(java.parent))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the command's handler would stay in this process
    result = CliRunner().invoke(app, ["trainer", "check", "--config", str(config), "--", "never started"])
    assert isinstance(result.exception, StackError) and "formatting" in str(result.exception), result.exception


def test_a_failing_maven_leaves_no_half_filled_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven = tmp_path / "mvn"
    maven.write_text("#!/bin/sh\necho '[ERROR] no route to anywhere'\nexit 1\n")
    maven.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cache = tmp_path / "cache"
    with pytest.raises(StackError, match="no route to anywhere"):
        resolve_jars(cache, ignore)
    assert [path.name for path in cache.iterdir()] == ["jars.lock"]


def test_the_pom_pins_every_version_and_names_no_repository() -> None:
    root = ElementTree.parse(POM).getroot()
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    versions = [node.text or "" for node in root.iterfind(".//m:version", space)]
    properties = {node.tag.rsplit("}")[-1]: node.text for node in root.iterfind("m:properties/*", space)}
    assert properties["kafka.version"] == "4.1.1"
    assert all(version.startswith("${") or version.replace(".", "").isdigit() for version in versions)
    assert not root.findall(".//m:repositories", space)


def test_downloads_are_told_at_most_once_a_second() -> None:
    lines = [f"[INFO] Downloaded from x: y://z/a-{i}.jar (1 kB at 2 kB/s)\n" for i in range(30)]
    ticks = iter(i * 0.25 for i in range(1000))
    told: list[str] = []
    last = report_downloads(lines, told.append, lambda: next(ticks))
    assert 1 < len(told) <= 16
    assert "a-" in told[-1]
    assert last[-1].endswith("(1 kB at 2 kB/s)")


@given(st.sampled_from([1, 3]), st.integers(1024, 60_000))
def test_a_cluster_is_the_same_after_a_round_trip(brokers: int, base: int) -> None:
    cluster = new_cluster(pick_ports(2 * brokers, base))
    with tempfile.TemporaryDirectory() as directory:
        save_cluster(Path(directory), cluster)
        assert load_cluster(Path(directory)) == cluster
    assert len({port for node in cluster.nodes for port in node.ports}) == 2 * brokers
    assert not cluster.cluster_id.startswith("-")


@given(st.text(max_size=60))
def test_a_damaged_record_says_so(text: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "cluster.json").write_text(text)
        with pytest.raises(StackError, match="damaged"):
            load_cluster(Path(directory))


def test_properties_name_every_controller_and_only_the_loopback() -> None:
    cluster = new_cluster([1, 2, 3, 11, 12, 13])
    properties = server_properties(cluster, cluster.nodes[1], Path("/x"))
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:11,2@127.0.0.1:12,3@127.0.0.1:13"
    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:2,CONTROLLER://127.0.0.1:12"
    assert properties["offsets.topic.replication.factor"] == "3"
    assert properties["min.insync.replicas"] == "2"
    # Socket buffers keep the system's defaults.
    assert {properties["socket.send.buffer.bytes"], properties["socket.receive.buffer.bytes"]} == {"-1"}
    alone = Cluster("c", cluster.nodes[:1])
    assert server_properties(alone, cluster.nodes[0], Path("/x"))["min.insync.replicas"] == "1"


def test_a_network_listener_is_advertised_beside_the_loopback() -> None:
    cluster = new_cluster([1, 11])
    properties = server_properties(cluster, cluster.nodes[0], Path("/x"), "198.18.0.1:9092")
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:1,NETWORK://198.18.0.1:9092"
    assert "NETWORK:PLAINTEXT" in properties["listener.security.protocol.map"]


def test_rendered_properties_keep_a_backslash() -> None:
    assert render({"a": "b\\c"}) == "a=b\\\\c\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"brokers": 2},
        {"heap_mb": 10},
        {"base_port": -1},
        {"base_port": 70_000},
        {"host": "0.0.0.0"},
        {"network_listeners": ["a:1", "b:2"]},
        {"network_listeners": ["no port"]},
    ],
)
def test_settings_refuse_what_cannot_work(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        StackSettings.model_validate(fields)


def test_free_ports_differ_and_are_free() -> None:
    ports = pick_ports(6, 0)
    assert len(set(ports)) == 6
    check_free(ports)


def test_the_lock_is_exclusive_and_says_who_waits(tmp_path: Path) -> None:
    told: list[str] = []
    with (
        exclusive(tmp_path / "lock", 1, told.append),
        pytest.raises(StackError, match="still held"),
        exclusive(tmp_path / "lock", 0.2, told.append),
    ):
        pass
    assert len(told) == 1
    with exclusive(tmp_path / "lock", 0.2, told.append):
        pass


@pytest.mark.parametrize("lost", [False, True])
def test_a_detached_process_is_found_stopped_and_forgotten(lost: bool, tmp_path: Path) -> None:
    """This also works if its pid file is lost: the marker is enough."""
    detached = DetachedProcess(tmp_path / "pid", f"--marker={tmp_path}")
    pid = detached.start(sleeper(detached.marker), tmp_path / "out")
    if lost:
        detached.pid_file.unlink()
    found = detached.find()
    assert found is not None and found.pid == pid
    stop_all([detached], 5, ignore)
    assert not psutil.pid_exists(pid)
    assert detached.find() is None and not detached.was_started


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    detached = DetachedProcess(tmp_path / "pid", f"--marker={tmp_path}")
    ready = tmp_path / "ready"
    program = (
        "import signal, pathlib, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path(sys.argv[2]).touch()\nwhile True: signal.pause()"
    )
    pid = detached.start([sys.executable, "-c", program, detached.marker, str(ready)], tmp_path / "out")
    until(ready.exists)
    told: list[str] = []
    stop_all([detached], 0.3, told.append)
    assert not psutil.pid_exists(pid)
    assert str(pid) in told[0]


def test_a_reused_pid_is_never_signalled(tmp_path: Path) -> None:
    with subprocess.Popen(sleeper("--someone-else")) as bystander:
        try:
            detached = DetachedProcess(tmp_path / "pid", f"--marker={tmp_path}")
            detached.pid_file.write_text(f"{bystander.pid}\n")
            assert detached.find() is None
            stop_all([detached], 1, ignore)
            assert bystander.poll() is None
            assert not detached.was_started
        finally:
            bystander.kill()


def test_a_record_of_another_size_is_refused(tmp_path: Path) -> None:
    save_cluster(tmp_path, new_cluster([1, 2]))
    cached = StackSettings(data_dir=tmp_path, brokers=3, cache_dir=tmp_path / "cache")
    jars_dir(cached.cache_dir).mkdir(parents=True)
    with pytest.raises(StackError, match=r"holds a cluster of 1 broker\(s\), not 3"):
        LocalStack(cached).up()


def test_status_of_a_dead_broker_says_dead(tmp_path: Path) -> None:
    cluster = new_cluster(pick_ports(2, 0))
    save_cluster(tmp_path, cluster)
    home = cluster.nodes[0].directory(tmp_path)
    home.mkdir()
    stack = LocalStack(StackSettings(data_dir=tmp_path))
    assert stack.status().nodes[0].state is NodeState.STOPPED
    (home / "kafka.pid").write_text("garbage")
    assert stack.status().nodes[0].state is NodeState.DEAD


def test_status_json_is_one_document(tmp_path: Path) -> None:
    result = CliRunner().invoke(stack_app, ["status", "--json", "--data-dir", str(tmp_path)])
    assert json.loads(result.stdout) == {"ready": False, "data_dir": str(tmp_path), "bootstrap": "", "nodes": []}
