"""What the tests do at a page, and a saved run that has one of everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TABS = (
    *("Tokens and drafts", "Race", "Draft length", "Acceptance"),
    *("Lanes", "Promise", "Forced", "Share"),
)


KEY = "a-key-for-the-browser-tests"


def give_key(page: Any) -> None:
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use it").click()


def ask(page: Any, prompt: str, *, tokens: int) -> None:
    """Writes so many tokens after a raw prompt."""
    page.locator("#f-drafter option").nth(1).wait_for(state="attached")
    page.get_by_label("Raw prompt").check()
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("max tokens").fill(str(tokens))
    page.get_by_role("button", name="Write", exact=True).click()
    wait_for_end(page)


def say(page: Any, words: str) -> None:
    """Sends a message of a conversation, and waits for the end of its answer."""
    count = page.locator(".facts").count()
    page.get_by_label("Your message").last.fill(words)
    page.keyboard.press("Enter")
    page.locator(".facts").nth(count).wait_for()
    page.get_by_role("button", name="Send", exact=True).wait_for()


KEPT = """(count) => import("/web/store.js").then(({ all }) => all("conversations"))
  .then((found) => found[0]?.messages.length === count)"""


def visit_again(page: Any, count: int) -> None:
    """Leaves when so many messages are kept, comes back, and opens the only conversation."""
    page.wait_for_function(KEPT, arg=count)
    page.reload()
    page.locator("nav.history li button").click()


def wait_for_end(page: Any) -> None:
    page.locator(".main[aria-busy=false], main:not(:has(.main))").wait_for()
    page.locator(".figures dt", has_text="ended by").wait_for()


def choose_tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def strip(page: Any) -> list[list[str]]:
    """Class and text of each token, without what was refused."""
    return page.evaluate(
        """[...document.querySelectorAll(".strip .token")].map((one) => [one.className,
          [...one.childNodes].filter((part) => part.nodeName !== "DEL")
            .map((part) => part.textContent).join("")])"""
    )


def figures(page: Any) -> dict[str, str]:
    names = page.locator(".figures dt").all_inner_texts()
    return dict(zip(names, page.locator(".figures dd").all_inner_texts(), strict=True))


def replay(page: Any, folder: Path, run: dict[str, Any]) -> None:
    path = folder / "saved.json"
    path.write_text(json.dumps(run), encoding="utf-8")
    page.get_by_label("Drop a saved run").set_input_files(path)
    wait_for_end(page)


def axe_violations(page: Any, part: str = "html") -> list[str]:
    """Within the elements of `part`, a selector."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed")
    # Half a megabyte, once for each page.
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate(
        """(part) => axe.run(part, { resultTypes: ["violations"] })
          .then(({ violations }) => violations)""",
        part,
    )
    return [f"{one['id']}: {node['html'][:200]}" for one in found for node in one["nodes"]]


def _node(
    token: str, parent: int, verdict: str, *, p: float, q: float | None = None, **more: Any
) -> dict[str, Any]:
    found = {"token_id": 1, "token": token, "parent": parent, "verdict": verdict, "p": p, "q": q}
    if verdict not in ("refused", "unused"):
        found["text"] = token
    return found | more


def _round(drafter: str, source: str, nodes: list[dict[str, Any]]) -> dict[str, Any]:
    drafted = [n for n in nodes if n["verdict"] in ("accepted", "refused", "unused")]
    return {
        "drafter": drafter,
        "source": source,
        "nodes": nodes,
        "batch_size": 1,
        "num_prompt_tokens": 0,
        "num_drafted": len(drafted),
        "num_accepted": sum(node["verdict"] == "accepted" for node in nodes),
        "draft_seconds": 0.001,
        "verify_seconds": 0.004,
        "accept_seconds": 0.0005,
        "gap_seconds": 0.0002,
    }


def saved_run() -> dict[str, Any]:
    rounds = [
        _round("model", "draft", [_node("def", -1, "plain", p=0.25)]),
        _round(
            "model",
            "draft",
            [
                _node(" f", -1, "accepted", p=0.25, q=0.5, draw=0.31),
                _node("</b>", 0, "refused", p=0.1, q=0.4, draw=0.9),
                _node("_", 1, "unused", p=0.2, q=0.1),
                _node("<x(", 0, "recovered", p=0.6),
            ],
        ),
        _round(
            "ngram",
            "lookup",
            [_node("a", -1, "accepted", p=1.0, p_soft=0.7), _node(")", 0, "bonus", p=1.0)],
        ),
        _round(
            "forced",
            "forced",
            [_node(":", -1, "accepted", p=1.0), _node("\n", 0, "bonus", p=1.0)],
        ),
    ]
    return {
        "format": "outrider-run-1",
        "title": "<b>A run</b>",
        "prompt": "<i>prompt</i>",
        "facts": [["model", "<u>tiny</u>"]],
        "rounds": rounds,
        "text": "def f</b><x(a):\n",
        "result": {"finish_reason": "stop", "tokens_per_second": 12.0, "notes": ["<s>note</s>"]},
    }
