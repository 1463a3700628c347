"""Network namespaces and TUN devices, only by system calls, so that no tool must be installed. Linux, as root."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914
SIOCSIFADDR, SIOCSIFDSTADDR = 0x8916, 0x8918
IFF_UP = 1
DEVICE = Path("/dev/net/tun")


def _call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def new_namespace() -> None:
    """Move this thread's process into a new network namespace whose loopback is up. Raises OSError."""
    _call("unshare", CLONE_NEWNET)
    bring_up("lo")


def enter_namespace(pid: int) -> None:
    """Move this process into the network namespace of another. Raises OSError."""
    with open(f"/proc/{pid}/ns/net") as handle:
        _call("setns", handle.fileno(), CLONE_NEWNET)


def open_tun(name: str, address: str, peer: str) -> int:
    """Open a point-to-point TUN device in this namespace, up, with a route to `peer`; return its file descriptor.

    Raises OSError. The device is deleted when the descriptor is closed.
    """
    handle = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
        _set_address(name, SIOCSIFADDR, address)
        _set_address(name, SIOCSIFDSTADDR, peer)
        bring_up(name)
    except OSError:
        os.close(handle)
        raise
    return handle


def bring_up(name: str) -> None:
    """Set a device up. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh14x", name.encode(), 0))
        flags = struct.unpack("16sh14x", request)[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags | IFF_UP))


def _set_address(name: str, request: int, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        where = struct.pack("16sHH4s8x", name.encode(), socket.AF_INET, 0, socket.inet_aton(address))
        fcntl.ioctl(control, request, where)
