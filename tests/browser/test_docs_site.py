"""The built documentation on a phone: no page is wider than it, none asks a foreign machine."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

SITE = Path(__file__).parents[2] / "build" / "site"
# One of each kind of page: pictures, tables, signatures, a run, charts.
PAGES = (
    "index.html",
    "get-started.html",
    "drafters.html",
    "settings.html",
    "reference/python.html",
    "reference/metrics.html",
    "rounds.html",
    "measured/measured.html",
)
PHONE = {"width": 390, "height": 844}
MEASURED = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
SEEN = "[...document.images].filter(i => i.checkVisibility() && i.loading != 'lazy')"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: scripts/docs builds it")
    handler = partial(_Quiet, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_pages_fit_a_phone_and_ask_nobody_else(browser: Any, site: str) -> None:
    told: list[str] = []
    context = browser.new_context(viewport=PHONE, color_scheme="dark", reduced_motion="reduce")
    page = context.new_page()
    hosts: set[str] = set()

    def failed(error: object) -> None:
        told.append(str(error))

    def said(message: Any) -> None:
        if message.type == "error":
            told.append(message.text)

    def asked(request: Any) -> None:
        hosts.add(urlsplit(str(request.url)).hostname or "")

    page.on("pageerror", failed)
    page.on("console", said)
    page.on("request", asked)
    widths: dict[str, list[int]] = {}
    for name in PAGES:
        page.goto(site + name)
        widths[name] = page.evaluate(MEASURED)
        assert page.evaluate(f"{SEEN}.every(i => i.naturalWidth > 0)"), f"{name}: a broken picture"
    context.close()
    assert {name: found for name, found in widths.items() if found[0] > found[1]} == {}
    assert hosts <= {"127.0.0.1", ""}
    assert told == []


FOUND_FIRST = {
    "api key": "server.html",
    "context length": "models.html",
    "lora": "troubleshooting.html",
    "gpu": "gpu.html",
    "slow": "troubleshooting.html",
    "quantise": "quantise.html",
}


def test_search_finds_the_right_page_first(browser: Any, site: str) -> None:
    api = pytest.importorskip("playwright.sync_api")
    page = browser.new_page(viewport=PHONE)
    for words, wanted in FOUND_FIRST.items():
        page.goto(site + "index.html")
        page.locator("button.md-search__button, label[for=__search]").locator(
            "visible=true"
        ).first.click()
        page.keyboard.type(words)
        found = page.get_by_role("dialog", name="Search").locator("a[href]").first
        api.expect(found).to_have_attribute("href", re.compile(rf"(^|/){wanted}\b"), timeout=30_000)
    page.close()
