"""A stack's directory: the cluster's id, each node's ports, which are the same at every start, and its configuration.

A node is a small KRaft broker that notices lost clients quickly. It listens only on the loopback interface, unless
configured otherwise.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.compose.stack.config import HOST, StackError

RECORD = "cluster.json"


@dataclass(frozen=True, slots=True)
class Node:
    """One combined broker and controller."""

    node_id: int
    broker_port: int
    controller_port: int

    @property
    def address(self) -> str:
        return f"{HOST}:{self.broker_port}"

    @property
    def ports(self) -> tuple[int, int]:
        return self.broker_port, self.controller_port

    def directory(self, data_dir: Path) -> Path:
        """Return the directory of the node's data, configuration, logs and process id."""
        return data_dir / f"node-{self.node_id}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster according to its directory."""

    cluster_id: str
    nodes: tuple[Node, ...]

    @property
    def bootstrap(self) -> str:
        """Addresses of all brokers, separated by commas."""
        return ",".join(node.address for node in self.nodes)

    @property
    def voters(self) -> str:
        """`controller.quorum.voters`: id@host:port of every controller."""
        return ",".join(f"{node.node_id}@{HOST}:{node.controller_port}" for node in self.nodes)


def new_cluster(ports: list[int]) -> Cluster:
    """Make a cluster of len(ports) / 2 nodes: the first half of the ports for brokers, the second for controllers."""
    count = len(ports) // 2
    nodes = tuple(Node(i + 1, ports[i], ports[count + i]) for i in range(count))
    # A cluster id is the unpadded URL-safe base64 of a UUID; Kafka's tools read one that begins with '-' as an
    # option.
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    return Cluster(cluster_id, nodes)


def load_cluster(data_dir: Path) -> Cluster | None:
    """Return the cluster of a directory; None if it has none. Raises StackError if its record cannot be read."""
    path = data_dir / RECORD
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text())
        return Cluster(fields["cluster_id"], tuple(Node(**node) for node in fields["nodes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(f"{path} is damaged ({error}); restore it, or choose another --data-dir") from error


def save_cluster(data_dir: Path, cluster: Cluster) -> None:
    """Write the record atomically: a reader sees the old one or the new one."""
    staging = data_dir / f".{RECORD}.{os.getpid()}"
    staging.write_text(json.dumps(asdict(cluster), indent=2) + "\n")
    staging.replace(data_dir / RECORD)


SMALL = {
    # Topics are declared in the catalogue and created explicitly; Faust creates its own through the admin API.
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "1",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    # The default of 128 MiB does not fit a small heap.
    "log.cleaner.dedupe.buffer.size": "16777216",
    "log.index.size.max.bytes": "1048576",
    "log.segment.bytes": "268435456",
}

FAR = {
    # With the default of 100 KiB, a connection sends little more than that in a round trip: some 10 Mbit/s at a round
    # trip of 100 ms. The system's own buffers grow with the connection's capacity.
    "socket.send.buffer.bytes": "-1",
    "socket.receive.buffer.bytes": "-1",
}

PROMPT = {
    "group.initial.rebalance.delay.ms": "0",
    # The partitions of a lost broker get another leader after 5 s, not 9.
    "broker.session.timeout.ms": "5000",
    "broker.heartbeat.interval.ms": "1000",
    # Members of the newer group protocol get these from the broker: a killed one is replaced after 10 s, not 45.
    "group.consumer.session.timeout.ms": "10000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.min.session.timeout.ms": "1000",
}


def server_properties(cluster: Cluster, node: Node, log_dir: Path, network_listener: str = "") -> dict[str, str]:
    """Return all settings of one node that differ from Kafka's defaults; `network_listener` is HOST:PORT."""
    clients = [f"PLAINTEXT://{node.address}", *([f"NETWORK://{network_listener}"] if network_listener else [])]
    return {
        "process.roles": "broker,controller",
        "node.id": str(node.node_id),
        "controller.quorum.voters": cluster.voters,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,NETWORK:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "listeners": ",".join([*clients, f"CONTROLLER://{HOST}:{node.controller_port}"]),
        "advertised.listeners": ",".join(clients),
        "log.dirs": str(log_dir),
        **replication(len(cluster.nodes)),
        **SMALL,
        **FAR,
        **PROMPT,
    }


def replication(brokers: int) -> dict[str, str]:
    """Return settings that put every topic on every broker; with three, writes survive the loss of one."""
    in_sync = min(2, brokers)
    return {
        "default.replication.factor": str(brokers),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(brokers),
        "transaction.state.log.replication.factor": str(brokers),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.replication.factor": str(brokers),
        "share.coordinator.state.topic.min.isr": str(in_sync),
    }


def render(properties: dict[str, str]) -> str:
    """Format as a Java properties file; a backslash is that format's escape character."""
    return "".join(f"{key}={value.replace(chr(92), chr(92) * 2)}\n" for key, value in properties.items())
