"""Apache Kafka on this machine: one or three KRaft nodes, each a detached JVM.

Invariants: one directory is one cluster, formatted once; a node's ports and data outlive its process; commands on a
directory run one at a time; an `up` that fails stops all processes that it started; `down` stops all processes.
"""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tidemill.compose.stack.cluster import (
    Cluster,
    Node,
    load_cluster,
    new_cluster,
    render,
    save_cluster,
    server_properties,
)
from tidemill.compose.stack.config import StackError, StackSettings
from tidemill.compose.stack.jars import Progress, find_java, find_maven, jars_dir, resolve_jars
from tidemill.compose.stack.process import DetachedProcess, check_free, exclusive, pick_ports, stop_all

LOG4J = Path(__file__).with_name("log4j2.properties")
FORMAT_TIMEOUT_S = 120.0
LOG_TAIL_LINES = 20


class NodeState(StrEnum):
    """The state of a node: serving; running but not serving; stopped on purpose; ended without being stopped."""

    READY = "ready"
    UNREADY = "unready"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    node_id: int
    state: NodeState
    pid: int | None
    address: str
    log: str


@dataclass(frozen=True, slots=True)
class StackStatus:
    """The cluster of a directory; without a cluster `nodes` is empty."""

    data_dir: str
    bootstrap: str
    nodes: tuple[NodeStatus, ...]

    @property
    def ready(self) -> bool:
        return bool(self.nodes) and all(node.state is NodeState.READY for node in self.nodes)


def silent(message: str) -> None:
    """Report no progress."""


class LocalStack:
    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._data_dir = settings.data_dir.absolute()

    def up(self, progress: Progress = silent) -> StackStatus:
        """Start the missing brokers and return when all of them are ready; do nothing if all are running.

        Raises StackError; immediately if Java or Maven is missing.
        """
        java = require_tools(self._settings)
        with self._lock(progress):
            jars = resolve_jars(self._settings.cache_dir, progress)
            cluster = self._cluster()
            missing = [node for node in cluster.nodes if self._process(node).find() is None]
            check_free(port for node in missing for port in node.ports)
            try:
                with ThreadPoolExecutor(len(missing) or 1) as pool:
                    list(pool.map(lambda node: self._prepare(cluster, node, java, jars, progress), missing))
                for node in missing:
                    process, home = self._process(node), node.directory(self._data_dir)
                    server = [process.marker, "kafka.Kafka", str(home / "server.properties")]
                    process.start([*self._jvm(node, java, jars, "kafka.log"), *server], home / "output.log")
                self._wait(cluster, progress)
            except BaseException:
                # Also on Ctrl-C: a partly started cluster would hold its ports and memory until someone stops it.
                stop_all([self._process(node) for node in missing], self._settings.stop_timeout_s, progress)
                raise
            return self.status()

    def down(self, progress: Progress = silent) -> None:
        """Stop every broker of the directory; return after all processes have ended."""
        if not self._data_dir.exists():
            return
        with self._lock(progress):
            cluster = load_cluster(self._data_dir)
            nodes = cluster.nodes if cluster else ()
            stop_all([self._process(node) for node in nodes], self._settings.stop_timeout_s, progress)

    def status(self) -> StackStatus:
        """Return the status of the nodes, from the processes and the brokers."""
        cluster = load_cluster(self._data_dir)
        if cluster is None:
            return StackStatus(str(self._data_dir), "", ())
        pids = {node: found.pid if (found := self._process(node).find()) else None for node in cluster.nodes}
        online = _online(_admin(cluster.bootstrap)) if any(pids.values()) else frozenset()
        nodes = []
        for node in cluster.nodes:
            if pids[node] is not None:
                state = NodeState.READY if node.node_id in online else NodeState.UNREADY
            else:
                state = NodeState.DEAD if self._process(node).was_started else NodeState.STOPPED
            log = str(node.directory(self._data_dir) / "kafka.log")
            nodes.append(NodeStatus(node.node_id, state, pids[node], node.address, log))
        return StackStatus(str(self._data_dir), cluster.bootstrap, tuple(nodes))

    def _lock(self, progress: Progress) -> AbstractContextManager[None]:
        patience = self._settings.start_timeout_s + self._settings.stop_timeout_s
        return exclusive(self._data_dir / "stack.lock", patience, progress)

    def _cluster(self) -> Cluster:
        """Return the directory's cluster, made at the first start; move its ports only if asked and stopped."""
        settings = self._settings
        existing = load_cluster(self._data_dir)
        if existing is None:
            cluster = new_cluster(pick_ports(2 * settings.brokers, settings.base_port))
            save_cluster(self._data_dir, cluster)
            return cluster
        if len(existing.nodes) != settings.brokers:
            raise StackError(
                f"{self._data_dir} holds a cluster of {len(existing.nodes)} broker(s), not {settings.brokers}; choose "
                f"another --data-dir, or give --brokers {len(existing.nodes)}"
            )
        if settings.base_port in (0, existing.nodes[0].broker_port):
            return existing
        if any(self._process(node).find() for node in existing.nodes):
            raise StackError(f"the stack runs at {existing.bootstrap}; stop it first with `tidemill stack down`")
        moved = new_cluster(pick_ports(2 * settings.brokers, settings.base_port))
        cluster = Cluster(existing.cluster_id, moved.nodes)
        save_cluster(self._data_dir, cluster)
        return cluster

    def _prepare(self, cluster: Cluster, node: Node, java: Path, jars: Path, progress: Progress) -> None:
        """Write the node's configuration, and format its storage if it is not formatted yet."""
        home = node.directory(self._data_dir)
        (home / "data").mkdir(parents=True, exist_ok=True)
        config = home / "server.properties"
        network = dict(zip(cluster.nodes, self._settings.network_listeners, strict=False)).get(node, "")
        properties = server_properties(cluster, node, home / "data", network) | self._settings.properties
        config.write_text(render(properties))
        if (home / "data" / "meta.properties").exists():
            return
        progress(f"formatting the storage of broker {node.node_id}")
        tool = ["kafka.tools.StorageTool", "format", "--ignore-formatted"]
        arguments = [*tool, "--cluster-id", cluster.cluster_id, "--config", str(config)]
        command = [*self._jvm(node, java, jars, "format.log"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise StackError(f"formatting {home / 'data'} failed:\n{done.stdout}{done.stderr}")

    def _jvm(self, node: Node, java: Path, jars: Path, log: str) -> list[str]:
        """Return the command of a small JVM that starts fast and exits when it is out of memory."""
        return [
            str(java),
            f"-Xmx{self._settings.heap_mb}m",
            "-XX:+UseSerialGC",
            "-XX:+ExitOnOutOfMemoryError",
            *(["-XX:TieredStopAtLevel=1"] if self._settings.fast_start else []),
            f"-Dlog4j2.configurationFile={LOG4J}",
            f"-Dtidemill.log={node.directory(self._data_dir) / log}",
            "-cp",
            str(jars / "*"),
        ]

    def _wait(self, cluster: Cluster, progress: Progress) -> None:
        progress(f"waiting for {len(cluster.nodes)} broker(s) at {cluster.bootstrap}")
        nodes, timeout_s = frozenset(node.node_id for node in cluster.nodes), self._settings.start_timeout_s
        admin, deadline = _admin(cluster.bootstrap), time.monotonic() + timeout_s
        try:
            while not nodes <= (online := _online(admin)):
                dead = [node.node_id for node in cluster.nodes if self._process(node).find() is None]
                if dead:
                    raise StackError(f"broker(s) {dead} ended while starting")
                if time.monotonic() >= deadline:
                    raise StackError(f"brokers {sorted(nodes - online)} are not ready after {timeout_s:.0f} s")
        except StackError as error:
            # The last lines of each existing log, under its name.
            logs = [node.directory(self._data_dir) / n for node in cluster.nodes for n in ("output.log", "kafka.log")]
            tails = [
                "\n".join([f"--- last lines of {log}", *log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]])
                for log in logs
                if log.exists()
            ]
            raise StackError("\n".join([str(error), *tails])) from error

    def _process(self, node: Node) -> DetachedProcess:
        home = node.directory(self._data_dir)
        return DetachedProcess(home / "kafka.pid", f"-Dtidemill.node={home}")


def require_tools(settings: StackSettings) -> Path:
    """Return the `java` to use, before any slow work. Raises StackError without it, or without a Maven if needed."""
    java = find_java()
    if not jars_dir(settings.cache_dir).is_dir():
        find_maven()
    return java


def local_bootstrap(settings: StackSettings) -> str | None:
    """Return the address of the local stack of these settings if all of its brokers serve; otherwise None."""
    status = LocalStack(settings).status()
    return status.bootstrap if status.ready else None


REQUEST_TIMEOUT_S = 1.0


def _admin(bootstrap: str) -> AdminClient:
    # Refused connections are expected while a broker starts: no log lines, and fast retries.
    options: dict[str, str | int | float] = {
        "bootstrap.servers": bootstrap,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 200,
        "log_level": 0,
    }
    return AdminClient(options)


def _online(admin: AdminClient) -> frozenset[int]:
    """Return the node ids of the brokers that the cluster counts as alive; empty if no broker answers."""
    try:
        described = admin.describe_cluster(request_timeout=REQUEST_TIMEOUT_S).result(REQUEST_TIMEOUT_S + 1)
    except (KafkaException, TimeoutError):
        return frozenset()
    return frozenset(node.id for node in described.nodes)
