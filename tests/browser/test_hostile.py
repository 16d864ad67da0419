"""Sixty payloads as the output of a model, through the real server: text, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from browser.hostile import PAYLOADS
from browser.pages import TABS, ask, choose_tab, say, strip, visit_again, wait_for_end

OpenPage = Callable[..., Any]
# Elements that no page of ours has, and attributes that nobody writes.
FOREIGN = (
    "iframe,object,embed,img,image,video,audio,base,math,marquee,template,dialog,xss,a[href*=':']"
)
COUNTS = """(foreign) => {
  const all = [...document.querySelectorAll("*")];
  const acting = all.filter((one) => [...one.attributes].some((a) => /^on/i.test(a.name)));
  return [document.querySelectorAll(foreign).length, acting.length];
}"""


def is_inert(page: Any, num_scripts: int = 1) -> None:
    assert page.evaluate(COUNTS, FOREIGN) == [0, 0]
    assert page.evaluate("document.scripts.length") == num_scripts
    assert "alert" not in page.title()


def shown(page: Any) -> list[str]:
    return [text.replace("\u23ce", "") for _, text in strip(page)]


def test_what_a_model_writes_is_only_ever_text(
    opened: OpenPage, hostile_server: str, tmp_path: Path
) -> None:
    asked: set[str] = set()

    def note(request: Any) -> None:
        asked.add(urlsplit(str(request.url)).path)

    page = opened(at=hostile_server)
    page.on("request", note)
    ask(page, PAYLOADS[0], tokens=len(PAYLOADS))
    assert shown(page) == list(PAYLOADS)
    for number in range(1, len(PAYLOADS) + 1):
        page.get_by_role("slider", name="Round").fill(str(number))
        assert PAYLOADS[number - 1].strip()[:8] in page.locator(".round").inner_text()
    for name in TABS:
        choose_tab(page, name)
        is_inert(page)
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as a page").click()
    assert asked <= {"/v1/completions", "/v1/models", "/outrider/v1/card"} | {
        *("/web/rounds/kinds.js", "/web/rounds/tree.js", "/web/rounds/rounds.js"),
        *("/web/rounds/page.js", "/web/rounds/rounds.css", "/web/style.css"),
    }
    saved = tmp_path / "run.html"
    found.value.save_as(saved)
    alone = opened(at=saved.as_uri(), path="")
    wait_for_end(alone)
    assert shown(alone) == list(PAYLOADS)
    is_inert(alone, num_scripts=2)


def test_a_conversation_a_race_and_the_dashboard_are_text_as_well(
    opened: OpenPage, hostile_server: str
) -> None:
    page = opened(at=hostile_server)
    page.get_by_label("Your message").fill(PAYLOADS[3])
    page.get_by_role("button", name="Write", exact=True).click()
    wait_for_end(page)
    page.get_by_label("Raw prompt").check()
    page.get_by_label("Prompt", exact=True).fill(PAYLOADS[5])
    choose_tab(page, "Race")
    page.get_by_label("Pairs of runs").select_option("1")
    page.locator("#panel-race").get_by_role("button", name="Race on against off").click()
    page.locator("#panel-race table").wait_for()
    is_inert(page)
    dashboard = opened("/dashboard", at=hostile_server)
    dashboard.locator(".lines svg").first.wait_for()
    assert PAYLOADS[4] in dashboard.locator("main").inner_text()
    is_inert(dashboard)


def test_an_answer_of_payloads_is_markdown_without_script(
    opened: OpenPage, hostile_server: str
) -> None:
    page = opened("/", at=hostile_server)
    say(page, PAYLOADS[3])
    for _ in range(2):
        foreign, _, links = FOREIGN.rpartition(",")
        assert links == "a[href*=':']"
        assert page.evaluate(COUNTS, foreign) == [0, 0]
        kinds = page.evaluate("[...document.links].map((one) => one.protocol)")
        assert set(kinds) <= {"http:", "https:"}
        assert PAYLOADS[0] in page.locator(".answer .md").inner_text()
        # The title in the list and what was kept are text as well.
        visit_again(page, 2)
