"""The cases of the Open Responses compliance runner (specification of 2026-04-24), told anew.

The runner itself is part of a repository and no package; `openresponses-types` has what it holds
answers to, made from the same OpenAPI document. What a server without memory, eyes and hosted tools
cannot do must be refused by name, or told in a warning.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

types = pytest.importorskip("openresponses_types.types")
PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a town",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}},
        "required": ["town"],
    },
}
NAMED = {"type": "function", "name": "get_weather"}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"town": "Oslo"}}</tool_call>'
HELLO = [{"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}]
# The specification's names of what OpenAI's own packages know by other names, which we write.
ANOTHER = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


def events_by_name():
    found = {}
    for name, kind in vars(types).items():
        if name.endswith("StreamingEvent"):
            (value,) = kind.model_fields["type"].annotation
            found[value.value] = kind
    return found


EVENTS = events_by_name()


def sent(server, body):
    request = urllib.request.Request(
        server.url + PATH,
        json.dumps({"model": server.model, **body}).encode(),
        {"content-type": "application/json", "authorization": "Bearer none"},
    )
    return urllib.request.urlopen(request, timeout=120)


def whole(server, **body):
    """A response that is as the specification says."""
    with sent(server, body) as answer:
        found = json.load(answer)
    check(found)
    return found


def check(response):
    """The specification has no schema within a format that is told again; OpenAI's servers have."""
    told = response["text"]["format"]
    told = told | {"schema": None} if told["type"] == "json_schema" else told
    types.ResponseResource.model_validate(response | {"text": response["text"] | {"format": told}})


def streamed(server, **body):
    """The events, each as the specification says, and the response of the last one."""
    with sent(server, body | {"stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = answer.read().decode().split("\n\n")
    events = []
    for block in filter(None, blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        kind = events[-1]["type"]
        assert name == f"event: {kind}"
        kind = ANOTHER.get(kind, kind)
        EVENTS[kind].model_validate(events[-1] | {"type": kind})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events, events[-1]["response"]


def refused(server, **body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        sent(server, body)
    assert caught.value.code == 400
    return json.load(caught.value)["error"]


def kinds(response):
    return [item["type"] for item in response["output"]]


@pytest.mark.parametrize(
    "given",
    [
        HELLO,
        "Say hello.",
        [{"type": "message", "role": "system", "content": "You are a pirate."}, *HELLO],
        [
            {"type": "message", "role": "user", "content": "My name is Alice."},
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            {"type": "message", "role": "user", "content": "What is my name?"},
        ],
    ],
    ids=["a message", "a text", "a system's message", "several turns"],
)
def test_a_text_is_answered(agent_served, given):
    found = whole(agent_served, input=given)
    assert found["status"] == "completed"
    assert kinds(found) == ["message"]
    events, last = streamed(agent_served, input=given)
    assert last["status"] == "completed"
    assert events[0]["type"] == "response.created"
    bare = [{key: item[key] for key in item if key != "id"} for item in found["output"]]
    assert bare == [{key: item[key] for key in item if key != "id"} for item in last["output"]]


def test_a_text_that_ends_at_its_limit_is_incomplete(agent_served):
    body = {"input": "Tell a story.", "max_output_tokens": 2, "top_logprobs": 2}
    found = whole(agent_served, **body)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    events, _ = streamed(agent_served, **body)
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "json_object"}, SCHEMA])
def test_what_was_asked_is_told_again_as_the_specification_has_it(agent_served, form):
    found = whole(
        agent_served,
        input=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
        instructions="Be short.",
        prompt_cache_key="k",
        safety_identifier="s",
        max_output_tokens=4,
    )
    assert (found["instructions"], found["metadata"]) == ("Be short.", {"a": "b"})
    assert (found["prompt_cache_key"], found["safety_identifier"]) == ("k", "s")


def test_a_function_is_called(scripted):
    server = scripted(("weather", f"I look.{CALL}"))
    found = whole(server, input="What is the weather?", tools=[WEATHER])
    assert kinds(found) == ["message", "function_call"]
    assert found["status"] == "completed"
    events, last = streamed(server, input="What is the weather?", tools=[WEATHER])
    call = last["output"][1]
    assert json.loads(call["arguments"]) == {"town": "Oslo"}
    told = [event["type"] for event in events if event.get("output_index") == 1]
    assert told[0] == "response.output_item.added"
    assert told[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]
    assert set(told[1:-2]) == {"response.function_call_arguments.delta"}
    deltas = [event.get("delta", "") for event in events if event.get("output_index") == 1]
    assert "".join(deltas) == call["arguments"]


def test_the_result_of_a_call_is_read(scripted):
    """All of the conversation is sent again, for the server keeps none of it."""
    server = scripted(("64 degrees", "It is clear."), ("weather", CALL))
    asked = [{"type": "message", "role": "user", "content": "How is the weather?"}]
    first = whole(server, input=asked, tools=[WEATHER], tool_choice=NAMED)
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees"}
    found = whole(server, input=[*asked, *first["output"], result], tools=[WEATHER])
    assert found["status"] == "completed"
    assert found["output"][0]["content"][0]["text"] == "It is clear."
    told = refused(server, input=[result], previous_response_id=first["id"])
    assert told["param"] == "previous_response_id"


def test_thoughts_are_an_item_of_their_own(scripted):
    server = scripted(("", "<think>Hm, is it?</think>\nYes."), knows="</think>")
    found = whole(server, input="Is it?")
    assert kinds(found) == ["reasoning", "message"]
    events, last = streamed(server, input="Is it?")
    thought = [e.get("delta", "") for e in events if e.get("output_index") == 0]
    assert "".join(thought) == last["output"][0]["content"][0]["text"] == "Hm, is it?"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "What is it?"},
                            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
                        ],
                    }
                ]
            },
            "input[0].content",
        ),
        (
            {
                "input": [
                    {
                        "type": "message",
                        "role": "user",
                        "content": [
                            {"type": "input_file", "filename": "a.pdf", "file_data": "data:,x"}
                        ],
                    }
                ]
            },
            "input[0].content",
        ),
        ({"input": "And now?", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "Search.", "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": "Search.", "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
    ids=["a picture", "a file", "an earlier response", "file search", "web search"],
)
def test_what_cannot_be_done_is_refused_by_name(agent_served, body, param):
    assert refused(agent_served, **body)["param"].startswith(param)
