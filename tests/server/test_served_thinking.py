"""Thinking budgets over HTTP: a real server, whose chat template opens thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from doubles.served import Served, served

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

TEMPLATE = """{% for m in messages %}{{ m.content }}
{% endfor %}<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}"""
# The owner's, for requests without one of their own.
BUDGET = 9
GREEDY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "def quicksort(items):"}],
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 30,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    given = ("--chat-template", str(template), "--thinking-budget", str(BUDGET))
    with served(*given) as found:
        yield found
        assert found.end() == 0


def asked(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    got = server.client.post(path, json=body)
    assert got.status_code == 200, got.text
    return got.json()


def chat(server: Served, **more: Any) -> tuple[str, str, dict[str, Any]]:
    """What was thought, what was said, and details of the tokens."""
    found = asked(server, "/v1/chat/completions", GREEDY | more)
    message = found["choices"][0]["message"]
    details = found["usage"]["completion_tokens_details"]
    return message.get("reasoning", ""), message["content"], details


def test_thoughts_end_where_the_budget_does_whatever_drafts(server: Served) -> None:
    found = [chat(server, speculative=one) for one in (None, False, {"drafter": "ngram"})]
    assert found[0] == found[1] == found[2]
    thought, said, details = found[0]
    assert thought
    assert said
    assert details == {"reasoning_tokens": BUDGET, "thinking_budget_reached": True}
    longer = chat(server, thinking_budget_tokens=14)
    assert longer[0].startswith(thought)
    assert longer[2]["reasoning_tokens"] == 14
    endless = chat(server, thinking_token_budget=-1)
    assert endless[1] == ""
    assert endless[2] == {"reasoning_tokens": 30}


def test_thoughts_end_at_once_or_are_switched_off(server: Served) -> None:
    for more in ({"reasoning": {"max_tokens": 0}}, {"reasoning_effort": "none"}):
        thought, said, details = chat(server, **more)
        assert thought == ""
        assert said
        assert details["reasoning_tokens"] == 0
        assert details["thinking_budget_reached"] is ("reasoning" in more)


def test_a_form_comes_after_the_thoughts(server: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    body = {"response_format": schema, "ignore_eos": None}
    plain = chat(server, **body, speculative=False)
    assert chat(server, **body) == plain
    assert plain[0]
    assert plain[1] in ('"yes"', '"no"')
    assert plain[2]["reasoning_tokens"] == BUDGET


def test_the_other_apis_say_the_same(server: Served) -> None:
    thinking = {"type": "enabled", "budget_tokens": 6}
    message = asked(server, "/v1/messages", GREEDY | {"thinking": thinking})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    details = message["usage"]["output_tokens_details"]
    assert details == {"thinking_tokens": 6, "thinking_budget_reached": True}
    body = {"input": "def quicksort(items):", "reasoning": {"max_tokens": 6}, "temperature": 0}
    limits = {"max_output_tokens": 30, "ignore_eos": True}
    response = asked(server, "/v1/responses", body | limits)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    assert response["output"][0]["content"][0]["text"] == message["content"][0]["thinking"]
    details = response["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": 6, "thinking_budget_reached": True}
