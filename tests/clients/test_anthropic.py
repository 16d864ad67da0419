"""Anthropic's own package, as its users call it."""

from __future__ import annotations

import json

import pytest

anthropic = pytest.importorskip("anthropic")
ASK = [{"role": "user", "content": "Write a function that sorts a list."}]
TOOL = {
    "name": "weather",
    "description": "Of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 8}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(served):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def given(**more):
    # The package knows of no temperature any more.
    base = {"model": "outrider/embedded", "messages": ASK, "max_tokens": 24}
    return base | {"extra_body": {"temperature": 0}} | more


def test_a_stream_has_the_text_of_one_answer(client):
    whole = client.messages.create(**given())
    with client.messages.stream(**given()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 24


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(
        model="outrider/embedded", messages=ASK, system="Be short."
    )
    answer = client.messages.create(**given(system="Be short."))
    assert counted.input_tokens == answer.usage.input_tokens > 0


def test_a_tool_is_called_and_its_result_is_read(client):
    answer = client.messages.create(
        **given(
            tools=[TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=300,
        )
    )
    assert answer.stop_reason == "tool_use"
    call = next(block for block in answer.content if block.type == "tool_use")
    assert call.name == "weather"
    assert set(call.input) == {"town"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
    asked = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(**given(messages=asked, tools=[TOOL]))
    read, before = again.usage, answer.usage
    assert read.input_tokens + read.cache_read_input_tokens > before.input_tokens
    assert json.dumps(call.input)


def test_a_stop_sequence_is_named(client):
    whole = client.messages.create(**given(max_tokens=40)).content[0].text
    stop = whole[10:13]
    answer = client.messages.create(**given(max_tokens=40, stop_sequences=[stop]))
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == stop
    assert answer.content[0].text == whole[: whole.index(stop)]


def test_mistakes_are_errors_of_their_kind(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**given(extra_body={"temperature": -1}))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**given(model="nobody/nothing"))


CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Os\nlo"}}\n</tool_call>'


def test_an_input_is_streamed_while_it_is_written(scripted):
    server = scripted(("CUT", CALL[: CALL.index("\nlo")]), ("", CALL))
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": server.model, "max_tokens": 99, "tools": [TOOL]}
    with client.messages.stream(**asked, messages=ASK) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(pieces) > 2
    assert "".join(pieces) == '{"town": "Os\\nlo"}'
    assert final.content[0].input == {"town": "Os\nlo"}
    assert final.stop_reason == "tool_use"
    cut = [{"role": "user", "content": "CUT"}]
    with client.messages.stream(**asked, messages=cut) as stream:
        assert stream.get_final_message().stop_reason == "end_turn"
    whole = client.messages.create(**asked, messages=cut)
    assert whole.stop_reason == "end_turn"
    assert whole.content[0].input == {"arguments": '{"town": "Os'}
