"""Structured output of the embedded pair: what is written is what was asked for, and is the text of
plain decoding whatever drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache

import pytest

from checks.documents import Document
from checks.json_schema import is_valid
from doubles.schemas import ENDLESS, SCHEMAS
from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.grammar import _LIMITS  # pyright: ignore[reportPrivateUsage]
from outrider.api.result import GenerationResult
from outrider.core.errors import ConfigError

pytestmark = [pytest.mark.weights, pytest.mark.slow]

# White space within JSON is bounded, but not short.
MOST = 300
DRAFTING: dict[str, dict[str, object]] = {
    "ngram": {"drafter": "ngram", "k": 4},
    "model": {"drafter": "model", "k": 4},
    "tree": {"drafter": "model", "k": 4, "tree_nodes": 9},
    "portfolio": {"drafter": "portfolio", "k": 5},
}
OFF: dict[str, object] = {"drafter": "none"}


def opened(settings: dict[str, object]) -> LLM:
    common = {"batch_size": 4, "context": 400, "watchdog": "off", "profile": True}
    return LLM(config=EngineConfig(**{**common, **settings}))  # pyright: ignore[reportArgumentType]


def written(
    llm: LLM, params: SamplingParams, names: Iterable[str] = SCHEMAS
) -> dict[str, GenerationResult]:
    """A text of each of these schemas."""
    handles = {
        name: llm.submit(f"As JSON, {name}: ", params, schema=SCHEMAS[name]) for name in names
    }
    while llm.has_work:
        llm.advance()
    return {name: handle.result() for name, handle in handles.items()}


def check_valid(name: str, result: GenerationResult) -> None:
    assert result.finish_reason == "stop" or name == ENDLESS, (name, result.text)
    if result.finish_reason == "stop":
        assert is_valid(json.loads(result.text), SCHEMAS[name]), (name, result.text)


@cache
def plain() -> dict[str, tuple[int, ...]]:
    found = written(opened(OFF), SamplingParams(max_tokens=MOST))
    for name, result in found.items():
        check_valid(name, result)
    return {name: result.token_ids for name, result in found.items()}


@pytest.mark.parametrize("name", DRAFTING)
def test_greedy_texts_are_plain_decodings_and_valid(name: str) -> None:
    found = written(opened(DRAFTING[name]), SamplingParams(max_tokens=MOST))
    assert {schema: result.token_ids for schema, result in found.items()} == plain()
    rounds = sum(result.stats.num_rounds for result in found.values())
    assert rounds < sum(map(len, plain().values()))
    assert "forced" in {trace.drafter for result in found.values() for trace in result.rounds}


# Drafters under a grammar by rules are in tests/distribution/test_grammar_distribution.py. Other
# combinations are `deep`.
@pytest.mark.sample(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("sampler", ["block", "coupled"])
@pytest.mark.parametrize("name", DRAFTING)
def test_drawn_texts_are_valid(name: str, sampler: str) -> None:
    llm = opened({**DRAFTING[name], "sampler": sampler})
    params = SamplingParams(max_tokens=MOST, temperature=1.0, seed=3)
    found = written(llm, params, [*SCHEMAS][::2])
    for schema, result in found.items():
        check_valid(schema, result)


def test_the_other_structures() -> None:
    llm = opened(DRAFTING["model"])
    params = SamplingParams(max_tokens=40, temperature=0.8)
    (text,) = (r.text for r in llm.generate("A number: ", params, regex="[0-9]{3}-[a-c]{2}"))
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", text)
    results = llm.generate(["A colour: "] * 3, params, choices=["red", "green", "dark blue"])
    assert {result.text for result in results} <= {"red", "green", "dark blue"}
    events = llm.stream("Sum: ", params, grammar='start: "1" | "1+" start')
    assert re.fullmatch(r"(1\+)*1?", "".join(event.text for event in events))
    json.loads(llm.generate("{", SamplingParams(max_tokens=4), schema={"const": 1})[0].text)


def test_several_completions_have_a_parser_each() -> None:
    params = SamplingParams(max_tokens=60, temperature=1.0, n=3)
    schema = SCHEMAS["an object"]
    results = opened(DRAFTING["model"]).generate("As JSON: ", params, schema=schema)
    assert len(results) == 3
    assert all(is_valid(json.loads(result.text), schema) for result in results)


def test_what_cannot_be_is_refused_before_it_runs() -> None:
    llm = opened(DRAFTING["model"])
    with pytest.raises(ConfigError, match="allowed and regex"):
        llm.stream("x", allowed=lambda text: None, regex="a")
    with pytest.raises(ConfigError, match="ignore_eos: a text of a regex ends"):
        llm.generate("x", SamplingParams(ignore_eos=True), regex="a")
    with pytest.raises(ConfigError, match="regex: it cannot be followed"):
        llm.submit("x", regex="(")


def test_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = Document.named("docs/structured.md").text
    (block,) = re.findall("```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})  # noqa: S102 - our own page
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("{'name': ")
    assert shown[1] in ("yes", "no")


def test_a_grammar_that_becomes_too_much_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = opened(DRAFTING["model"])
    params = SamplingParams(max_tokens=30)
    good = llm.submit("As JSON: ", params, schema=SCHEMAS["an object"])
    with monkeypatch.context() as patch:
        patch.setitem(_LIMITS, "step_max_items", 15)
        deep = llm.submit("1", params, grammar='start: x "2"\nx: "1" | x x')
    free = llm.submit("def f(", params)
    while llm.has_work:
        llm.advance()
    with pytest.raises(ConfigError, match="too much to follow"):
        deep.result()
    assert is_valid(json.loads(good.result().text), SCHEMAS["an object"])
    assert free.result().token_ids
