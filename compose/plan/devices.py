"""The devices that a plan is made for."""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30
USABLE = 0.9
"""Share of a device's memory that a plan may fill: the rest is for fragments, and for what libraries keep."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one kind, each with memory of its own."""

    count: int
    gib: float
    """GiB of each."""
    gpu: bool
    """False: hosts without a GPU, whose memory all roles on them share."""

    @property
    def usable(self) -> float:
        """Bytes of one device that a plan may fill."""
        return USABLE * self.gib * GIB

    def __str__(self) -> str:
        """As a person reads it."""
        what = "GPU" if self.gpu else "host without a GPU"
        many = "GPUs" if self.gpu else "hosts without a GPU"
        return f"{self.count} {what if self.count == 1 else many} of {self.gib:g} GiB"


def devices_of(gpus: str | None, cpu: str | None) -> Devices:
    """The devices of `8x80`: eight of 80 GiB each. Raises ValueError unless one of the two is given, in that form."""
    if (gpus is None) == (cpu is None):
        raise ValueError("give one of --gpus and --cpu, for instance --gpus 8x80 (eight GPUs of 80 GiB each)")
    text = gpus if gpus is not None else cpu or ""
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6}(?:\.\d+)?)", text.strip())
    if found is None or not int(found[1]) or not float(found[2]):
        raise ValueError(f"{text!r} is not a number of devices and the GiB of each: write for instance 8x80, or 1x23.5")
    return Devices(int(found[1]), float(found[2]), gpus is not None)
