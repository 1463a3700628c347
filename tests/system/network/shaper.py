"""One link as a process: it keeps the region's network namespace open, and the link exists until it ends.

    python shaper.py BACKEND NAME ADDRESS PEER SHAPE

BACKEND is `userspace` or `netem`, ADDRESS the hub's end, PEER the region's, SHAPE the JSON of a `LinkShape`. It prints
`ready` once packets pass, ends when its standard input ends, and then prints the packet counts of the link.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from network.devices import new_namespace, open_tun
from network.shape import Direction, LinkShape

MTU_BYTES = 1 << 16
BATCH = 64
"""Packets read from one device before the other is read."""


def main() -> None:
    """Run one link; see the module's docstring."""
    backend, name, address, peer, shape = sys.argv[1:6]
    run = {"userspace": userspace, "netem": netem}[backend]
    print(json.dumps(run(name, address, peer, LinkShape(**json.loads(shape)))), flush=True)


def userspace(name: str, address: str, peer: str, shape: LinkShape) -> dict[str, object]:
    """Carry packets between two TUN devices until standard input ends."""
    hub = open_tun(name, address, peer)
    new_namespace()
    region = open_tun(name, peer, address)
    down, up = Direction(shape, 2 * shape.seed), Direction(shape, 2 * shape.seed + 1)
    print("ready", flush=True)
    ways = {hub: (region, down), region: (hub, up)}
    while 0 not in (readable := _wait(list(ways), down, up)):
        for source in readable:
            _read(source, ways[source][1])
        for target, direction in ways.values():
            _write(target, direction)
    return {"down": asdict(down.counts), "up": asdict(up.counts)}


def _wait(devices: list[int], *directions: Direction) -> list[int]:
    """Wait for input or a due packet; return the descriptors that can be read."""
    due = [at for at in (direction.next_at() for direction in directions) if at is not None]
    timeout = max(0.0, min(due) - time.monotonic()) if due else None
    return select.select([0, *devices], [], [], timeout)[0]


def _read(source: int, direction: Direction) -> None:
    for _ in range(BATCH):
        try:
            packet = os.read(source, MTU_BYTES)
        except BlockingIOError:
            return
        direction.offer(packet, time.monotonic())


def _write(target: int, direction: Direction) -> None:
    for packet in direction.due(time.monotonic()):
        try:
            os.write(target, packet)
        except (BlockingIOError, OSError):
            direction.counts.overflowed += 1


def netem(name: str, address: str, peer: str, shape: LinkShape) -> dict[str, object]:
    """Let the kernel shape a pair of virtual Ethernet devices until standard input ends."""
    hub_namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    inside = f"{name}r"
    _tool("ip", "link", "add", name, "type", "veth", "peer", "name", inside)
    holder = os.getpid()
    new_namespace()
    outside = ("nsenter", f"--net=/proc/self/fd/{hub_namespace}")
    _tool(*outside, "ip", "link", "set", inside, "netns", str(holder), keep=hub_namespace)
    for prefix, device, own, other in (((*outside,), name, address, peer), ((), inside, peer, address)):
        _tool(*prefix, "ip", "addr", "add", own, "peer", other, "dev", device, keep=hub_namespace)
        _tool(*prefix, "ip", "link", "set", device, "up", keep=hub_namespace)
        _tool(*prefix, "tc", "qdisc", "add", "dev", device, "root", "netem", *_options(shape), keep=hub_namespace)
    print("ready", flush=True)
    sys.stdin.read()
    return {}


def _options(shape: LinkShape) -> list[str]:
    options = ["delay", f"{shape.delay_ms:g}ms"]
    if shape.loss:
        options += ["loss", f"{100 * shape.loss:g}%"]
    if shape.bits_per_second:
        packets = max(16, int(shape.bits_per_second * (shape.queue_ms + shape.delay_ms) / 1e3 / 12_000))
        options += ["rate", f"{shape.bits_per_second:g}bit", "limit", str(packets)]
    return options


def _tool(*command: str, keep: int = -1) -> None:
    subprocess.run(command, check=True, pass_fds=[] if keep < 0 else [keep])


if __name__ == "__main__":
    main()
