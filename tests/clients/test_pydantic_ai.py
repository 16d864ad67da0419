"""pydantic-ai: agents with typed tools and results, by chat completions and Responses."""

from __future__ import annotations

import json
from typing import Literal

import pytest

pydantic_ai = pytest.importorskip("pydantic_ai")
pydantic = pytest.importorskip("pydantic")
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402


class Town(pydantic.BaseModel, extra="forbid"):
    """A town and how large it is."""

    name: str = pydantic.Field(max_length=8)
    size: Literal[1, 2, 3]


class Weather(pydantic.BaseModel):
    """The weather of a town."""

    town: str
    degrees: int


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def made(request):
    """Agents before a server, by either API."""

    def make(server, **more):
        provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
        settings = {"temperature": 0, "max_tokens": 200} | more.pop("settings", {})
        model = request.param(server.model, provider=provider)
        return pydantic_ai.Agent(model, model_settings=settings, retries=0, **more)

    return make


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_a_typed_result_comes_back(served, made, output):
    agent = made(served, output_type=getattr(pydantic_ai, output)(Town))
    result = agent.run_sync("Name a town.")
    assert isinstance(result.output, Town)
    assert result.usage.output_tokens > 0


def test_a_stream_has_the_text_of_one_answer(served, made):
    agent = made(served, settings={"max_tokens": 24})
    whole = agent.run_sync("Say hello.")
    streamed = agent.run_stream_sync("Say hello.")
    pieces = list(streamed.stream_text(delta=True, debounce_by=None))
    assert "".join(pieces) == whole.output != ""
    assert len(pieces) > 1
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_it_runs_a_tool_and_reads_its_result(scripted, made, streams):
    call = {"name": "degrees", "arguments": {"town": "Riga", "days": [1, 2]}}
    told = {"name": "final_result", "arguments": {"town": "Riga", "degrees": 19}}
    server = scripted(
        ("nineteen", f"<tool_call>{json.dumps(told)}</tool_call>"),
        ("How warm", f"I look.<tool_call>{json.dumps(call)}</tool_call>"),
    )
    agent = made(server, output_type=Weather)
    called = []

    @agent.tool_plain
    def degrees(town: str, days: list[int]) -> dict[str, str]:
        """The temperature of a town on some days."""
        called.append((town, days))
        return {"found": "nineteen"}

    question = "How warm is it in Riga?"
    if streams:
        found = list(agent.run_stream_sync(question).stream_output(debounce_by=None))[-1]
    else:
        found = agent.run_sync(question).output
    assert called == [("Riga", [1, 2])]
    assert found == Weather(town="Riga", degrees=19)
