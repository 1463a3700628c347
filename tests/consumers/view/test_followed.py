"""One thumb, followed in clicks from the list of interactions to the record of the version that learnt from it."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.consumers.view.conftest import Look, View
from tests.consumers.view.run_records import ONLINE_STEP

STAGES = {"served", "feedback", "outcome", "batch", "step", "version", "replica", "decision"}


def test_a_thumb_is_followed_to_the_version(view: View, look: Look):
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
    assert set(stages) == STAGES
    look.shoot("interaction")
    rows.nth(stages.index("version")).get_by_role("link").last.click()
    page.wait_for_url(re.compile("/log/record"))
    look.settle()
    expect(page.locator("main")).to_contain_text("weights.manifests")
    expect(page.locator("main")).to_contain_text(f"f{ONLINE_STEP}")
    look.shoot("record-of-a-version")
