"""What the playground says besides the text: coins, choices, promises, what a grammar forced."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from browser.pages import ask, choose_tab, give_key, wait_for_end

OpenPage = Callable[..., Any]
PROMPT = "def quicksort(items):"


def cells(page: Any, panel: str, caption: str) -> list[list[str]]:
    """The rows of the table whose caption begins so, its head first."""
    table = page.locator(f"#panel-{panel} .wide", has_text=caption).locator("table")
    return [row.locator("th, td").all_inner_texts() for row in table.locator("tr").all()]


def test_each_coin_has_its_chance_and_the_number_that_was_drawn(opened: OpenPage) -> None:
    page = opened()
    page.get_by_label("temperature").fill("0.9")
    ask(page, PROMPT, tokens=48)
    judged = 0
    count = int(page.get_by_role("slider", name="Round").get_attribute("max"))
    for number in range(1, count + 1):
        page.get_by_role("slider", name="Round").fill(str(number))
        for row in page.locator(".nodes tbody tr").all():
            said = row.locator("th, td").all_inner_texts()
            if len(said) < 6:
                continue
            _, verdict, _, _, chance, u = said
            # Both are rounded, so what looks equal says nothing.
            if u != chance and "\u2013" not in (chance, u) and "not kept" not in verdict:
                assert ("accepted" in verdict) == (float(u) < float(chance))
                judged += 1
    assert judged
    said = page.locator(".round").inner_text()
    assert "Up to 4 tokens could be drafted: the draft length is fixed." in said


def test_a_controller_says_what_it_chose_what_it_expected_and_what_came(
    opened: OpenPage, other_server: str
) -> None:
    page = opened(at=other_server)
    give_key(page)
    ask(page, PROMPT, tokens=96)
    choose_tab(page, "Draft length")
    head, *rows = cells(page, "controller", "What the controller chose")
    assert head[:4] == ["why", "rounds", "allowed", "drafted"]
    assert head[4:] == ["expected tok/s", "came", "\u00d7 plain"]
    assert sum(int(row[1]) for row in rows) == int(
        page.locator("#panel-tokens .figures div").nth(1).locator("dd").text_content()
    )
    assert "first trials" in [row[0] for row in rows]
    choose_tab(page, "Promise")
    names = [row[0] for row in cells(page, "promise", "Decoding speed")[1:]]
    assert names == [
        "planner's estimate, texts in general",
        "controller's estimate, the run shown",
    ]


def test_members_of_a_portfolio_are_shown_with_what_they_drafted(
    opened: OpenPage, portfolio_server: str
) -> None:
    page = opened(at=portfolio_server)
    ask(page, "one two three " * 6, tokens=48)
    choose_tab(page, "Draft length")
    head, *rows = cells(page, "controller", "By member of the portfolio")
    assert head == ["member", "rounds", "drafted", "accepted", "ms", "trials"]
    choose_tab(page, "Share")
    with page.expect_download() as found:
        page.get_by_role("button", name="Save this run").click()
    rounds = json.loads(found.value.path().read_text("utf-8"))["rounds"]
    wanted: dict[str, list[list[float]]] = {}
    for part in (part for one in rounds for part in one.get("members") or ()):
        numbers = (1, part["num_drafted"], part["num_accepted"], part["seconds"], part["trial"])
        wanted.setdefault(part["name"], []).append([*numbers])
    # Which members draft depends on what their drafts take here; a repeated text has some.
    assert wanted
    for name, *shown in rows:
        sums = [sum(column) for column in zip(*wanted.pop(name), strict=True)]
        assert [int(shown[i]) for i in (0, 1, 2, 4)] == [sums[i] for i in (0, 1, 2, 4)]
        assert abs(float(shown[3]) - 1e3 * sums[3]) <= 0.06
        assert sums[1] > 0
    assert wanted == {}


def test_an_estimate_is_not_judged_by_a_race_of_one_text(opened: OpenPage) -> None:
    page = opened()
    page.get_by_label("Raw prompt").check()
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("max tokens").fill("16")
    choose_tab(page, "Race")
    page.locator("#panel-race").get_by_role("button", name="Race on against off").click()
    page.locator("#panel-race .gain").wait_for()
    page.locator(".main[aria-busy=false]").wait_for()
    ratios = [float(row[1][:-1]) for row in cells(page, "race", "Speed with")[1:]]
    choose_tab(page, "Promise")
    planner, measured = cells(page, "promise", "Decoding speed")[1:]
    assert planner[0] == "planner's estimate, texts in general"
    low, high = float(planner[2][:-1]), float(planner[3][:-1])
    assert low < float(planner[1][:-1]) < high
    assert measured[0] == "measured, this text, 3 pairs"
    assert float(measured[1][:-1]) == ratios[-1]
    # One text says nothing of texts in general.
    assert page.locator("#panel-promise .verdict").count() == 0
    assert "a race may well lie outside" in page.locator("#panel-promise").inner_text()


def test_a_field_that_holds_no_number_is_an_error_and_nothing_is_asked(opened: OpenPage) -> None:
    page = opened()
    fields = {"max tokens": "abc", "temperature": "hot", "top p": "2", "seed": "-1"}
    fields["K: tokens a draft"] = "2.5"
    page.get_by_label("Raw prompt").check()
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    for label, wrong in fields.items():
        before = page.get_by_label(label).input_value()
        page.get_by_label(label).fill(wrong)
        page.get_by_role("button", name="Write", exact=True).click()
        said = page.get_by_role("alert").inner_text()
        assert said.startswith(f"{label.partition(':')[0]} must be a ")
        assert wrong in said
        assert page.locator(".strip .token").count() == 0
        page.get_by_label(label).fill(before)
    ask(page, PROMPT, tokens=4)
    assert page.get_by_role("alert").count() == 0


def test_what_a_grammar_forced_is_shown(opened: OpenPage) -> None:
    page = opened()
    page.get_by_text("System prompt and structure").click()
    page.get_by_role("button", name="An example").click()
    page.get_by_label("Your message").fill("Tell me of Ada as JSON.")
    page.get_by_label("max tokens").fill("48")
    page.get_by_role("button", name="Write", exact=True).click()
    wait_for_end(page)
    choose_tab(page, "Forced")
    rows = cells(page, "forced", "Forced tokens")[1:]
    assert sum(int(row[2]) for row in rows) == page.locator(".strip .token.forced").count() > 0
