"""How tests are shared out to the workers of `make test`.

    python -m pytest -p tests.workers --numprocesses 3 --no-loadscope-reorder

Each worker imports every test file, and pytest writes its assertions anew for a file that has no bytecode yet, which
takes half of the time. So each begins with other folders, and finds the bytecode of the folders that the others have
imported meanwhile; the order of the tests is the same for all.

A worker takes a file at a time. The files of `WHOLE_LOOP` are one unit of work, since their tests look at one
demonstration that has ended, and the first: they take longest, and wait for other processes half of the time, in which
the other workers have the cores. Then come the files with tests that the fast lane leaves out, which take long, and
then the rest, so that no worker ends with a long file while the others have nothing left.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.fast_lane import is_left_out

WHOLE_LOOP = frozenset(f"tests/system/test_{name}.py" for name in ("chaos", "demo", "real_time", "replay"))
UNIT = "tests/system"


def unit_of(node: str) -> str:
    """The unit of work of a test, by its node id."""
    file = node.partition("::")[0]
    return UNIT if file in WHOLE_LOOP else file


class Units(LoadFileScheduling):
    """Gives each worker one unit of work after the other, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """Where all tests are to run, let each worker begin with folders of its own."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        (tests,) = (config.rootpath / path for path in config.getini("testpaths"))
        parts = sorted(path for path in tests.iterdir() if path.is_dir() or path.match("test_*.py"))
        first = len(parts) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = [str(path) for path in (*parts[first:], *parts[:first])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Units:
    """Schedule these units."""
    return Units(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of the whole loop first, then those with tests that take long; one order for all workers."""
    long = {item.path for item in items if is_left_out(item)}
    items.sort(key=lambda item: (unit_of(item.nodeid) != UNIT, item.path not in long, item.path.parent, item.path.name))
