"""The environments that a task may name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tidemill.producers.environment import Environment
from tidemill.producers.ledger import LEDGER


def environments() -> Mapping[str, Environment]:
    """Every environment, by the name that tasks carry."""
    return MappingProxyType({LEDGER.name: LEDGER})
