"""How fast the page is in a real browser, compared with its bare queries, and what it costs the sink.

    python tests/bench/bench_view.py views [--rollouts 1000 1000000] [--times 20] [--seed 0]
    python tests/bench/bench_view.py cost [--rollouts 1000 1000000] [--periods 8] [--seconds 20] [--seed 0]

One JSON line per figure, over tables of the given number of rollouts, filled by INSERT SELECT.
`views`: time from the request until every visible panel is drawn, for each view: from a page that has just started, in
a browser without a cache (`cold`); from a page in use, in a new tab of a browser that has its scripts (`first`), after
a click on the view's link (`click`) and after a click on its first row with a link (`follow`); from a page whose
results have all expired, until the old numbers are drawn (`idle`) and until the new ones are (`renewed`); the bytes of
a load without a cache; the time of each of the view's queries sent directly to the engine (`queries`).
`cost`: rows a second and CPU a row of the sink's write path, in alternating periods with and without a browser on Run.
`lost` is the share of rows a second that watched periods lose, `lost_by_pair` the same for each consecutive pair.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import httpx
from playwright.sync_api import Browser, Locator, Request, sync_playwright

from tests.bench.bench_sink import flush_of
from tests.consumers.view.conftest import QUIET, Look, browser_path, serving, until
from tidemill.consumers.sink.config import SinkSettings
from tidemill.consumers.sink.engine import connect
from tidemill.consumers.sink.http_api import query_server
from tidemill.consumers.sink.query import SinkState, write_state
from tidemill.consumers.sink.writer import Writer
from tidemill.consumers.view.panels import PAGES, panels
from tidemill.consumers.view.tables import LONGEST_S, REST_S

MEMBERS, GROUPS_A_STEP, TOKENS = 8, 32, 200
AT = "toDateTime64('2026-11-01 00:00:00', 6, 'UTC') + toIntervalMillisecond({})"
ALSO = {"rollouts": ("rollout_list", "rollout_choices")}
"""Queries of views that have no panels."""
MERGED_S = 3600.0
WINDOW_MS = 3000.0
GROUP = "concat('big/', toString({}))"
MEMBER = f"concat({GROUP.format('number')}, '/', toString(i))"


def fill(client: Any, rollouts: int, seed: int) -> None:
    """Fill the tables of a run: groups of 8, 32 groups a step, 200 tokens a rollout, two replicas, a tenth held out.

    The seed decides which rollouts fail and the rewards of the others.
    """
    groups = rollouts // MEMBERS
    steps = max(1, groups // GROUPS_A_STEP)
    of = f"intDiv(number, {MEMBERS})"
    member = f"number * {MEMBERS} + i"
    lost, earned = (f"cityHash64({{}}, {seed}, '{what}') % {of}" for what, of in (("lost", "97 = 0"), ("earned", "11")))
    failed, share = lost.format("number"), earned.format("number")
    version = f"intDiv(number, {MEMBERS * GROUPS_A_STEP})"
    kind = "['ledger', 'reasoning_gym:chain_sum', 'sql'][1 + {} % 3]"
    mode = "if({} % 10 = 0, 'eval', 'train')"
    each = f"range({MEMBERS})"

    def insert(table: str, topic: str, rows: int, partition: str, offset: str, **columns: str) -> None:
        places = {"_topic": f"'tidemill.{topic}'", "_partition": partition, "_offset": offset, "_timestamp": "now64(3)"}
        given = {**places, **{name.replace("__", "."): value for name, value in columns.items()}}
        names = ", ".join(f"`{name}`" for name in given)
        client.command(
            f"INSERT INTO `tidemill`.`{table}` ({names}) SELECT {', '.join(given.values())} FROM numbers({rows})"
        )

    insert(
        *("rollouts", "rollouts", rollouts, f"{of} % 8", f"intDiv({of}, 8) * {MEMBERS} + number % {MEMBERS}"),
        rollout_id=f"concat({GROUP.format(of)}, '/', toString(number % {MEMBERS}))",
        group_id=GROUP.format(of),
        task_id=GROUP.format(of),
        run_id="'big'",
        environment=kind.format(of),
        mode=mode.format(of),
        index=f"number % {MEMBERS}",
        group_size=str(MEMBERS),
        status=f"if({failed}, 'failed', 'completed')",
        failure=f"if({failed}, 'the replica did not answer', '')",
        reward=f"if({failed}, NULL, ({share}) / 10)",
        success=f"if({failed}, NULL, {share} > 6)",
        turns="3",
        prompt_tokens=str(TOKENS // 2),
        sampled_tokens=str(TOKENS // 2),
        version_min=version,
        version_max=version,
        replica_id="concat('replica-', toString(number % 2))",
        started_at=AT.format("number * 20"),
        finished_at=AT.format("number * 20 + 5000"),
        segments__n_tokens=f"[{TOKENS}]",
        token_ids=f"arrayMap(i -> toUInt32(cityHash64(number, i, {seed}) % 50000), range({TOKENS}))",
        loss_mask=f"arrayMap(i -> toUInt8(i % 20 > 9), range({TOKENS}))",
        logprobs=f"arrayMap(i -> toFloat32(-(cityHash64(i, number, {seed}) % 1000) / 300), range({TOKENS}))",
        spans__segment="[0]",
        spans__version=f"[toInt64({version})]",
        spans__start="[0]",
        spans__end=f"[{TOKENS}]",
        rewards__name="['right']",
        rewards__value=f"[({share}) / 10]",
        rewards__weight="[1.0]",
    )
    insert(
        *("tasks", "tasks", groups, "number % 8", "intDiv(number, 8)"),
        task_id=GROUP.format("number"),
        group_id=GROUP.format("number"),
        run_id="'big'",
        environment=kind.format("number"),
        mode=mode.format("number"),
        group_size=str(MEMBERS),
        payload="concat('{\"question\": \"add up account ', toString(number), repeat(' lorem ipsum', 20), '\"}')",
        issued_at=AT.format(f"number * 20 * {MEMBERS}"),
        issued_version=f"intDiv(number, {GROUPS_A_STEP})",
    )
    no_reward, share = lost.format(member), earned.format(member)
    insert(
        *("groups", "groups", groups, "number % 8", "intDiv(number, 8)"),
        group_id=GROUP.format("number"),
        task_id=GROUP.format("number"),
        run_id="'big'",
        environment=kind.format("number"),
        mode=mode.format("number"),
        closed_by="'size'",
        expected_size=str(MEMBERS),
        members__rollout_id=f"arrayMap(i -> {MEMBER}, {each})",
        members__topic=f"arrayMap(i -> 'rollouts', {each})",
        members__partition=f"arrayMap(i -> toInt64(number % 8), {each})",
        members__offset=f"arrayMap(i -> toInt64(intDiv(number, 8) * {MEMBERS} + i), {each})",
        members__status=f"arrayMap(i -> if({no_reward}, 'failed', 'completed'), {each})",
        members__reward=f"arrayMap(i -> if({no_reward}, NULL, ({share}) / 10), {each})",
        members__advantage=f"arrayMap(i -> if({no_reward}, NULL, 0.1), {each})",
        members__success=f"arrayMap(i -> if({no_reward}, NULL, {share} > 6), {each})",
        members__sampled_tokens=f"arrayMap(i -> toInt64({TOKENS // 2}), {each})",
        members__version_min=f"arrayMap(i -> toInt64(intDiv(number, {GROUPS_A_STEP})), {each})",
        members__version_max=f"arrayMap(i -> toInt64(intDiv(number, {GROUPS_A_STEP})), {each})",
        mean_reward="0.5",
        opened_at=AT.format(f"number * 20 * {MEMBERS}"),
        closed_at=AT.format(f"number * 20 * {MEMBERS} + 9000"),
    )
    all_of = f"range(number * {GROUPS_A_STEP}, (number + 1) * {GROUPS_A_STEP})"
    used, left_out = (f"arrayFilter(g -> g % 10 {sign} 0, {all_of})" for sign in ("!=", "="))
    places: dict[str, str] = {}
    for name, chosen in (("inputs", used), ("exclusions", left_out)):
        places[f"{name}__group_id"] = f"arrayMap(g -> {GROUP.format('g')}, {chosen})"
        places[f"{name}__topic"] = f"arrayMap(g -> 'groups', {chosen})"
        places[f"{name}__partition"] = f"arrayMap(g -> toInt64(g % 8), {chosen})"
        places[f"{name}__offset"] = f"arrayMap(g -> toInt64(intDiv(g, 8)), {chosen})"
    insert(
        *("train_steps", "train.steps", steps, "0", "number"),
        run_id="'big'",
        step="number + 1",
        version="number + 1",
        parent_version="number",
        **places,
        exclusions__reason=f"arrayMap(g -> 'eval', {left_out})",
        exclusions__rollouts=f"arrayMap(g -> toInt64({MEMBERS}), {left_out})",
        objective="'composer2'",
        learning_rate="0.00004",
        metrics="map('mismatch/k3', 0.01, 'mismatch/k1', 0.001, 'mismatch/ess', 0.9, 'policy_lag_bound', 4)",
        lag__lag="[0, 1, 2]",
        lag__tokens="[10000, 2000, number % 3000]",
        rollouts="230",
        tokens="23000",
        started_at=AT.format("number * 5120"),
        finished_at=AT.format("number * 5120 + 4000"),
    )
    insert(
        *("weights_manifests", "weights.manifests", steps + 1, "0", "number"),
        run_id="'big'",
        branch="'main'",
        version="number",
        parent="if(number = 0, NULL, number - 1)",
        step="number",
        learning_rate="0.00004",
        n_elements="134515008",
        n_changed="5000000 + number",
        delta_bytes="4000000 + number",
        anchor_uri="if(number % 20 = 0, 'file:///anchors', NULL)",
        fingerprint="toString(number)",
        trained_at=AT.format("number * 5120"),
        published_at=AT.format("number * 5120"),
    )
    insert(
        *("weights_acks", "weights.acks", 2 * steps, "0", "number"),
        replica_id="concat('replica-', toString(number % 2))",
        region="'local'",
        run_id="'big'",
        branch="'main'",
        version="intDiv(number, 2)",
        serving_version="intDiv(number, 2)",
        status="'proved'",
        fingerprint="'f'",
        expected_fingerprint="'f'",
        pause_ms="40 + number % 10",
        step_to_served_ms="3000",
        at=AT.format("number * 2560"),
    )


def say(**figure: object) -> None:
    print(json.dumps({**figure, "load": round(os.getloadavg()[0], 1)}), flush=True)


def shares(milliseconds: list[float]) -> dict[str, float]:
    ordered = sorted(milliseconds)
    return {"p50_ms": round(statistics.median(ordered)), "p95_ms": round(ordered[math.ceil(0.95 * len(ordered)) - 1])}


@contextmanager
def opened(folder: Path, rollouts: int, seed: int) -> Iterator[tuple[Any, Writer, str, Browser]]:
    """Open filled tables in this process; yields them, the address of their engine, and a browser.

    The tables are copied from the parent of `folder`. They are made there if they do not exist.
    """
    sink = SinkSettings(path=str(folder / "tables"), http_port=0)
    kept = folder.parent / f"tables-{rollouts}-{seed}"
    if kept.is_dir():
        shutil.copytree(kept, sink.directory, symlinks=True)
    client = connect(sink)
    try:
        writer = Writer(client, sink.database, sink.table_engine)
        with query_server(sink) as server, sync_playwright() as driver:
            write_state(sink.directory, SinkState(os.getpid(), server.url, sink.database))
            filled = 0.0
            if not kept.is_dir():
                filled = timed(lambda: fill(client, rollouts, seed))
                merging = "SELECT count() FROM system.merges"
                until(lambda: client.query(merging).result_rows[0][0] == 0, MERGED_S)
                shutil.copytree(sink.directory, kept, symlinks=True)
            size = client.query("SELECT sum(bytes_on_disk) FROM system.parts WHERE active").result_rows[0][0]
            say(
                figure="tables",
                rollouts=rollouts,
                seed=seed,
                mebibytes=round(size / 2**20),
                fill_s=round(filled / 1000),
            )
            browser = driver.chromium.launch(executable_path=browser_path(), args=list(QUIET))
            yield client, writer, server.url, browser
            browser.close()
    finally:
        client.close()


def page_over(folder: Path) -> AbstractContextManager[tuple[str, object]]:
    """Start a page."""
    return serving(folder / "view.log", "--set", f"sink.path={folder / 'tables'}")


def timed(act: Callable[[], object]) -> float:
    """Return the milliseconds that a call takes."""
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def look_with(browser: Browser) -> Look:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    return Look(context.new_page(), context)


def measure_views(rollouts: int, seed: int, times: int, idles: int, folder: Path) -> None:
    with opened(folder, rollouts, seed) as (_client, _writer, engine, browser):
        cold: dict[str, list[float]] = {page.path: [] for page in PAGES}
        sizes: dict[str, list[int]] = {page.path: [] for page in PAGES}
        for _ in range(times):
            with page_over(folder) as (url, _):
                for page in PAGES:
                    look = look_with(browser)
                    loaded: list[Request] = []
                    look.page.on("requestfinished", lambda request, loaded=loaded: loaded.append(request))
                    cold[page.path].append(timed(lambda page=page, look=look: look.open(f"{url}/{page.path}")))
                    sizes[page.path].append(sum(map(wire_bytes, list(loaded))))
                    look.context.close()
        idle, renewed = measure_idle(browser, idles, folder)
        with page_over(folder) as (url, _), httpx.Client(timeout=60) as client:
            window = look_with(browser)
            # Chromium itself loads more than a hundred files for each new window.
            window.page.wait_for_timeout(WINDOW_MS)
            for page in PAGES:
                bare = {name: bare_ms(client, engine, name, times) for name in page.panels or ALSO.get(page.path, ())}
                other = PAGES[0] if page is not PAGES[0] else PAGES[3]
                for each in (page, other):
                    window.open(f"{url}/{each.path}")
                first, click, follow = [], [], []
                for _ in range(times):
                    look = Look(window.context.new_page(), window.context)
                    first.append(timed(lambda page=page, look=look: look.open(f"{url}/{page.path}")))
                    look.open(f"{url}/{other.path}")
                    link = look.page.get_by_role("navigation").get_by_role("link", name=page.title, exact=True)
                    click.append(timed(lambda link=link, look=look: follow_link(look, link)))
                    row = look.page.locator("main td a[href^='/']:visible").first
                    if row.count():
                        follow.append(timed(lambda row=row, look=look: follow_link(look, row)))
                    look.page.close()
                say(
                    figure="view",
                    rollouts=rollouts,
                    view=page.path,
                    cold=shares(cold[page.path]),
                    first=shares(first),
                    click=shares(click),
                    follow=shares(follow) if follow else "no row leads on",
                    idle=shares(idle[page.path]),
                    renewed=shares(renewed[page.path]),
                    bytes=max(sizes[page.path]),
                    queries=bare,
                )


def measure_idle(browser: Browser, idles: int, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the milliseconds until each view's old numbers and its new ones are drawn after a pause."""
    drawn: dict[str, list[float]] = {page.path: [] for page in PAGES}
    renewed: dict[str, list[float]] = {page.path: [] for page in PAGES}
    with page_over(folder) as (url, _):
        window = look_with(browser)
        for turn in range(-1, idles):  # The first turn fills the caches of page and browser and is not counted.
            for path in drawn:
                look = Look(window.context.new_page(), window.context)
                began = time.perf_counter()
                look.open(f"{url}/{path}")
                read = time.perf_counter()
                look.page.wait_for_function("() => !document.querySelector('[aria-busy=true]:has(.from)')")
                if turn >= 0:
                    drawn[path].append((read - began) * 1000)
                    renewed[path].append((time.perf_counter() - began) * 1000)
                look.page.close()
            window.page.wait_for_timeout((LONGEST_S + REST_S + 1) * 1000)
        window.context.close()
    return drawn, renewed


def follow_link(look: Look, link: Locator) -> None:
    """Click on a link and wait until its page is drawn."""
    before = look.page.url
    link.click()
    look.page.wait_for_url(lambda now: now != before, wait_until="commit")
    look.settle()


def wire_bytes(request: Request) -> int:
    found = request.sizes()
    return found["responseBodySize"] + found["responseHeadersSize"]


def bare_ms(client: httpx.Client, engine: str, name: str, times: int) -> dict[str, float]:
    """Time a panel's query, sent directly to the engine over one connection."""
    panel = panels()[name]
    parameters = {"default_format": "JSONCompact", **{f"param_{one}": "" for one in panel.parameters}}
    asked = [timed(lambda: client.post(engine, params=parameters, content=panel.sql)) for _ in range(times)]
    return shares(asked)


def measure_cost(rollouts: int, seed: int, periods: int, seconds: float, folder: Path) -> None:
    with (
        opened(folder, rollouts, seed) as (_client, writer, _engine, browser),
        page_over(folder) as (url, _),
    ):
        made = flush_of(4000, seed)
        offset = 10**9
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for period in range(-1, periods):  # The first period is a warm-up and is not counted.
            watched = period % 4 in (1, 2)
            look = look_with(browser)
            if watched:
                look.open(f"{url}/run")
            wall, cpu, rows, end = time.perf_counter(), time.process_time(), 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                flush = [replace(row, offset=offset + place) for place, row in enumerate(made)]
                writer.write(flush, {("tidemill.rollouts", 0): offset + len(made)})
                offset, rows = offset + len(made), rows + len(made)
                look.page.wait_for_timeout(1)  # The driver reads its messages in this thread.
            if period >= 0:
                found[watched].append((rows / (time.perf_counter() - wall), (time.process_time() - cpu) / rows * 1e6))
            look.context.close()
        rate = {watched: statistics.median(one for one, _ in some) for watched, some in found.items()}
        work = {watched: statistics.median(one for _, one in some) for watched, some in found.items()}
        pairs = zip(found[False], found[True], strict=True)
        say(
            figure="cost to the sink",
            rollouts=rollouts,
            rows_per_s={"alone": round(rate[False]), "watched": round(rate[True])},
            lost=round(1 - rate[True] / rate[False], 4),
            lost_by_pair=[round(1 - watched / alone, 4) for (alone, _), (watched, _) in pairs],
            cpu_us_per_row={"alone": round(work[False], 1), "watched": round(work[True], 1)},
            more_cpu=round(work[True] / work[False] - 1, 4),
            periods={
                "alone": [round(one) for one, _ in found[False]],
                "watched": [round(one) for one, _ in found[True]],
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("views", "cost"))
    parser.add_argument("--rollouts", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--times", type=int, default=20, help="how often each view is looked at")
    parser.add_argument("--idles", type=int, default=3, help="how often each view is looked at after a pause")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--periods", type=int, default=8, help="even: half of them are watched")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a period")
    parser.add_argument("--directory", type=Path, help="where filled tables are kept for later runs")
    options = parser.parse_args()
    if options.periods % 2:
        parser.error("--periods must be even: half of them are watched")
    if not browser_path():
        parser.error("there is no browser: install Debian's package `chromium`")
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        for rollouts in options.rollouts:
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                if options.what == "views":
                    measure_views(rollouts, options.seed, options.times, options.idles, Path(folder))
                else:
                    measure_cost(rollouts, options.seed, options.periods, options.seconds, Path(folder))


if __name__ == "__main__":
    main()
