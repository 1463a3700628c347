"""The compose file and its mounted files: every role is present, with a valid configuration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tidemill.compose.cli import app
from tidemill.compose.config import TidemillSettings, load_settings
from tidemill.compose.stack.cluster import FAR
from tidemill.consumers.view.config import ViewSettings

COMPOSE = Path(__file__).parents[2] / "compose"
FILE = COMPOSE / "docker-compose.yml"
PRODUCT = {"stable", "canary", "route", "gateway", "join", "batches", "gate"}
ROLES = {"topics", "documents", "midtrain", "train", "replica", "stream", "rollout", "feed", "sink", "view"} | PRODUCT
ANSWERING = {"replica", "view", "stable", "canary", "route", "gateway"}
SERVERS = {"kafka-1", "kafka-2", "kafka-3", "schema-registry", "clickhouse"} | ANSWERING
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")


def parsed() -> dict[str, Any]:
    """Return the compose file with its anchors merged and its variables at their defaults."""
    return yaml.safe_load(VARIABLE.sub(lambda found: found[2], FILE.read_text("utf-8")))


def services() -> dict[str, dict[str, Any]]:
    return parsed()["services"]


def command_of(service: dict[str, Any]) -> list[str]:
    """Return the words after `tidemill`."""
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


def test_roles_that_learn_from_users_are_started_on_request():
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


def test_ports_are_published_only_on_the_loopback():
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


def test_the_conditions_that_a_service_waits_for_exist_and_can_be_met():
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
    assert command_of(services()[name])[0] in COMMANDS


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
    given = known["clickhouse"]["environment"]["CLICKHOUSE_PASSWORD"]
    assert known["sink"]["environment"]["TIDEMILL_SINK__PASSWORD"] == given


def test_the_page_reads_the_sinks_tables_behind_a_token():
    page, sink = (services()[name]["environment"] for name in ("view", "sink"))
    for key in ("TIDEMILL_SINK__HOST", "TIDEMILL_SINK__USER", "TIDEMILL_SINK__PASSWORD"):
        assert page[key] == sink[key]
    settings = ViewSettings(host=page["TIDEMILL_VIEW__HOST"], token=page["TIDEMILL_VIEW__TOKEN"])
    assert settings.token.get_secret_value() and not settings.behind_proxy
    (published,) = services()["view"]["ports"]
    assert published.endswith(f":{page['TIDEMILL_VIEW__PORT']}")
