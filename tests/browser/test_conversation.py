"""The conversation in a browser: messages, Markdown, what is kept, and the laboratory behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from browser.hostile import MARKDOWN, PAYLOADS
from browser.pages import axe_violations, say, strip, visit_again, wait_for_end

OpenPage = Callable[..., Any]
NOT_COMPARED = "the rule gives the text of plain decoding, not compared here"
SCREENS = [(390, False), (390, True), (1280, True), (1600, False)]
ANSWER = """# A heading

Words with **weight**, `code`, and a [link](https://example.org).

```python
def add(a: int, b: int) -> int:
    # A comment.
    return a + b  # and a line that is much longer than any telephone, so that it must be scrolled
```

| name | count |
|---|--:|
| one | 1 |

> A quotation.

1. first
2. second
"""


def settle(page: Any, **values: str) -> None:
    """Fills settings, whose names have a blank where a keyword has none."""
    button = page.get_by_role("button", name="Settings")
    if button.get_attribute("aria-expanded") != "true":
        button.click()
    for name, value in values.items():
        page.get_by_label(name.replace("_", " ")).fill(value)


def lines(page: Any) -> list[str]:
    return page.locator(".facts .line").all_inner_texts()


def answering(page: Any, text: str) -> None:
    """Lets the server answer each chat with `text`."""
    chunks = [{"choices": [{"delta": {"content": text}}]}, {"choices": [{"finish_reason": "stop"}]}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    answer(page, "**/v1/chat/completions", body=body, content_type="text/event-stream")


def answer(page: Any, address: str, **given: Any) -> None:
    """Answers requests to `address` in the server's place."""

    def fulfil(route: Any) -> None:
        route.fulfill(**given)

    page.route(address, fulfil)


def requests(page: Any, method: str = "POST") -> list[Any]:
    """The list of the requests with `method` that `page` makes from now on. What a page still
    reads for itself after it was opened, such as the model's card, is no post."""
    found: list[Any] = []

    def note(request: Any) -> None:
        if request.method == method:
            found.append(request)

    page.on("request", note)
    return found


def test_the_line_below_an_answer_says_what_was_compared_and_opens_the_laboratory(
    opened: OpenPage,
) -> None:
    page = opened("/")
    settle(page, max_tokens="32", temperature="0")
    say(page, "Write a function that sorts a list.")
    (line,) = lines(page)
    found = re.fullmatch(rf"(\d+) of (\d+) drafted tokens accepted, {NOT_COMPARED}", line)
    assert found is not None, line
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".facts .line", has_text="identical to plain").wait_for()
    accepted, drafted = found.groups()
    wanted = rf"\d+\.\d×, {accepted} of {drafted} drafted tokens accepted, identical to plain"
    assert re.fullmatch(wanted, lines(page)[0])
    # Another visit finds the conversation, its line and its rounds.
    visit_again(page, 2)
    assert re.fullmatch(wanted, lines(page)[0])
    page.locator(".facts .line").click()
    wait_for_end(page)
    assert len(strip(page)) == 32
    most = page.locator(".histogram tbody th").last.inner_text()
    assert f", {most} accepted." in page.locator(".round p").first.inner_text()


def test_messages_are_edited_answered_again_saved_deleted_and_brought_back(
    opened: OpenPage, tmp_path: Path
) -> None:
    page = opened("/")
    settle(page, max_tokens="8", temperature="0")
    note = tmp_path / "note.txt"
    note.write_text("```\nA file.\n```\n", encoding="utf-8")
    blob = tmp_path / "blob.bin"
    blob.write_bytes(b"\xff\xfe\x00")
    page.get_by_label("Attach text").set_input_files([note, blob])
    assert page.get_by_role("alert").inner_text() == (
        "blob.bin cannot be attached: it is no text in UTF-8."
    )
    sent = requests(page)
    say(page, "Hello there")
    say(page, "And again")
    asked = [json.loads(one.post_data) for one in sent]
    content = asked[0]["messages"][0]["content"]
    assert content == "note.txt\n````\n```\nA file.\n```\n````\n\nHello there"
    assert len(asked[1]["messages"]) == 3
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_role("button", name="Send", exact=True).wait_for()
    assert json.loads(sent[2].post_data)["messages"] == asked[1]["messages"]
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit your message").fill("Goodbye")
    page.get_by_role("button", name="Send again").click()
    page.get_by_role("button", name="Regenerate").wait_for()
    assert page.locator(".messages > li").count() == 2
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as JSON").click()
    saved = json.loads(found.value.path().read_text("utf-8"))
    assert [one["role"] for one in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][0]["text"] == "Goodbye"
    page.get_by_role("button", name="Delete").click()
    assert page.locator(".messages, nav.history li").count() == 0
    page.get_by_role("button", name="Undo").click()
    assert page.locator(".messages > li").count() == 2


def test_a_text_that_would_be_the_same_again_is_no_surprise(opened: OpenPage) -> None:
    page = opened("/")
    settle(page, max_tokens="8", temperature="0")
    say(page, "Hello there")
    same = page.locator(".answer small")
    assert same.inner_text() == "At temperature 0 it writes the same text again."
    settle(page, temperature="0.7")
    assert same.inner_text() == ""
    settle(page, seed="5")
    assert same.inner_text() == "With this seed it writes the same text again."
    settle(page, seed="", temperature="")
    words = page.locator("#f-temperature-words").inner_text()
    assert words.startswith("Empty: 0; 1 for requests to the API. ")
    assert same.inner_text() == "At temperature 0 it writes the same text again."


def test_a_saved_conversation_is_opened_again_beside_the_first_one_and_goes_on(
    opened: OpenPage, tmp_path: Path
) -> None:
    page = opened("/")
    settle(page, max_tokens="8", temperature="0")
    page.get_by_label("Attach text").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": b"In a file."}
    )
    say(page, "Hello there")
    page.get_by_role("button", name="Compare", exact=True).click()
    page.locator(".facts .line", has_text="identical to plain").wait_for()
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as JSON").click()
    path = tmp_path / "saved.json"
    found.value.save_as(path)
    text, line = page.locator(".answer .md").inner_text(), lines(page)
    page.get_by_label("Open a saved one").set_input_files(path)
    page.locator(".answer .place", has_text="From a file").wait_for()
    assert page.locator("nav.history li").count() == 2
    assert (page.locator(".answer .md").inner_text(), lines(page)) == (text, line)
    assert page.locator(".question summary").inner_text() == "a.txt"
    page.locator(".facts .line").click()
    assert "did not keep the rounds" in page.get_by_role("alert").inner_text()
    sent = requests(page)
    say(page, "Go on")
    asked = json.loads(sent[0].post_data)["messages"]
    assert [one["role"] for one in asked] == ["user", "assistant", "user"]
    assert asked[0]["content"] == "a.txt\n```\nIn a file.\n```\n\nHello there"
    # What is saved once more has the remark once.
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as JSON").click()
    found.value.save_as(path)
    page.get_by_label("Open a saved one").set_input_files(path)
    page.locator("nav.history li").nth(2).wait_for()
    assert page.locator(".answer .place", has_text="From a file").count() == 2


def test_conversations_of_the_terminal_and_of_the_browser_open_in_each_other(
    opened: OpenPage,
) -> None:
    page = opened("/")
    settle(page, max_tokens="8", temperature="0")
    said = [("system", "Be brief."), ("user", "Hello there"), ("assistant", "Hello.")]
    messages = [{"role": role, "content": text} for role, text in said]
    written = json.dumps({"model": "a", "messages": messages}, indent=1) + "\n"
    given = {"name": "talk.json", "mimeType": "application/json", "buffer": written.encode()}
    page.get_by_label("Open a saved one").set_input_files(given)
    page.locator(".answer .md", has_text="Hello.").wait_for()
    assert page.locator("nav.history li").inner_text() == "Hello there"
    sent = requests(page)
    say(page, "Go on")
    asked = json.loads(sent[0].post_data)["messages"]
    assert asked == [*messages, {"role": "user", "content": "Go on"}]
    # What `outrider chat` reads of a file is role and content.
    with page.expect_download() as found:
        page.get_by_role("button", name="Save as JSON").click()
    saved = json.loads(found.value.path().read_text("utf-8"))["messages"]
    assert [{key: one[key] for key in ("role", "content")} for one in saved[:4]] == asked


def _saved(messages: object, **more: object) -> str:
    return json.dumps({"format": "outrider-conversation-1", "messages": messages} | more)


WRONG = {
    "# Notes": 'it is not JSON. "Save as JSON" writes a file that can be opened',
    "null": "it is no saved conversation: its format is not outrider-conversation-1",
    '{"format": "outrider-run-1"}': (
        "it is no saved conversation: its format is not outrider-conversation-1"
    ),
    _saved([]): "it has no messages",
    _saved({"0": 1}): "it has no messages",
    _saved([None]): "its message 1 is neither of the user nor of the assistant",
    _saved([{"role": "user", "text": "a"}, {"role": "system", "text": "b"}]): (
        "its message 2 is neither of the user nor of the assistant"
    ),
    _saved([{"role": "user", "text": 3}]): "its message 1 has no text",
    _saved([{"role": "user", "text": "", "files": [{"name": "x"}]}]): (
        "its message 1 has a broken file"
    ),
    "\0": "it is no text",
    " " * ((16 << 20) + 1): "it is larger than 16 MiB",
}


def test_a_file_that_is_no_saved_conversation_is_refused_by_name_and_changes_nothing(
    opened: OpenPage, tmp_path: Path
) -> None:
    page, chosen = opened("/"), tmp_path / "chosen.json"
    for words, why in WRONG.items():
        # A file's bytes do not take the way through Playwright's messages.
        chosen.write_text(words, "utf-8")
        page.get_by_label("Open a saved one").set_input_files(chosen)
        page.get_by_text(f"chosen.json cannot be opened: {why}.", exact=True).wait_for()
        assert page.locator("nav.history li, .messages").count() == 0
    # Broken facts become none, and what a file names is text.
    words = [
        {"role": "user", "text": "<b>Hello</b>"},
        {"role": "assistant", "text": "<i>x</i>", "facts": {"drafted": "9", "notes": [{}]}},
    ]
    given = {"name": "a.json", "mimeType": "", "buffer": _saved(words, title=[1]).encode()}
    page.get_by_label("Open a saved one").set_input_files(given)
    page.locator(".answer").wait_for()
    assert lines(page) == ["how it was written is not known"]
    assert page.locator(".said").inner_text() == "<b>Hello</b>"
    assert page.get_by_role("alert").count() == 0


def test_the_first_key_is_in_the_message(opened: OpenPage) -> None:
    page = opened("/")
    page.locator("#message:focus").wait_for()
    page.keyboard.type("Hello")
    assert page.get_by_label("Your message").last.input_value() == "Hello"


def test_an_answer_stops_at_the_escape_key_and_keeps_what_was_written(opened: OpenPage) -> None:
    page = opened("/")
    settle(page, max_tokens="1500", temperature="1.5", seed="3")
    page.get_by_label("Your message").last.fill("Write a long text.")
    page.keyboard.press("Shift+Enter")
    assert page.get_by_label("Your message").last.input_value().endswith("\n")
    page.keyboard.press("Enter")
    page.locator(".answer .md > *").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("The answer was stopped.").wait_for()
    assert page.locator(".answer .md").inner_text().strip()
    # What is half a text cannot be compared.
    assert page.get_by_role("button", name="Compare", exact=True).count() == 0


def test_a_wrong_number_is_refused_by_name_and_the_message_stays(opened: OpenPage) -> None:
    page = opened("/")
    settle(page, max_tokens="abc")
    assert page.locator("#f-maxTokens").get_attribute("aria-invalid") == "true"
    page.get_by_label("Your message").last.fill("Hello")
    page.keyboard.press("Enter")
    said = page.get_by_role("alert").inner_text()
    assert said == "max tokens must be a whole number from 0 up, got “abc”."
    assert page.get_by_label("Your message").last.input_value() == "Hello"
    assert page.locator(".messages").count() == 0


def test_a_model_is_chosen_among_several(opened: OpenPage) -> None:
    page = opened("/")
    names = {"data": [{"id": "first"}, {"id": "second"}]}
    card = {"has_chat_template": True, "exact": True, "sampler": "block", "drafters": ["none"]}
    answer(page, "**/v1/models", json=names)
    answer(page, "**/outrider/v1/card?*", json=card)
    answering(page, "An answer.")
    page.reload()
    page.get_by_label("Model", exact=True).select_option("second")
    page.get_by_label("Your message").last.fill("Hello")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert json.loads(asked.value.post_data)["model"] == "second"
    page.locator(".facts").wait_for()


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_a_conversation_has_no_barriers_on_any_screen(
    opened: OpenPage, width: int, dark: bool
) -> None:
    page = opened("/", width=width, dark=dark)
    page.locator("nav.history").wait_for(state="attached")
    assert axe_violations(page) == []
    answering(page, ANSWER)
    page.get_by_label("Your message").last.fill("Show me all of it")
    page.keyboard.press("Enter")
    page.locator(".facts").wait_for()
    assert page.locator(".md [role=heading]").inner_text() == "A heading"
    assert page.locator(".codeblock .hl-keyword").first.inner_text() == "def"
    assert page.locator(".md td.at-right").inner_text() == "1"
    for panel in ("Settings", "Conversations"):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert axe_violations(page) == []
        if page.get_by_role("button", name=panel, exact=True).is_visible():
            page.get_by_role("button", name=panel, exact=True).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert axe_violations(page) == []


# Draws each text as an answer, and gives those that became more than text, marks and safe links.
ATTACK = """async (texts) => {
  const [{ Markdown }, { html, render }] = await Promise.all(
    [import("/web/markdown.js"), import("/web/html.js")]);
  const known = new Set(("div p ul ol li strong em del code pre a br hr blockquote table thead "
    + "tbody tr th td span button").split(" "));
  const found = [];
  for (const text of texts) {
    const root = document.createElement("div");
    document.body.append(root);
    render(html`<${Markdown} text=${text} />`, root);
    const all = [...root.querySelectorAll("*")];
    const isSafe = all.every((one) => known.has(one.localName)
      && [...one.attributes].every(({ name }) => !/^on|^src|^style|^id$|^srcdoc/i.test(name))
      && (one.localName !== "a" || ["http:", "https:", "mailto:"].includes(one.protocol)));
    if (!isSafe || !all.length) found.push(text);
    root.remove();
  }
  return found;
}"""


def test_no_markdown_becomes_script_or_asks_for_anything(opened: OpenPage) -> None:
    page = opened("/")
    page.locator("nav.history").wait_for(state="attached")
    read, sent = requests(page, "GET"), requests(page)
    texts = [*PAYLOADS, *(f"- x\n\n  {text}" for text in PAYLOADS), *MARKDOWN]
    assert len(PAYLOADS) == 60
    assert page.evaluate(ATTACK, texts) == []
    # On a slow machine the page still reads what it shows of the model; no text names that path.
    own = ("/web/", "/outrider/v1/")
    assert not any(path in text for path in own for text in texts)
    asked = [urlsplit(str(one.url)).path for one in [*read, *sent]]
    assert [path for path in asked if not path.startswith(own)] == []
