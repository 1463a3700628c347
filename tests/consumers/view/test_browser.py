"""The page in a real browser: each view of a finished run and of one in progress, and failures that it must survive."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from tests.consumers.view.conftest import WITHOUT_REST, LiveView, Look, View, serving, tables_process
from tests.consumers.view.run_records import ONLINE_STEP
from tests.waiting import until
from tidemill.consumers.view.panels import PAGES

PHONE = {"viewport": {"width": 400, "height": 800}, "device_scale_factor": 1, "is_mobile": True, "has_touch": True}
MOST_BYTES = 300_000
"""Limit of a first load, in transferred bytes."""
SERIOUS = {"serious", "critical"}
VIEWS = ["run", "rollouts", "weights"]
"""Views whose panels are of every kind: plots and numbers, a part of a page, and a graph and tables."""
ROWS = "() => document.querySelectorAll('#answer .scroll tbody tr').length === {}"


def assert_accessible(page: Page, *rules: str) -> None:
    """Check a page by the rules with these names; by default, by all."""
    # Without the elements that pass, for each of which it would search a unique selector.
    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    found = Axe().run(page, options=options).response["violations"]
    bad = [
        (rule["id"], rule["help"], [node["target"] for node in rule["nodes"]][:3])
        for rule in found
        if rule["impact"] in SERIOUS
    ]
    assert not bad


def assert_fits(page: Page) -> None:
    """Check that the page itself does not scroll sideways; tables scroll within."""
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, f"{wide} pixels too wide"


def assert_whole(page: Page, name: str) -> None:
    """Check that a view shows its title, and that every panel could be read."""
    title = next(each.title for each in PAGES if each.path == name)
    expect(page.get_by_role("heading", level=1)).to_have_text(title)
    expect(page.locator(".failed:visible")).to_have_count(0)


@pytest.mark.parametrize("name", [page.path for page in PAGES])
def test_a_view_of_a_run_that_is_over(view: View, look: Look, name: str):
    page = look.open(f"{view.url}/{name}")
    assert_whole(page, name)
    assert_fits(page)
    assert_accessible(page)
    look.shoot(f"{name}-light")
    page.emulate_media(color_scheme="dark")
    assert_accessible(page, "color-contrast")
    look.shoot(f"{name}-dark")
    page.set_viewport_size(PHONE["viewport"])
    look.settle()
    assert_fits(page)
    look.shoot(f"{name}-phone")


@pytest.mark.parametrize(("name", "text"), [("run", ".u-legend .u-label"), ("users", ".flow li a")])
def test_a_long_name_of_a_series_or_a_part_is_folded(view: View, look: Look, name: str, text: str):
    page = look.open(f"{view.url}/{name}")
    page.locator(text).first.evaluate("label => { label.textContent = 'W'.repeat(300) }")
    assert_fits(page)


def test_dark_is_dark(view: View, look_as: Callable[..., Look]):
    grounds = []
    for scheme in ("light", "dark"):
        page = look_as(color_scheme=scheme).open(f"{view.url}/run")
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", ground)[:3])) for ground in grounds)
    assert dark < 150 < 600 < light


def test_a_first_load_is_small(view: View, look: Look):
    sizes: list[int] = []
    look.page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    look.open(f"{view.url}/run")
    assert 0 < sum(sizes) <= MOST_BYTES


def test_numbers_of_age_are_drawn_and_then_read_at_once(view: View, look_as: Callable[..., Look]):
    def look_at(age: str) -> Look:
        def reply(route: Route) -> None:
            answer = route.fetch()
            text = re.sub(r'data-age="\d+"', f'data-age="{age}"', answer.text())
            route.fulfill(response=answer, body=re.sub(r'data-refresh="\d+"', 'data-refresh="900000"', text))

        look = look_as()
        look.page.route("**/weights", reply)
        return look

    look_as().open(f"{view.url}/weights")
    read: list[str] = []
    fresh, old = look_at("600"), look_at("901")
    fresh.page.on("request", lambda request: read.append(request.url) if "/panel/" in request.url else None)
    fresh.open(f"{view.url}/weights")
    assert not read
    with old.page.expect_request("**/panel/weight_graph?*"):
        old.open(f"{view.url}/weights")


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_run_in_progress_is_read_again(live: LiveView, look: Look, name: str):
    """Panels in sight are requested again and show the new rows."""
    page = look.open(f"{live.url}/{name}")
    assert_whole(page, name)
    step = live.add_step()
    if page.locator("[data-panel]:not([data-still])").count():
        with page.expect_response(lambda answer: "/panel/" in answer.url or "/part/" in answer.url):
            pass
    if name == "weights":
        expect(page.get_by_role("cell", name=str(step), exact=True).first).to_be_visible()
    look.settle()
    assert_whole(page, name)


def test_a_hidden_page_sends_no_requests(live: LiveView, look: Look):
    page = look.open(f"{live.url}/run")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    until(lambda: page.wait_for_timeout(50) or asked)
    page.evaluate("Object.defineProperty(document, 'visibilityState', { get: () => 'hidden' })")
    # Three times `view.refresh_s`. A request from before may be reported late.
    until(lambda: asked.clear() or page.wait_for_timeout(1500) or not asked, "no requests", deadline_s=30)


def test_the_keyboard_alone_is_enough(view: View, look: Look):
    page = look.open(f"{view.url}/run")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    expect(page.get_by_role("link", name="Skip to content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    inside = "document.querySelector('main').contains(document.activeElement)"
    assert page.evaluate(inside)
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.goto(f"{view.url}/run")
    link = page.get_by_role("navigation").get_by_role("link", name=PAGES[-1].title)
    until(lambda: page.keyboard.press("Tab") or link.evaluate("one => one === document.activeElement"))
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(f"/{PAGES[-1].path}$"))
    look.settle()
    page.goto(f"{view.url}/run")
    look.settle()
    numbers = page.locator("details:not([open]) > summary").first
    until(lambda: page.keyboard.press("Tab") or numbers.evaluate("one => one === document.activeElement"))
    page.keyboard.press("Enter")
    expect(page.locator("details[open] table").first).to_be_visible()


def test_a_dead_engine_is_a_message_and_the_page_comes_back(
    look_as: Callable[..., Look], tmp_path_factory: pytest.TempPathFactory
):
    directory = tmp_path_factory.mktemp("dead")
    settings = (f"sink.path={directory / 'tables'}", "view.refresh_s=0.5")
    arguments = [word for setting in settings for word in ("--set", setting)]
    with serving(directory / "view.log", *arguments, program=WITHOUT_REST) as (url, _process):
        # So high that every panel is in sight: only those are requested again.
        look = look_as(viewport={"width": 1280, "height": 8000})
        page = look.open(f"{url}/run")
        expect(page.locator(".failed").first).to_contain_text("start `tidemill sink`")
        assert_accessible(page)
        look.shoot("dead-engine")
        with tables_process(directory / "tables") as tables:
            expect(page.locator(".failed:visible")).to_have_count(0)
            expect(page.locator(".plot").first).to_be_visible()
            tables.kill()
        expect(page.locator(".failed").first).to_contain_text("does not answer")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        page.close()  # before the server ends, whose absence it would note


@pytest.mark.parametrize("options", [{}, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("rollout", ["g5-0-1", "g5-0-2"], ids=["markup", "a megabyte without a space"])
def test_a_hostile_rollout_is_text(view: View, look_as: Callable[..., Look], rollout: str, options: dict[str, object]):
    look = look_as(**options)
    page = look.open(f"{view.url}/rollouts/{rollout}")
    until(lambda: page.wait_for_timeout(50) or "It is 12" in page.content() or "assistant" in page.content())
    assert page.title() != "taken" and page.locator("main script:not([type]), main img").count() == 0
    assert_fits(page)
    shown = page.locator("main").inner_text()
    assert not set(shown) & set("\x1b\x00\u202e\u2066")
    assert rollout != "g5-0-1" or '<script>document.title = "taken"</script>' in shown.replace("\n", "")
    look.shoot(f"hostile-{rollout}-{'phone' if options else 'wide'}")


def test_a_view_comes_with_its_numbers_also_to_its_first_reader(
    view: View, look_as: Callable[..., Look], tmp_path: Path
):
    settings = (f"sink.path={view.sink.directory}", "view.refresh_s=3600")
    arguments = [word for setting in settings for word in ("--set", setting)]
    with serving(tmp_path / "view.log", *arguments) as (url, _process):

        def shown_without_asking(path: str, *titles: str) -> bool:
            look, asked = look_as(), list[str]()
            look.page.on("request", lambda request: asked.append(urlsplit(request.url).path))
            page = look.open(f"{url}/{path}")
            for title in titles:
                panel = page.get_by_role("region", name=title, exact=True)
                panel.scroll_into_view_if_needed()
                expect(panel.locator("canvas, tbody td").first).to_be_visible()
            look.context.close()  # before the server ends, whose absence it would note
            return not any("/panel/" in request for request in asked)

        # Views are read in order after the start; the page begins to answer before a slow read ends.
        until(lambda: shown_without_asking("run", "Held-out success by weight version"))
        until(lambda: shown_without_asking("users", "Satisfaction by arm and version", "Arms"))


def test_the_address_keeps_the_question_and_the_plot(view: View, look: Look):
    page = look.open(f"{view.url}/ask?name=held_out_by_version")
    page.wait_for_selector("#answer canvas")
    page.select_option("#answer select[name=kind]", "bars")
    assert "name=held_out_by_version" in page.url and "kind=bars" in page.url
    page.fill("#q", "SELECT step, tokens FROM train_steps WHERE step > {least:Int64} ORDER BY step")
    page.fill("input[name=param_least]", "3")
    page.press("#q", "Control+Enter")
    page.wait_for_function(ROWS.format(4))
    assert re.search(r"[?&]q=SELECT.*&param_least=3", page.url) and "name=" not in page.url
    page.reload()
    page.wait_for_function(ROWS.format(4))
    assert page.input_value("input[name=param_least]") == "3"
    page.select_option("#answer select[name=x]", "step")
    page.select_option("#answer select[name=y]", "tokens")
    page.wait_for_selector("#answer canvas")
    page.fill("#q", "SELECT nothing")
    page.press("#q", "Control+Enter")
    page.wait_for_selector("#answer [role=alert]")
    page.go_back()
    page.wait_for_function(ROWS.format(4))
    with page.expect_download() as download:
        page.click("text=CSV >> nth=0")
    assert download.value.suggested_filename == "answer.csv"


def test_from_a_topic_to_a_record_in_clicks(view: View, look: Look):
    page = look.open(f"{view.url}/log")
    page.click("section[aria-label=Topics] tr:has-text('tidemill.groups') >> text=records")
    page.click("#answer tr:has-text('tidemill.groups') >> text=records")
    page.click("#answer tbody tr:last-child a")
    page.click("text=members", trial=True)
    assert page.url.endswith("/log/record?topic=tidemill.groups&partition=0&offset=0")


def test_from_the_list_to_a_conversation_and_its_colours_in_clicks(view: View, look: Look):
    page = look.open(f"{view.url}/rollouts")
    page.get_by_label("group").fill("g5-0")
    page.get_by_role("button", name="Search").click()
    look.settle()
    assert "group=g5-0" in page.url
    page.get_by_role("link", name="g5-0-1").click()
    look.settle()
    page.get_by_role("link", name="weight version").click()
    look.settle()
    assert page.locator("article .hue0").count() > 0
    assert page.title().startswith("Rollout g5-0-1")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    look.shoot("rollout")


def test_a_thumb_is_followed_in_clicks_to_the_step_and_to_the_version(view: View, look: Look):
    page = look.open(f"{view.url}/run")
    page.get_by_role("navigation").get_by_role("link", name="Users").click()
    look.settle()
    page.locator("[data-panel^='/panel/interaction_list']").scroll_into_view_if_needed()
    page.get_by_role("link", name="i0", exact=True).first.click()
    page.wait_for_url(re.compile("/users/i0"))
    look.settle()
    rows = page.locator("[data-panel^='/panel/interaction_path?'] tbody tr")
    stages = rows.locator("td:first-child").all_inner_texts()
    assert stages == [row["stage"] for row in view.get("/panel/interaction_path.json?interaction=i0").json()]
    assert set(stages) == {"served", "feedback", "outcome", "batch", "step", "version", "replica", "decision"}
    look.shoot("interaction")
    for stage, told in {"step": ["train_steps"], "version": ["weights.manifests", f"f{ONLINE_STEP}"]}.items():
        rows.nth(stages.index(stage)).get_by_role("link").last.click()
        page.wait_for_url(re.compile("/log/record"))
        look.settle()
        for text in told:
            expect(page.locator("main")).to_contain_text(text)
        look.shoot(f"record-of-a-{stage}")
        page.go_back()
        look.settle()
