"""Fixtures of the page's tests: tables with a run's rows, the real server that reads them, and a real browser.

view      a run that is over: `tidemill view DIRECTORY`
live      a run in progress: another process has the tables open, and `live.add_step()` adds rows
look      a browser's page; its test fails on a console error or a request to another host
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.consumers.view.run_records import ONLINE_STEP, TOKENIZER
from tests.waiting import until
from tidemill.compose.processes import TIDEMILL
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.query import QueryResult, ask

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

ROOT = Path(__file__).parents[3]
REQUIRED = "TIDEMILL_BROWSER"
"""`required`: without a browser these tests fail. Otherwise its path, if Debian's `chromium` is not installed."""
SCREENSHOTS = "TIDEMILL_SCREENSHOTS"
"""Directory for the screenshots of each view; if it is not set, none is made."""
START_S = 120.0
WITHOUT_REST = (
    "-c",
    "import runpy; from tidemill.consumers.view import tables; tables.REST_S = 0.5; "
    "runpy.run_module('tidemill', run_name='__main__', alter_sys=True)",
)
"""The same program, whose results are valid for half a second in place of up to 30."""
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Chromium's own requests are turned off; inside a container it has no sandbox."""


@dataclass
class View:
    """A running `tidemill view`."""

    url: str
    sink: SinkSettings
    process: subprocess.Popen[str]

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Return the answer to a request; redirects are not followed."""
        return httpx.get(self.url + path, timeout=START_S, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=START_S, **options)

    def query(self, sql_or_name: str) -> QueryResult:
        """Return the result that `tidemill query` prints."""
        return ask(self.sink, sql_or_name)


@dataclass
class LiveView(View):
    """A view of tables that another process writes."""

    tables: subprocess.Popen[str]
    steps: int = ONLINE_STEP

    def add_step(self) -> int:
        """Write the rows of one more step; return its number."""
        self.steps += 1
        tell(self.tables, f"{self.steps}\n")
        return self.steps


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """Send a line, if there is one, and wait for the answer."""
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(line)
        process.stdin.flush()
    assert process.stdout.readline() == "ok\n"


@contextmanager
def tables_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that writes the run into `directory` and answers queries as a running sink does."""
    command = [sys.executable, "-m", "tests.consumers.view.tables_process", str(directory)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        tell(process)
        yield process
        with suppress(BrokenPipeError):
            process.communicate(timeout=START_S)


@contextmanager
def serving(
    log: Path, *arguments: str, program: tuple[str, ...] = TIDEMILL, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `tidemill view` with arguments at a free port, with time for queries on a slow machine; yield its address and
    its process."""
    with log.open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *program, "view", *arguments, "--port", "0"],
            cwd=log.parent,
            env={**os.environ, "TIDEMILL_VIEW__QUERY_SECONDS": str(START_S), **environment},
            stderr=errors,
            text=True,
        )
        try:

            def address() -> str:
                said = log.read_text("utf-8")
                assert process.poll() is None, said
                found = re.search(r"the page is at (\S+)", said)
                return found[1] if found else ""

            yield until(address, "the page", START_S), process
        finally:
            process.terminate()
            process.wait(START_S)


@pytest.fixture(scope="package")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer that encoded the run's texts."""
    directory = tmp_path_factory.mktemp("model")
    TOKENIZER.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="package")
def view(tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path) -> Iterator[View]:
    """The page of a run that is over. It ends with the tests of this folder: its engine takes processor time also when
    nobody asks."""
    directory = tmp_path_factory.mktemp("view")
    with tables_process(directory / "tables"):
        pass
    arguments = (str(directory / "tables"), "--set", f"view.model={tokenizer_directory}")
    with serving(directory / "view.log", *arguments) as (url, process):
        yield View(url, SinkSettings(path=str(directory / "tables")), process)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tokenizer_directory: Path) -> Iterator[LiveView]:
    """The page of a run in progress."""
    directory = tmp_path_factory.mktemp("live")
    path = str(directory / "tables")
    settings = (f"sink.path={path}", f"view.model={tokenizer_directory}", "view.refresh_s=0.5")
    assignments = [word for setting in settings for word in ("--set", setting)]
    with (
        tables_process(directory / "tables") as tables,
        serving(directory / "view.log", *assignments) as (url, process),
    ):
        yield LiveView(url, SinkSettings(path=path), process, tables)


def browser_path() -> str:
    """Return the path of the browser; empty if there is none."""
    named = os.environ.get(REQUIRED, "")
    given = "" if named == "required" else named
    return given or shutil.which("chromium") or shutil.which("chromium-browser") or ""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium, driven over its debugging protocol.

    Its scope is one module: Playwright keeps an event loop in the thread that starts it, and a test that calls
    `asyncio.run` during that time fails.
    """
    path = browser_path()
    if not path:
        missing = "no browser: install Debian's package `chromium` to run the page's browser tests"
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=START_S * 1000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(QUIET), timeout=START_S * 1000)
        yield browser
        browser.close()


@dataclass
class Look:
    """A browser's page, with a record of its forbidden actions."""

    page: Page
    context: BrowserContext
    faults: list[str] = field(default_factory=list)

    def open(self, url: str) -> Page:
        """Go to an address and wait until every panel in sight has been read."""
        self.page.goto(url)
        self.settle()
        return self.page

    def settle(self) -> None:
        """Wait until every panel in sight has been read and drawn."""
        self.page.wait_for_load_state()
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('[data-panel]')]"
            ".every((panel) => !panel.querySelector('.wait, .plot:empty')"
            " || !panel.checkVisibility() || panel.getBoundingClientRect().top > innerHeight + 200)"
        )

    def shoot(self, name: str) -> None:
        """Write a screenshot of the whole page, if screenshots are enabled."""
        if directory := os.environ.get(SCREENSHOTS):
            Path(directory).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=Path(directory, f"{name}.png"), full_page=True)

    def watch(self, page: Page) -> None:
        """Record console errors and requests to hosts other than the server's."""
        hosts: set[str] = set()

        def requested(url: str) -> None:
            parts = urlsplit(url)
            if parts.scheme in ("data", "blob", "about"):
                return
            hosts.add(parts.netloc)
            if parts.hostname not in ("127.0.0.1", "localhost"):
                self.faults.append(f"a request to another host: {url}")

        page.on("request", lambda request: requested(request.url))
        page.on("pageerror", lambda error: self.faults.append(f"an error of a script: {error}"))
        page.on(
            "console",
            lambda message: self.faults.append(f"on the console: {message.text}") if message.type == "error" else None,
        )


@pytest.fixture
def look_as(browser: Browser) -> Iterator[Callable[..., Look]]:
    """Open browser pages; the arguments are those of a Playwright context, such as `color_scheme="dark"`."""
    made: list[Look] = []

    def make(**options: Any) -> Look:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(START_S * 1000)
        look = Look(context.new_page(), context)
        look.watch(look.page)
        made.append(look)
        return look

    yield make
    for look in made:
        look.context.close()
    assert not [fault for look in made for fault in look.faults]


@pytest.fixture
def look(look_as: Callable[..., Look]) -> Look:
    """A page of a browser at its default size."""
    return look_as()
