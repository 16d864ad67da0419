"""OpenAI's own package, as its users call it."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest

openai = pytest.importorskip("openai")
ASK = [{"role": "user", "content": "Write a function that sorts a list."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a town.", "parameters": SCHEMA},
}


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(client, **more):
    given = {"model": "outrider/embedded", "messages": ASK, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**(given | more))


def test_models(client, served):
    assert served.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(served.model).id == served.model


def test_a_stream_has_the_text_of_one_answer(client):
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert deltas[0].role == "assistant"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    # The second one found most of its prompt in memory.
    told = chunks[-1].usage
    assert told.prompt_tokens_details.cached_tokens > 0
    told.prompt_tokens_details = whole.usage.prompt_tokens_details
    assert told == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_speculation_is_told_and_can_be_turned_off(client):
    with_drafts = ask(client)
    told = with_drafts.metrics["speculative_decoding"]
    assert told["num_draft_tokens"] > 0
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    without = ask(client, extra_body={"speculative": False})
    assert without.choices[0].message == with_drafts.choices[0].message
    assert "metrics" not in without.model_extra or not without.metrics


def test_a_seed_repeats_itself_beside_others(client, served):
    drawn = {"temperature": 0.9, "seed": 5, "n": 2}
    first = ask(client, **drawn)
    other = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    async def several():
        given = {"model": served.model, "messages": ASK, "max_tokens": 24} | drawn
        many = [other.chat.completions.create(**given) for _ in range(8)]
        return await asyncio.gather(*many)

    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 2
    for answer in asyncio.run(several()):
        assert [choice.message.content for choice in answer.choices] == texts


def test_log_probabilities(client):
    answer = ask(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    assert all(one.logprob <= 0 and len(one.top_logprobs) == 3 for one in content)
    assert content[0].top_logprobs[0].logprob == content[0].logprob


def test_json_of_a_schema(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    found = json.loads(
        ask(client, response_format=wanted, max_tokens=200).choices[0].message.content
    )
    assert set(found) == {"name", "size"}
    assert isinstance(found["size"], int)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(client, choice, stream):
    answer = ask(
        client,
        tools=[TOOL],
        tool_choice=choice,
        max_tokens=300,
        stream=stream,
        parallel_tool_calls=False,
    )
    if stream:
        calls, reasons = {}, []
        for chunk in answer:
            for one in chunk.choices:
                reasons.append(one.finish_reason)
                for call in one.delta.tool_calls or ():
                    known = calls.setdefault(call.index, ["", "", ""])
                    known[0] += call.id or ""
                    known[1] += call.function.name or ""
                    known[2] += call.function.arguments or ""
        assert reasons[-1] == "tool_calls"
        found = [tuple(call) for call in calls.values()]
    else:
        assert answer.choices[0].finish_reason == "tool_calls"
        calls = answer.choices[0].message.tool_calls
        found = [(call.id, call.function.name, call.function.arguments) for call in calls]
    assert found
    for call_id, name, arguments in found:
        assert call_id
        assert name == "weather"
        assert set(json.loads(arguments)) == {"name", "size"}


def test_old_completions_with_echo_and_ids(client, served):
    ids = served.post("/tokenize", {"prompt": "def quicksort(items):"})["tokens"]
    given = {"model": served.model, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    by_text = client.completions.create(prompt="def quicksort(items):", **given).choices[0]
    by_ids = client.completions.create(prompt=[ids], **given).choices[0]
    assert by_text.text == by_ids.text
    assert by_text.text.startswith("def quicksort(items):")
    assert by_text.logprobs.token_logprobs[0] is None
    assert len(by_text.logprobs.token_logprobs) == len(ids) + 1
    assert by_text.logprobs == by_ids.logprobs
    scored = client.completions.create(prompt=[ids], **given | {"max_tokens": 0})
    assert scored.choices[0].text == "def quicksort(items):"
    assert scored.choices[0].logprobs.token_logprobs == by_ids.logprobs.token_logprobs[:-1]
    assert scored.choices[0].finish_reason == "length"
    assert scored.usage.completion_tokens == 0


def test_responses_in_one_piece_and_as_a_stream(client):
    given = {"model": "outrider/embedded", "input": "Say hello.", "temperature": 0}
    whole = client.responses.create(max_output_tokens=16, **given)
    events = list(client.responses.create(max_output_tokens=16, stream=True, **given))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(previous_response_id="resp_1", **given)


def test_mistakes_are_errors_of_their_kind(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        ask(client, model="nobody/nothing")
    for count in (5_000, 50_000):
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            ask(client, messages=[{"role": "user", "content": "word " * count}])
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises((openai.UnprocessableEntityError, openai.BadRequestError)):
        client.post("/chat/completions", body={"messages": 3}, cast_to=object)


def test_arguments_are_streamed_while_they_are_written(scripted):
    arguments = '{"text": "a\n\\"b\\" </tool_call>"}'
    call = f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
    sent = arguments.replace("\n", "\\n")
    server = scripted(("CUT", call[: call.index(arguments) + 18]), ("", call))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    function = {"name": "write", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    for said, wanted, reason in (("x", sent, "tool_calls"), ("CUT", sent[:19], "stop")):
        asked = {"model": server.model, "messages": [{"role": "user", "content": said}]}
        with client.chat.completions.stream(**asked, tools=tools) as stream:
            pieces = [
                event.arguments_delta
                for event in stream
                if event.type == "tool_calls.function.arguments.delta"
            ]
            choice = stream.get_final_completion().choices[0]
        assert len(pieces) > 2
        assert "".join(pieces) == wanted
        assert choice.message.tool_calls[0].function.arguments == wanted
        assert choice.finish_reason == reason
        whole = client.chat.completions.create(**asked, tools=tools).choices[0]
        assert whole.message.tool_calls[0].function.arguments == wanted
        kind, flat = "response.function_call_arguments.delta", [{"type": "function", **function}]
        with client.responses.stream(model=server.model, input=said, tools=flat) as stream:
            pieces = [event.delta for event in stream if event.type == kind]
            item = stream.get_final_response().output[0]
        assert "".join(pieces) == item.arguments == wanted
        assert item.status == ("completed" if said == "x" else "incomplete")


def batch_of(client, *lines, endpoint="/v1/chat/completions"):
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")
    assert (file.filename, file.bytes, file.status) == ("in.jsonl", len(data), "processed")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window="24h",
        metadata={"of": "a test"},
    )


def until_over(client, batch):
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions", "responses"])
def test_a_batch_has_the_answers_of_single_requests(client, served, endpoint):
    body = {"model": served.model, "temperature": 0}
    if endpoint == "chat/completions":
        body |= {"messages": ASK, "max_tokens": 8}
        text = client.chat.completions.create(**body).choices[0].message.content
    elif endpoint == "completions":
        body |= {"prompt": "def f(x):", "max_tokens": 8}
        text = client.completions.create(**body).choices[0].text
    else:
        body |= {"input": "Hello", "max_output_tokens": 8}
        text = client.responses.create(**body).output_text
    line = {"method": "POST", "url": f"/v1/{endpoint}", "body": body}
    wrong = line | {"custom_id": "wrong", "body": body | {"temperature": -1}}
    batch = batch_of(client, line | {"custom_id": "a"}, wrong, endpoint=f"/v1/{endpoint}")
    assert batch.metadata == {"of": "a test"}
    batch = until_over(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    assert answer["custom_id"] == "a"
    told = answer["response"]["body"]
    if endpoint == "responses":
        assert text == openai.types.responses.Response.construct(**told).output_text
    else:
        choice = told["choices"][0]
        assert text == (choice["text"] if "text" in choice else choice["message"]["content"])
    (mistake,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert mistake["response"]["status_code"] == 400
    assert batch.id in [one.id for one in client.batches.list(limit=1)]
    files = {one.id: one.purpose for one in client.files.list()}
    assert files[batch.output_file_id] == "batch_output"
    for name in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.output_file_id)


def test_a_batch_can_be_cancelled_and_mistakes_are_told(client, served):
    body = {"model": served.model, "messages": ASK, "max_tokens": 200, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = batch_of(client, *(line | {"custom_id": f"{i}"} for i in range(500)))
    batch = client.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    assert until_over(client, batch).status == "cancelled"
    batch = until_over(client, batch_of(client, line))
    assert (batch.status, batch.errors.data[0].line) == ("failed", 1)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=io.BytesIO(b"x"), purpose="fine-tune")
