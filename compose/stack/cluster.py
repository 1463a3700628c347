"""What a stack's directory remembers: the cluster's identity and each node's ports, the same at every start."""

from __future__ import annotations

import base64
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from tidemill.compose.stack.config import HOST
from tidemill.compose.stack.errors import StackError

RECORD = "cluster.json"


@dataclass(frozen=True, slots=True)
class Node:
    """One combined broker and controller."""

    node_id: int
    broker_port: int
    controller_port: int

    @property
    def address(self) -> str:
        """host:port of the broker."""
        return f"{HOST}:{self.broker_port}"

    @property
    def ports(self) -> tuple[int, int]:
        """Both ports of the node."""
        return self.broker_port, self.controller_port

    def directory(self, data_dir: Path) -> Path:
        """Where the node keeps its data, configuration, logs and process id."""
        return data_dir / f"node-{self.node_id}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as its directory describes it."""

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
    """A cluster of len(ports) / 2 nodes: the first half of the ports for brokers, the second for controllers."""
    count = len(ports) // 2
    nodes = tuple(Node(i + 1, ports[i], ports[count + i]) for i in range(count))
    # Kafka writes a cluster id as unpadded URL-safe base64 of a UUID, and its tools take one that begins with '-' for
    # an option.
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    return Cluster(cluster_id, nodes)


def load_cluster(data_dir: Path) -> Cluster | None:
    """The cluster of a directory; None when it has none, StackError when its record cannot be read."""
    path = data_dir / RECORD
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text())
        return Cluster(fields["cluster_id"], tuple(Node(**node) for node in fields["nodes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(f"{path} is damaged ({error}); restore it, or choose another --data-dir") from error


def save_cluster(data_dir: Path, cluster: Cluster) -> None:
    """Write the record so that a reader sees the old one or the new one, never a half."""
    staging = data_dir / f".{RECORD}.{os.getpid()}"
    staging.write_text(json.dumps(asdict(cluster), indent=2) + "\n")
    staging.replace(data_dir / RECORD)
