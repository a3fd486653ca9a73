"""The site in a real browser: axe finds nothing on any page, the table of results obeys the keyboard."""

import pytest

from tests.batch.test_site import site as site

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_axe_finds_nothing_and_no_page_asks_the_network(page, site):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    asked, violations = [], {}
    page.on("request", lambda request: asked.append(request.url))
    for path in [*site.glob("*.html"), *site.glob("notebooks/*.html"), *site.glob("figures/*.html")]:
        page.goto(path.as_uri())
        page.wait_for_timeout(300)
        violations |= {(path.name, v["id"]): v["nodes"][0]["html"] for v in axe.run(page).response["violations"]}
    assert violations == {}
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_results_are_sorted_and_filtered_by_keyboard(page, site):
    page.goto((site / "results.html").as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.get_by_label("Show rows with").fill("toys")
    assert page.get_by_role("status").inner_text() == "1 of 1 rows"
    page.get_by_label("Show rows with").fill("nowhere")
    assert page.get_by_role("status").inner_text() == "0 of 1 rows"
    page.get_by_role("button", name="experiment").focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert page.locator("th", has_text="experiment").get_attribute("aria-sort") == order
