"""LangChain over OpenAI's API and over Anthropic's."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Literal

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain_anthropic")
pydantic = pytest.importorskip("pydantic")
from langchain_anthropic import ChatAnthropic  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402


class Town(pydantic.BaseModel):
    """A town and how many live there."""

    name: str = pydantic.Field(max_length=8)
    size: Literal[1, 2, 3]


@pytest.fixture(params=["openai", "anthropic"])
def model(request, served):
    given = {"model": served.model, "temperature": 0, "max_tokens": 200, "api_key": "none"}
    if request.param == "openai":
        return ChatOpenAI(base_url=f"{served.url}/v1", **given)
    return ChatAnthropic(base_url=served.url, **given)


def test_invoke_and_stream_write_the_same(model):
    short = model.bind(max_tokens=24)
    whole = short.invoke("Say hello.")
    chunks = list(short.stream("Say hello."))
    assert "".join(str(chunk.text) for chunk in chunks) == str(whole.text)
    assert whole.usage_metadata["output_tokens"] > 0


def test_batch_is_in_order(model):
    short = model.bind(max_tokens=12)
    asked = ["One.", "Two.", "Three."]
    alone = [str(short.invoke(one).text) for one in asked]
    assert [str(one.text) for one in short.batch(asked)] == alone


def test_structured_output(served):
    model = ChatOpenAI(
        base_url=f"{served.url}/v1",
        model=served.model,
        temperature=0,
        max_tokens=200,
        api_key="none",
    )
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Town, method=method).invoke("Name a town.")
        assert isinstance(found, Town)


def test_tools(model):
    bound = model.bind_tools([Town], tool_choice="any")
    (call,) = bound.invoke("Name a town.").tool_calls[:1]
    assert call["name"] == "Town"
    assert set(call["args"]) == {"name", "size"}


def test_the_example_runs(served, monkeypatch, capsys):
    example = Path(__file__).parents[2] / "examples" / "langchain_chat.py"
    monkeypatch.setattr("sys.argv", [str(example), served.url])
    found = runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out.splitlines()
    assert isinstance(found["town"], found["Town"])
    assert f"town: {found['town']}" in out
    given = found["call"]["args"]
    assert out[-1] == f"call: weather {given} = {found['weather'].invoke(given)}"
