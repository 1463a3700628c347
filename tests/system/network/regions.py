"""A hub and regions: each region is a separate network namespace that reaches only the hub, over one shaped link.

Raises `Unavailable` if this machine cannot make namespaces.

    with Regions() as regions:
        thin = regions.add("thin", LinkShape(bits_per_second=2e6))
        regions.hub                # address at which the regions find the hub
        thin.start([...])          # a process inside the region
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from network.devices import DEVICE
from network.shape import LinkShape

BENCHMARK_NETWORKS = [f"198.{18 + i // 256}.{i % 256}" for i in range(512)]
"""RFC 2544 reserves these addresses for tests of networks: no other host answers there."""
HERE = Path(__file__).resolve().parent
STOP_S = 120.0


class Unavailable(RuntimeError):
    """This machine cannot make shaped links; the message says why."""


@dataclass(frozen=True, slots=True)
class Region:
    """One network namespace, kept open by the process of its link."""

    name: str
    address: str
    shape: LinkShape
    holder: subprocess.Popen[str]

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a Python program (its arguments) as a process inside the region."""
        before = [sys.executable, str(HERE / "enter.py"), str(self.holder.pid)]
        return subprocess.Popen([*before, *command], **options)

    def remote_addresses(self) -> set[tuple[str, int]]:
        """Return (address, port) of all peers outside the region to which its sockets are connected now."""
        found = set()
        for protocol in ("tcp", "udp"):
            for line in Path(f"/proc/{self.holder.pid}/net/{protocol}").read_text().splitlines()[1:]:
                address, port = line.split()[2].split(":")
                where = ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(address), "little"))
                if not where.is_loopback and not where.is_unspecified:
                    found.add((str(where), int(port, 16)))
        return found

    def close(self) -> dict[str, Any]:
        """Take the link down; return what it carried, by direction (empty with netem)."""
        try:
            output, _ = self.holder.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            output, _ = self.holder.communicate()
        return dict(json.loads(output)) if output.strip() else {}


class Regions:
    """The hub's network and its links, a context manager. `backend`: None chooses netem if the kernel has it."""

    def __init__(self, backend: str | None = None) -> None:
        reason = why_not()
        if reason:
            raise Unavailable(reason)
        self.backend = backend or ("netem" if has_netem() else "userspace")
        self._network = _free_network()
        self.hub = f"{self._network}.1"
        self._regions: list[Region] = []
        # Keeps the hub's address available, so that servers can bind it before the first link is up.
        self._anchor = self.add("hub", LinkShape())

    def add(self, name: str, shape: LinkShape) -> Region:
        """Add a region behind a new link."""
        number = len(self._regions) + 2
        address = f"{self._network}.{number}"
        device = f"tm{os.getpid() % 100_000}n{number}"
        arguments = [self.backend, device, self.hub, address, json.dumps(shape.as_dict())]
        holder = subprocess.Popen(
            [sys.executable, str(HERE / "shaper.py"), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        region = Region(name, address, shape, holder)
        self._regions.append(region)
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "ready":
            self.close()
            raise Unavailable(f"the {self.backend} link of region {name} could not be made: see its error above")
        return region

    def close(self) -> None:
        """Take every link down."""
        for region in self._regions:
            region.close()
        self._regions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def why_not() -> str:
    """Return why this machine cannot make namespaces and links; empty if it can."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need Linux and root"
    done = subprocess.run(
        [sys.executable, "-c", "from network.devices import new_namespace; new_namespace()"],
        cwd=HERE.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip().splitlines()[-1]}"
    return "" if has_netem() or DEVICE.exists() else f"neither netem nor {DEVICE} is here"


def has_netem() -> bool:
    """Return whether the kernel can shape traffic; tested in a separate namespace."""
    if not (shutil.which("tc") and shutil.which("ip") and shutil.which("nsenter")):
        return False
    program = "import subprocess, sys; from network.devices import new_namespace; new_namespace(); "
    program += "sys.exit(subprocess.run('tc qdisc add dev lo root netem delay 1ms'.split()).returncode)"
    tried = subprocess.run([sys.executable, "-c", program], cwd=HERE.parent, capture_output=True, check=False)
    return tried.returncode == 0


def _free_network() -> str:
    for network in random.SystemRandom().sample(BENCHMARK_NETWORKS, 32):
        if not _is_ours(f"{network}.1"):
            return network
    raise Unavailable("no free network of 198.18.0.0/15: other tests hold them")


def _is_ours(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as candidate:
        try:
            candidate.bind((address, 0))
        except OSError:
            return False
        return True
