"""`outrider models load`, `ollama` and `ping`: what they print, and how they fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from doubles.command_line import Command
from doubles.json_server import Answer, serving

TAGS = Answer.of(
    {
        "models": [
            {
                "name": "llama3:8b",
                "size": 4_661_224_676,
                "details": {"parameter_size": "8.0B", "quantization_level": "Q4_0"},
            }
        ]
    }
)
WRITTEN = Answer.of({"response": " jumps", "eval_count": 2, "eval_duration": 500_000_000})
SERVED = Answer.of({"data": [{"id": "m"}]})
COMPLETED = Answer.of({"choices": [{"text": " jumps"}], "usage": {"completion_tokens": 3}})


def read(out: str) -> dict[str, Any]:
    return json.loads(out)


@pytest.mark.weights
def test_load_prints_the_way_from_files_to_tokens(outrider: Command) -> None:
    shown = outrider("models", "load", "outrider/embedded", "--n-tokens", "4")
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    starts = ("tokenizer", "model", "parameters 7,999,744", "memory 16 MB", "text", "OK")
    assert all(
        line.startswith(f"[loader] {start}") for line, start in zip(lines, starts, strict=True)
    )
    assert "The quick brown fox" in lines[-2]


@pytest.mark.weights
def test_load_takes_a_dtype_and_a_number_of_tokens(outrider: Command) -> None:
    words = ("models", "load", "outrider/embedded-draft", "--dtype", "float32", "--json")
    record = read(outrider(*words, "--n-tokens", "3").out)
    assert record["ok"]
    assert record["weights_bytes"] == 4 * record["parameters"]
    assert 1 <= len(record["token_ids"]) <= 3
    assert "float32" in record["model"]


@pytest.mark.weights
def test_load_quantises_by_the_name_of_the_format(outrider: Command) -> None:
    words = ("models", "load", "outrider/embedded", "--n-tokens", "3", "--json", "--dtype")
    plain, small = (read(outrider(*words, dtype).out) for dtype in ("bfloat16", "int4"))
    assert small["ok"]
    assert "int4" in small["model"]
    assert small["weights_bytes"] < plain["weights_bytes"] / 1.9


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ([], 2, "MODEL is missing"),
        (["outrider/embedded", "--dtype", "float61"], 2, "did you mean 'float16'?"),
        (["outrider/embedded", "--n-tokens", "0"], 2, "--n-tokens must be between"),
        (["no such model"], 3, "no such model"),
        (["nobody/nothing"], 3, "nobody/nothing"),
    ],
)
def test_load_explains_what_is_wrong(
    outrider: Command, words: list[str], code: int, problem: str
) -> None:
    shown = outrider("models", "load", *words)
    assert (shown.code, shown.out) == (code, "")
    assert problem in shown.err


def test_ollama_shows_its_models(outrider: Command) -> None:
    with serving({"GET /api/tags": TAGS}) as server:
        shown = outrider("models", "ollama", "--host", server.url)
    assert shown.code == 0, shown.err
    header, row = shown.out.splitlines()[1:]
    assert header.split() == ["model", "params", "quant", "size"]
    assert row.split() == ["llama3:8b", "8.0B", "Q4_0", "4.7", "GB"]


def test_ollama_writes_a_test_completion(outrider: Command) -> None:
    with serving({"GET /api/tags": TAGS, "POST /api/generate": WRITTEN}) as server:
        words = ("models", "ollama", "--host", server.url, "--model", "llama3:8b")
        shown = outrider(*words, "--prompt", "A fox", "--max-tokens", "5")
        assert "A fox jumps" in shown.out
        assert "2 tokens, 4 tok/s (Ollama's figures)" in shown.out
        assert server.asked[-1].body["options"]["num_predict"] == 5
        record = read(outrider(*words, "--json").out)
    assert record["reply"]["text"] == " jumps"
    assert record["models"][0]["quantization"] == "Q4_0"


def test_ollama_that_is_not_running_is_exit_3_with_a_hint(outrider: Command) -> None:
    with serving({}) as server:
        url = server.url
    shown = outrider("models", "ollama", "--host", url)
    assert shown.code == 3
    assert f"Ollama is not running at {url}" in shown.err
    assert "try: start it with `ollama serve`" in shown.err
    assert outrider("models", "ollama", "--host", "localhost").code == 2


def test_ping_times_a_completion(outrider: Command) -> None:
    with serving({"GET /v1/models": SERVED, "POST /v1/completions": COMPLETED}) as server:
        shown = outrider("models", "ping", "--url", server.url)
        assert shown.code == 0, shown.err
        assert f"{server.url} serves m" in shown.out
        assert "3 tokens in" in shown.out
        record = read(outrider("models", "ping", "--url", server.url, "--json").out)
    assert (record["model"], record["text"], record["num_tokens"]) == ("m", " jumps", 3)
    assert record["tokens_per_second"] > 0


def test_ping_says_when_nobody_is_there(outrider: Command) -> None:
    with serving({}) as server:
        url = server.url
    shown = outrider("models", "ping", "--url", url, "--retries", "0", "--timeout", "1")
    assert shown.code == 3
    assert "is the server running?" in shown.err
