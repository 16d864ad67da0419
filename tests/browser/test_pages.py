"""The playground and the dashboard in a browser: what they show, by keyboard, on every screen."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser.pages import (
    TABS,
    ask,
    axe_violations,
    choose_tab,
    figures,
    give_key,
    replay,
    saved_run,
    strip,
    wait_for_end,
)

OpenPage = Callable[..., Any]
PROMPT = "def quicksort(items):"
SCROLL_WIDTH = "document.documentElement.scrollWidth"


def test_a_saved_run_is_drawn_as_ever(opened: OpenPage, tmp_path: Path) -> None:
    page = opened("/#replay")
    replay(page, tmp_path, saved_run())
    assert strip(page) == [
        ["token plain", "def"],
        ["token draft of-round", " f"],
        ["token recovered of-round", "<x("],
        ["token lookup", "a"],
        ["token bonus", ")"],
        ["token forced", ":"],
        ["token bonus", "\u23ce\n"],
    ]
    assert figures(page)["drafts accepted"] == "3 of 5 (60 %)"
    page.get_by_role("slider", name="Round").fill("2")
    panel = page.locator(".round")
    assert panel.locator("p").first.inner_text() == "Round 2 of 4: model drafted 3, 1 accepted."
    rows = [row.locator("th, td").all_inner_texts() for row in panel.locator("tbody tr").all()]
    assert rows == [
        ["\u2423f", "\u2713 accepted", "0.250", "0.500", "0.500", "0.310"],
        ["</b>", "\u2717 refused", "0.100", "0.400", "0.250", "0.900"],
        ["_", "\u00b7 not looked at", "0.200", "0.100", "1.000", "\u2013"],
        ["<x(", "\u21b3 recovered", "0.600", "\u2013", "\u2013", "\u2013"],
    ]
    assert panel.locator(".instead").inner_text() == (
        "Refused: \u201c</b>\u201d (p 0.100, q 0.400). Picked instead: \u201c<x(\u201d (p 0.600), "
        "of what the draft left of p."
    )
    assert panel.locator("svg .node").count() == 4
    assert page.locator("main b").count() == 0


def test_a_text_of_the_engine_is_shown_as_it_is_written(opened: OpenPage) -> None:
    page = opened()
    ask(page, PROMPT, tokens=40)
    shown = figures(page)
    assert shown["tokens"] == "40"
    assert shown["ended by"] == "length"
    text = page.locator(".strip").inner_text()
    assert "quicksort" not in text
    assert len(strip(page)) == 40
    # It ends at the round that shows most, which no other exceeds in accepted tokens.
    most = page.locator(".histogram tbody th").last.inner_text()
    assert page.locator(".round p").first.inner_text().endswith(f", {most} accepted.")
    for name in TABS:
        choose_tab(page, name)
        assert page.get_by_role("tabpanel").locator("visible=true").inner_text().strip()
    choose_tab(page, "Acceptance")
    assert page.locator(".checks .holds").count() == 4
    assert page.locator(".checks .fails").count() == 0


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_a_race_ends_with_identical_texts(opened: OpenPage, temperature: str) -> None:
    page = opened()
    page.get_by_label("Raw prompt").check()
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("max tokens").fill("32")
    page.get_by_label("temperature").fill(temperature)
    choose_tab(page, "Race")
    page.get_by_label("Pairs of runs").select_option("1")
    page.locator("#panel-race").get_by_role("button", name="Race on against off").click()
    page.locator("#panel-race table").wait_for()
    assert page.locator(".verdict").inner_text().startswith("identical")
    choose_tab(page, "Promise")
    assert "measured, this text, 1 pair" in page.locator("#panel-promise table").inner_text()


def test_all_of_it_works_by_keyboard(opened: OpenPage) -> None:
    page = opened()
    press, focused = page.keyboard.press, "document.activeElement"
    page.locator("#f-drafter option").nth(1).wait_for(state="attached")
    for _ in range(30):
        press("Tab")
        if (
            page.evaluate(f"{focused}.type") == "radio"
            and page.evaluate(f"{focused}.name") == "mode"
        ):
            break
    press("ArrowRight")
    press("Tab")
    page.keyboard.type(PROMPT)
    page.get_by_label("max tokens").fill("24")
    page.get_by_label("Prompt", exact=True).focus()
    press("Control+Enter")
    wait_for_end(page)
    for _ in range(30):
        press("Tab")
        if page.evaluate(f"{focused}.role") == "tab":
            break
    press("ArrowRight")
    assert page.evaluate(f"{focused}.textContent") == "Race"
    press("Home")
    for _ in range(30):
        press("Tab")
        if page.evaluate(f"{focused}.className") == "strip":
            break
    press("Home")
    press("ArrowRight")
    chosen = page.locator(".token[aria-selected=true]")
    assert chosen.get_attribute("data-index") == "1"
    assert page.locator(".round p").first.inner_text().startswith("Round 1 of")
    press("ArrowDown")
    assert page.locator(".round p").first.inner_text().startswith("Round 2 of")
    while page.evaluate(f"{focused}.type") != "range":
        press("Tab")
    press("ArrowRight")
    assert page.locator(".round p").first.inner_text().startswith("Round 3 of")


@pytest.mark.parametrize(("dark", "widths"), [(False, (390, 1600)), (True, (768, 1280))])
def test_no_screen_has_barriers_or_scrolls_sideways(
    opened: OpenPage, tmp_path: Path, dark: bool, widths: tuple[int, ...]
) -> None:
    page = opened(width=widths[0], dark=dark)
    ask(page, PROMPT, tokens=16)
    dashboard = opened("/dashboard", width=widths[0], dark=dark)
    dashboard.locator(".tiles").wait_for()
    saved = opened("/#replay", width=widths[0], dark=dark)
    saved.get_by_label("Drop a saved run").wait_for()
    assert axe_violations(saved) == []
    replay(saved, tmp_path, saved_run())
    for width in widths:
        for one in (page, dashboard, saved):
            one.set_viewport_size({"width": width, "height": 900})
            assert axe_violations(one) == []
        for name in TABS:
            choose_tab(page, name)
            assert page.evaluate(SCROLL_WIDTH) <= width, name
            assert axe_violations(page, "[role=tabpanel]:not([hidden])") == [], name
        assert dashboard.evaluate(SCROLL_WIDTH) <= width


def test_the_theme_switch_stays(opened: OpenPage) -> None:
    page = opened()
    back = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    page.locator("#theme-dark").check()
    assert page.evaluate(back) == "rgb(13, 17, 23)"
    page.reload()
    page.locator("#theme-dark").wait_for()
    assert page.evaluate(back) == "rgb(13, 17, 23)"


def test_a_key_is_asked_for_and_used(opened: OpenPage, other_server: str) -> None:
    page = opened(at=other_server)
    give_key(page)
    ask(page, PROMPT, tokens=8)
    assert figures(page)["tokens"] == "8"


def test_a_run_is_saved_and_shown_again_without_a_server(opened: OpenPage, tmp_path: Path) -> None:
    page = opened()
    ask(page, PROMPT, tokens=24)
    wanted = [text for _, text in strip(page)]
    choose_tab(page, "Share")
    assert "speculative" in page.locator(".code pre").first.inner_text()
    with page.expect_download() as found:
        page.get_by_role("button", name="Save this run").click()
    run = tmp_path / "run.json"
    found.value.save_as(run)
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as a page").click()
    saved = tmp_path / "run.html"
    found.value.save_as(saved)
    asked: list[str] = []
    again = opened("/#replay")

    def note(request: Any) -> None:
        asked.append(request.url)

    again.on("request", note)
    again.get_by_label("Drop a saved run").set_input_files(run)
    wait_for_end(again)
    assert [text for _, text in strip(again)] == wanted
    assert asked == []
    alone = opened(at=saved.as_uri(), path="")
    wait_for_end(alone)
    assert [text for _, text in strip(alone)] == wanted


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", '{"rounds": 1}', '{"rounds": [{"nodes": [{"verdict": "<b>"}]}]}'],
)
def test_what_is_no_saved_run_is_refused_in_words(
    opened: OpenPage, tmp_path: Path, broken: str
) -> None:
    page = opened("/#replay")
    path = tmp_path / "broken.json"
    path.write_text(broken, encoding="utf-8")
    page.get_by_label("Drop a saved run").set_input_files(path)
    assert page.get_by_role("alert").inner_text().startswith("The file is no")


# Notes what each frame's own work took.
FRAMES = """
window.frameTimes = [];
const ask = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (work) => ask((now) => {
  const began = performance.now();
  work(now);
  window.frameTimes.push(performance.now() - began);
});
"""
MOST_MS = 8


def test_ten_thousand_tokens_stay_smooth(opened: OpenPage, tmp_path: Path) -> None:
    run = saved_run()
    run["rounds"] = run["rounds"] * (10_000 // 7 + 1)
    page = opened("/#replay", script=FRAMES)
    replay(page, tmp_path, run)
    times = page.evaluate("window.frameTimes")
    assert len(strip(page)) >= 10_000
    assert len(times) > 3
    assert statistics.median(times) <= MOST_MS


def test_the_dashboard_shows_what_was_counted(opened: OpenPage) -> None:
    page = opened()
    ask(page, PROMPT, tokens=24)
    dashboard = opened("/dashboard")
    dashboard.locator(".lines svg").first.wait_for()
    tiles = dashboard.locator(".tiles").inner_text()
    assert "ready" in tiles
    assert "tokens a round" in tiles
    tables = dashboard.locator("table").all_inner_texts()
    assert any("model" in text and "ready" in text for text in tables)
    dashboard.get_by_label("Show the last").select_option("an hour")
    assert dashboard.locator("figure").count() >= 6
