"""Distribution of tests to the workers of `make test`.

    python -m pytest -p tests.workers --numprocesses 4 --no-loadscope-reorder

Each worker imports every test file, and pytest rewrites the assertions of each file that has no bytecode yet, which
takes half of the time. So each worker begins with other folders, and later finds the bytecode of the folders that the
others have imported; the order of the tests is the same for all.

A worker runs one file at a time. Files that use the same finished demonstration, process with vLLM or page are one
unit of work, so that this is made once. These units are first, the longest before the others; the whole loop waits for
other processes half of the time, while the other workers use the cores. Then come the files with tests that the fast
lane leaves out, which take long, and then the other files, so that no worker ends with a long file while the others are
idle.

All workers use the same brokers (tests/brokers.py), which this process stops.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests.brokers import directory_of_brokers
from tests.fast_lane import is_left_out

DRIVERS = ("activations", "engine", "expert_ids", "invariance", "ranks")
UNITS = {
    "finished": tuple(f"tests/system/test_{name}.py" for name in ("chaos", "demo", "real_time", "replay")),
    "driven": tuple(f"tests/consumers/test_replica_{name}.py" for name in DRIVERS),
    "view": ("tests/consumers/view/",),
}
"""By the fixture that they share: the files of a unit, or their folder. The longest unit is first."""
BROKERS, OPEN = pytest.StashKey[str](), pytest.StashKey[ExitStack]()


def unit_of(node: str) -> str:
    """Return the unit of work of a test, by its node id."""
    file = node.partition("::")[0]
    return next((unit for unit, files in UNITS.items() if file.startswith(files)), file)


class Units(LoadFileScheduling):
    """Give each worker one unit of work after the other, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    """If all tests are to run, let each worker begin with different folders."""
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        (tests,) = (config.rootpath / path for path in config.getini("testpaths"))
        parts = sorted(path for path in tests.iterdir() if path.is_dir() or path.match("test_*.py"))
        first = len(parts) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = [str(path) for path in (*parts[first:], *parts[:first])]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Give a worker the directory of the brokers."""
    stash = node.config.stash
    if BROKERS not in stash:
        stash[OPEN] = ExitStack()
        stash[BROKERS] = str(stash[OPEN].enter_context(directory_of_brokers()))
    node.workerinput["brokers"] = stash[BROKERS]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the brokers, if this process has distributed tests."""
    if OPEN in config.stash:
        config.stash[OPEN].close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Units:
    """Return the scheduler of these units."""
    return Units(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the units of several files first, then the files with long tests; the order is the same for all workers."""
    long = {item.path for item in items if is_left_out(item)}
    first = {unit: place for place, unit in enumerate(UNITS)}

    def order(item: pytest.Item) -> tuple[int, bool, Path, str]:
        return first.get(unit_of(item.nodeid), len(first)), item.path not in long, item.path.parent, item.path.name

    items.sort(key=order)
