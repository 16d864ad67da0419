"""Responses, Messages and calls over the embedded pair: texts are LLM's, calls as asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from doubles.scripted_port import CARD
from doubles.served import Served, served
from outrider import LLM, SamplingParams
from outrider.plugins.tools.formats import format_of, parser_for
from outrider.plugins.tools.grammar import answer_grammar, offered_tool
from outrider.server.parts import ToolDelta, ToolOpen

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Write a function that adds two numbers."},
]
USER = MESSAGES[1:]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found
        assert found.end() == 0


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("outrider/embedded", threads=1) as found:
        yield found


def sent(server: Served, path: str, body: object) -> list[dict[str, Any]]:
    """The events of a stream that names them, which must agree with its data."""
    found: list[dict[str, Any]] = []
    with server.client.stream("POST", path, json=body) as got:
        assert got.status_code == 200
        name = ""
        for line in got.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                assert found[-1]["type"] == name
    return found


def test_a_response_has_the_text_of_the_library(server: Served, llm: LLM) -> None:
    text = llm.chat(MESSAGES, max_tokens=24).result().text
    body = {"instructions": "Be short.", "input": USER, "temperature": 0, "max_output_tokens": 24}
    whole = server.client.post("/v1/responses", json=body).json()
    assert whole["output"][0]["content"][0]["text"] == text
    found = sent(server, "/v1/responses", body | {"stream": True})
    deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    last = found[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"] == whole["usage"] | {
        "input_tokens_details": last["usage"]["input_tokens_details"]
    }


def test_a_message_has_the_text_of_the_library(server: Served, llm: LLM) -> None:
    text = llm.chat(MESSAGES, max_tokens=24).result().text
    body = {"system": "Be short.", "messages": USER, "temperature": 0, "max_tokens": 24}
    whole = server.client.post("/v1/messages", json=body).json()
    assert whole["content"] == [{"type": "text", "text": text}]
    found = sent(server, "/v1/messages", body | {"stream": True})
    deltas = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text
    counted = server.client.post("/v1/messages/count_tokens", json=body).json()
    usage = whole["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_a_stop_sequence_is_named(server: Served, llm: LLM) -> None:
    text = llm.chat(USER, max_tokens=24).result().text
    stop = text[6:9]
    body = {"messages": USER, "temperature": 0, "max_tokens": 24, "stop_sequences": [stop]}
    found = server.client.post("/v1/messages", json=body).json()
    assert found["stop_reason"] == "stop_sequence"
    assert found["stop_sequence"] == stop


SCHEMA = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["days", "unit"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
SPELLINGS = {
    "hermes": "{{ tools }}<tool_call> arguments",
    "qwen": "{{ tools }}<function=><parameter=>",
    "glm": "{{ tools }}<tool_call><arg_key>",
    "llama": '{{ tools }}<|start_header_id|> {"name": , "parameters": ',
    "generic": "{{ messages }}",
}


# A model may think before it calls, where its family does; this one, greedily, would not end that.
DEMANDS = [(name, heat) for name in SPELLINGS for heat in (0.0, 1.5) if (name, heat) != ("glm", 0)]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "temperature"), DEMANDS)
def test_a_call_that_is_demanded_comes_with_and_without_drafts(
    llm: LLM, name: str, temperature: float
) -> None:
    card = msgspec.structs.replace(CARD, chat_template=SPELLINGS[name])
    tools = [offered_tool(TOOL, "tools")]
    given = format_of(card)
    grammar = answer_grammar(given, tools, choice="required", parallel=False)
    assert grammar is not None
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=3, sampler="coupled")
    if temperature == 0:
        params = SamplingParams(max_tokens=200)
    drafted = llm.generate("Weather?", params, **grammar.structure)[0]
    plain = llm.generate("Weather?", params, speculative=False, **grammar.structure)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == "stop", drafted.text
    parser = parser_for(given, [TOOL])
    parts = [*parser.feed(drafted.text), *parser.finish()]
    assert [part.name for part in parts if isinstance(part, ToolOpen)] == ["weather"]
    arguments = json.loads("".join(p.arguments for p in parts if isinstance(p, ToolDelta)))
    assert arguments.keys() == {"days", "unit"}
    assert arguments["days"] in range(1, 10)
    assert arguments["unit"] in ("C", "F")
