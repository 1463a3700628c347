"""The compose file and what it mounts: every role is there, is configured for real, and the dashboard's queries run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tidemill.compose.cli import app
from tidemill.compose.config import TidemillSettings, load_settings
from tidemill.compose.stack.properties import FAR
from tidemill.consumers.sink.config import MergeSettings, TableEngine
from tidemill.consumers.sink.tables import tables

COMPOSE = Path(__file__).parents[2] / "compose"
FILE = COMPOSE / "docker-compose.yml"
PRODUCT = {"stable", "canary", "route", "gateway", "join", "batches", "gate"}
ROLES = {"topics", "documents", "midtrain", "train", "replica", "stream", "rollout", "feed", "sink"} | PRODUCT
ANSWERING = {"replica", "stable", "canary", "route", "gateway"}
SERVERS = {"kafka-1", "kafka-2", "kafka-3", "schema-registry", "clickhouse", "grafana"} | ANSWERING
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def parsed() -> dict[str, Any]:
    """The compose file with its anchors merged and its variables at their defaults."""
    return yaml.safe_load(VARIABLE.sub(lambda found: found[2], FILE.read_text("utf-8")))


def services() -> dict[str, dict[str, Any]]:
    return parsed()["services"]


def dashboard() -> dict[str, Any]:
    return json.loads((COMPOSE / "dashboards" / "tidemill.json").read_text("utf-8"))


def command_of(service: dict[str, Any]) -> list[str]:
    """The words after `tidemill`."""
    words = " ".join(service["command"])
    return words.partition("tidemill ")[2].split() if "tidemill " in words else words.split()


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="no docker compose client here; the parsed file is tested below")
def test_the_compose_client_accepts_the_file():
    done = subprocess.run(
        ["docker", "compose", "--file", str(FILE), "config", "--quiet"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_part_is_there():
    assert set(services()) == ROLES | SERVERS


def test_what_learns_from_users_is_started_on_request():
    assert {name for name, service in services().items() if service.get("profiles") == ["product"]} == PRODUCT


def test_images_are_pinned():
    for name, service in services().items():
        tag = service["image"].rpartition(":")[2]
        assert re.fullmatch(r"\d+(\.\d+)+", tag), f"{name}: {service['image']}"


def test_the_brokers_are_the_version_of_the_local_stack():
    pom = (COMPOSE / "stack" / "pom.xml").read_text("utf-8")
    version = re.search(r"<kafka.version>(.+)</kafka.version>", pom)
    assert version is not None
    assert services()["kafka-1"]["image"] == f"apache/kafka:{version[1]}"


def test_every_server_has_a_health_check():
    assert {name for name, service in services().items() if "healthcheck" in service} == SERVERS


def test_ports_are_published_on_the_loopback_alone():
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    hosts = [port.rsplit(":", 1)[0] for port in published]
    assert len(set(hosts)) == len(hosts)


def test_the_brokers_are_one_quorum():
    brokers = [services()[f"kafka-{number}"]["environment"] for number in (1, 2, 3)]
    assert [broker["KAFKA_NODE_ID"] for broker in brokers] == [1, 2, 3]
    assert len({broker["CLUSTER_ID"] for broker in brokers}) == 1
    voters = [voter.split("@") for voter in brokers[0]["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")]
    assert [(int(node), address) for node, address in voters] == [(n, f"kafka-{n}:9094") for n in (1, 2, 3)]
    for number, broker in enumerate(brokers, 1):
        assert f"INTERNAL://kafka-{number}:9092" in broker["KAFKA_ADVERTISED_LISTENERS"]


def test_the_brokers_buffers_are_those_of_the_local_stack():
    for number in (1, 2, 3):
        given = services()[f"kafka-{number}"]["environment"]
        assert {name: str(given[f"KAFKA_{name.replace('.', '_').upper()}"]) for name in FAR} == FAR


def test_what_a_service_waits_for_exists_and_can_come_true():
    known = services()
    for name, service in known.items():
        for other, wait in service.get("depends_on", {}).items():
            assert other in known, f"{name} waits for {other}"
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in known[other]
            else:
                assert "restart" not in known[other]


def test_volumes_are_declared_and_mounted_files_exist():
    declared = parsed()["volumes"]
    for service in services().values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (COMPOSE / source).is_file() if source.startswith("./") else source in declared
    assert (COMPOSE / "Dockerfile").is_file()


@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_role_runs_a_command_that_exists(name: str):
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert command_of(services()[name])[0] in commands


@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_roles_environment_is_a_valid_configuration(name: str, monkeypatch: pytest.MonkeyPatch):
    for key, value in services()[name]["environment"].items():
        monkeypatch.setenv(key, str(value))
    settings = load_settings()
    assert settings.kafka.bootstrap == "kafka-1:9092,kafka-2:9092,kafka-3:9092"
    assert settings.kafka.replication_factor == 3
    assert settings.kafka.registry_url == "http://schema-registry:8081"
    assert settings.trainer.model == settings.midtrain.output
    sections = {key.split("__")[0].removeprefix("TIDEMILL_").lower() for key in services()[name]["environment"]}
    assert sections <= set(TidemillSettings.model_fields)


def test_roles_find_each_other():
    known = services()
    replicas = json.loads(known["rollout"]["environment"]["TIDEMILL_ROLLOUT__REPLICAS"])
    assert replicas == [f"http://replica:{known['replica']['environment']['TIDEMILL_REPLICA__PORT']}"]
    assert known["sink"]["environment"]["TIDEMILL_SINK__HOST"] == "clickhouse"
    for pool in ("stable", "canary"):
        served = json.loads(known["route"]["environment"][f"TIDEMILL_ROUTER__POOLS__{pool.upper()}"])
        assert served == [f"http://{pool}:{known[pool]['environment']['TIDEMILL_REPLICA__PORT']}"]
        assert known[pool]["environment"]["TIDEMILL_REPLICA__POOL"] == pool
    assert (
        known["sink"]["environment"]["TIDEMILL_SINK__PASSWORD"]
        == known["clickhouse"]["environment"]["CLICKHOUSE_PASSWORD"]
        == known["grafana"]["environment"]["CLICKHOUSE_PASSWORD"]
    )


def test_grafana_finds_its_data_source():
    source = yaml.safe_load((COMPOSE / "dashboards" / "datasource.yml").read_text("utf-8"))["datasources"][0]
    assert source["jsonData"]["host"] in services()
    used = {panel["datasource"]["uid"] for panel in dashboard()["panels"]}
    assert used == {source["uid"]}
    assert services()["grafana"]["environment"]["GF_PLUGINS_PREINSTALL"].startswith(f"{source['type']}@")


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in dashboard()["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_dashboard_shows_what_a_run_is_judged_by():
    titles = " ".join(panel["title"].lower() for panel in dashboard()["panels"])
    for subject in ("policy lag", "reward", "held-out success", "weight version", "pause", "delta size"):
        assert subject in titles


def plain_sql(query: str) -> str:
    """A panel's query without Grafana's macros and variables."""
    return re.sub(r"\$__timeFilter\((\w+)\)", r"(\1 >= 0)", query).replace("${run}", "some-run")


def test_every_query_of_the_dashboard_runs_on_the_sinks_tables():
    queries = [target["rawSql"] for panel in dashboard()["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard()["templating"]["list"]]
    statements = [
        "CREATE DATABASE tidemill",
        *(table.create("tidemill", TableEngine.MERGE_TREE, MergeSettings()) for table in tables().values()),
        "USE tidemill",
        *(plain_sql(query) for query in queries),
    ]
    # chDB takes one directory a process, and other tests of this process have theirs.
    program = (
        "import json, sys; from chdb.session import Session\nsession = Session()\n"
        "for statement in json.load(sys.stdin): session.query(statement, 'JSON')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(statements), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
