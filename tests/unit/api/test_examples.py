"""Programs of examples/ run to their end, and show what their first line says."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checks.json_schema import is_valid
from doubles.live_server import live_server
from doubles.scripted_port import CARD, ScriptedPort
from doubles.served import served
from outrider.models.loading import resolve
from outrider.server.port import EngineCard, EngineRequest

pytestmark = [pytest.mark.wide, pytest.mark.weights, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[3] / "examples"
# Those that run here; others need a client of tests/clients, or have tests of their own.
NAMES = {
    *("agent", "batch", "chat", "compare_drafters"),
    *("replace_generate", "sampled", "stream", "structured"),
}
Ran = tuple[str, dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """What an example prints, and its globals."""

    def run(name: str, *words: str) -> Ran:
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr("sys.argv", [str(path), *words])
        found = runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out, found

    return run


def test_every_example_says_how_it_is_run() -> None:
    named = {path.stem for path in EXAMPLES.glob("*.py")}
    assert named - {"langchain_chat"} == NAMES
    for name in named:
        doc = (EXAMPLES / f"{name}.py").read_text("utf-8").split('"""')[1]
        assert f"python examples/{name}.py" in doc


def test_a_text_is_streamed(run: Callable[..., Ran]) -> None:
    out, found = run("stream", "import os")
    assert (
        out == f"import os{found['llm'].last_result.text}\n{found['llm'].last_result.summary()}\n"
    )


def test_a_chat_has_two_turns(run: Callable[..., Ran]) -> None:
    out, found = run("chat")
    assert [one["role"] for one in found["messages"]] == ["user", "assistant"] * 2
    assert all(one["content"] in out for one in found["messages"])


def test_prompts_of_a_batch_have_texts_in_order(run: Callable[..., Ran]) -> None:
    out, found = run("batch")
    places = [out.index(repr(prompt)) for prompt in found["PROMPTS"]]
    assert places == sorted(places)
    assert all(result.text in out for result in found["results"])


def test_a_seed_has_one_text_for_all_drafters(run: Callable[..., Ran]) -> None:
    out, found = run("sampled")
    assert out.endswith("for all drafters: True\n")
    assert all(found["texts"].values())


def test_every_drafter_writes_the_same(run: Callable[..., Ran]) -> None:
    out, _ = run("compare_drafters")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["none", "model", "model", "ngram", "ngram"]
    assert {row[-1] for row in rows} == {"True"}
    assert all(int(row[2]) < int(rows[0][2]) for row in rows[1:3])


def test_structured_output_follows_its_schema(run: Callable[..., Ran]) -> None:
    out, found = run("structured")
    shown = json.loads(out[: out.rindex("}") + 1])
    assert is_valid(shown, found["SCHEMA"])
    assert json.loads(found["result"].text) == shown


def test_generate_of_transformers_is_replaced(run: Callable[..., Ran]) -> None:
    pytest.importorskip("transformers")
    out, found = run("replace_generate")
    assert out.endswith("the same ids: True\n")
    assert all(text in out for text in found["PROMPTS"])


class CallingPort(ScriptedPort):
    """An engine whose model calls tools as Hermes does: `num_calls` times, then it answers."""

    def __init__(self, num_calls: int) -> None:
        super().__init__(self._written)
        self.num_calls = num_calls

    @property
    def card(self) -> EngineCard:
        return msgspec.structs.replace(
            CARD, window=4096, chat_template="{{ tools }}<tool_call> arguments"
        )

    async def start(self) -> None:
        return

    def _written(self, _: EngineRequest) -> list[str]:
        if len(self.requests) > self.num_calls:
            return ["It is ", str(self.chats[-1].messages[-1]["content"])]
        call = {"name": "multiply", "arguments": {"a": 17, "b": 23}}
        return ["<tool_call>", json.dumps(call), "</tool_call>"]


@pytest.mark.parametrize("num_calls", [1, 2, 99])
def test_an_agent_sends_results_until_it_has_an_answer(
    num_calls: int, run: Callable[..., Ran]
) -> None:
    port = CallingPort(num_calls)

    async def ran() -> Ran:
        async with live_server(port) as live:
            return await asyncio.to_thread(run, "agent", f"http://127.0.0.1:{live.number}")

    out, found = asyncio.run(ran())
    turns = min(num_calls + 1, found["MAX_TURNS"])
    end = "answer: It is 391" if num_calls < turns else f"no answer after {turns} turns"
    called = ["call: multiply(17, 23) = 391"] * min(num_calls, turns)
    assert out.splitlines() == [*called, end]
    assert len(port.requests) == turns
    _, call, result = port.chats[1].messages
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


HERMES = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }} Call as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def calling(tmp_path: Path) -> str:
    """The embedded target under a chat template that knows of tools."""
    for file in resolve("outrider/embedded").iterdir():
        if file.name == "tokenizer_config.json":
            told = json.loads(file.read_text("utf-8")) | {"chat_template": HERMES}
            (tmp_path / file.name).write_text(json.dumps(told), "utf-8")
        else:
            (tmp_path / file.name).symlink_to(file)
    return str(tmp_path)


def test_an_agent_has_a_small_model_call_because_it_must(
    calling: str, run: Callable[..., Ran]
) -> None:
    with served("--drafter", "ngram", model=calling) as server:
        out, found = run("agent", server.url)
        assert server.end() == 0
    calls = re.findall(r"^call: (\w+)\((\d+), (\d+)\) = (\d+)$", out, re.MULTILINE)
    assert calls
    for name, a, b, result in calls:
        assert found["FUNCTIONS"][name](int(a), int(b)) == int(result)
    results = [one["content"] for one in found["messages"] if one["role"] == "tool"]
    assert results == [result for *_, result in calls]
