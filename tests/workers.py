"""How tests are shared out to the workers of `make test`.

    python -m pytest -p tests.workers --numprocesses 3 --no-loadscope-reorder

A worker takes a file at a time. The files of `WHOLE_LOOP` are one unit of work, since their tests look at one
demonstration that has ended, and the first: they take longest, and wait for other processes half of the time, in which
the other workers have the cores.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

WHOLE_LOOP = frozenset(
    f"tests/system/test_{name}.py" for name in ("chaos", "demo", "real_time", "replay", "serving_format")
)
UNIT = "tests/system"


def unit_of(node: str) -> str:
    """The unit of work of a test, by its node id."""
    file = node.partition("::")[0]
    return UNIT if file in WHOLE_LOOP else file


class Units(LoadFileScheduling):
    """Gives each worker one unit of work after the other, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Units:
    """Schedule these units."""
    return Units(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of the whole loop first."""
    items.sort(key=lambda item: unit_of(item.nodeid) != UNIT)
