"""A real browser for the tests of the page: Chromium without a window, driven by playwright."""

import os
import shutil
from pathlib import Path

import pytest

from kiln.observe.report import page as text_of

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def chromium():
    """The browser's program: KILN_CHROMIUM, or one of the usual names."""
    given = os.environ.get("KILN_CHROMIUM")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = chromium()
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium, or name one in KILN_CHROMIUM")
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        except playwright.Error as error:
            if "KILN_CHROMIUM" in os.environ:
                raise
            pytest.skip(f"{program} does not start: {str(error).splitlines()[0]}")
        yield started
        started.close()


class Seen:
    """A page in the browser, with what it complained about and what it asked the network for."""

    def __init__(self, page, errors, requests):
        self.page, self.errors, self.requests = page, errors, requests

    def __getattr__(self, name):
        return getattr(self.page, name)

    def section(self, name):
        self.page.click(f"#tab-{name}")
        return self.page.locator("#main")

    def items(self):
        """The labels of what the graph shows."""
        return self.page.evaluate("STATE.drawing.layout.items.map((item) => item.label)")

    def chosen(self):
        return self.page.evaluate("STATE.drawing.selected && STATE.drawing.selected.label")

    def click_item(self, label, number=0):
        """Click on a node of the drawing where it is seen."""
        at = self.page.evaluate(
            """([label, number]) => {
              const drawing = STATE.drawing, box = drawing.canvas.getBoundingClientRect();
              const all = [...drawing.layout.items, ...drawing.layout.holders];
              const item = all.filter((item) => item.label === label)[number];
              drawing.reveal(item);
              const high = item.open ? 13 : item.h / 2;
              return [box.left + (item.x + item.w / 2 - drawing.x) * drawing.scale, box.top + (item.y + high - drawing.y) * drawing.scale];
            }""",
            [label, number],
        )
        self.page.mouse.click(*at)


@pytest.fixture
def opened(browser, tmp_path):
    """Opens data, or the text of a page, in a new window."""
    pages = []

    def show(given, size=(1280, 800), scheme="light", **options):
        path = tmp_path / f"report{len(pages)}.html"
        if isinstance(given, Path):
            path = given
        else:
            path.write_text(given if isinstance(given, str) else text_of(given), encoding="utf-8")
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, **options)
        errors, requests = [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: (errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.set_default_timeout(5000)
        pages.append(page)
        return Seen(page, errors, requests)

    yield show
    for page in pages:
        page.close()
