"""Texts under a thinking budget: any drafter, draft length, batch and schedule gives those of plain
decoding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, EngineConfig, SamplingParams

pytestmark = pytest.mark.weights

TEMPLATE = """{% for m in messages %}{{ m.content }}
{% endfor %}<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}"""
CLOSING = "\n</think>\n\n"
# The first thoughts are open; the second answer opens none.
PROMPTS = ["def quicksort(items):\n    <think>\n", "Once upon a time", "import os\n<think>"]
WAYS: dict[str, dict[str, Any]] = {
    "model": {"drafter": "model", "k": 4},
    "one": {"drafter": "model", "k": 1, "batch_size": 3},
    "long": {"drafter": "model", "k": 8, "batch_size": 2},
    "tree": {"drafter": "model", "k": 4, "tree_nodes": 9},
    "ngram": {"drafter": "ngram", "k": 6, "batch_size": 3},
    "portfolio": {"drafter": "portfolio", "k": 5},
    "stages": {"drafter": "model", "k": 4, "fused_round": False},
    "pdv": {"drafter": "model", "k": 3, "batch_size": 3, "schedule": "pdv"},
    "ssd": {"drafter": "model", "k": 3, "schedule": "ssd", "hybrid_threshold": 0},
    "coupled": {"drafter": "model", "k": 4, "sampler": "coupled"},
}
DRAWN = {"temperature": 0.9, "seed": 5, "sampler": "coupled"}


def opened(template: Path, **settings: Any) -> LLM:
    common: dict[str, Any] = {"chat_template": str(template), "context": 400, "watchdog": "off"}
    return LLM(config=EngineConfig(**(common | settings)))


def params(budget: int, **more: Any) -> SamplingParams:
    """The first rounds of a large budget are far from it, and native where rounds are."""
    limit = 150 if budget > 100 else 24
    return SamplingParams(max_tokens=limit, thinking_budget=budget, ignore_eos=True, **more)


def texts(llm: LLM, **more: Any) -> list[Any]:
    """Under each budget; those of a seed under the short ones alone."""
    asked = [(PROMPTS, 0), (PROMPTS, 7), *([] if more else [(PROMPTS[:1], 140)])]
    found = [llm.generate(prompts, params(budget, **more)) for prompts, budget in asked]
    return [(r.token_ids, r.thought_tokens, r.thoughts_cut) for part in found for r in part]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


@cache
def plain(template: Path, drawn: bool) -> list[Any]:
    with opened(template, drafter="none", batch_size=3) as llm:
        return texts(llm, **(DRAWN if drawn else {}))


def test_thoughts_end_where_the_budget_does(template: Path) -> None:
    with opened(template, drafter="none") as llm:
        free = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True))[0]
        assert (free.thought_tokens, free.thoughts_cut) == (24, None)
        for budget in (0, 7):
            found = llm.generate(PROMPTS[0], params(budget))[0]
            assert found.token_ids[:budget] == free.token_ids[:budget]
            before = llm.tokenizer.decode(free.token_ids[:budget])
            assert found.text.startswith(before + CLOSING)
            assert (found.thought_tokens, found.thoughts_cut) == (budget, True)
        untouched = llm.generate(PROMPTS[1], params(0))[0]
        assert (untouched.thought_tokens, untouched.thoughts_cut) == (0, False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_plain_decoding(template: Path, way: str) -> None:
    with opened(template, **WAYS[way]) as llm:
        assert texts(llm) == plain(template, False)


@pytest.mark.sample(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["model", "tree", "ngram"])
def test_a_seed_s_texts_are_those_of_plain_decoding(template: Path, way: str) -> None:
    with opened(template, **WAYS[way]) as llm:
        assert texts(llm, **DRAWN) == plain(template, True)


def test_a_grammar_of_thoughts_and_an_answer_is_followed(template: Path) -> None:
    """As the server writes grammars of models that think."""
    answer = """%llguidance {}
ANY: /(.|\\n)*/
thinks[lazy]: ANY "</think>"
start: thinks /\\n{0,2}/ ("yes" | "no")"""
    found: list[Any] = []
    for settings in (WAYS["ngram"], WAYS["model"], {"drafter": "none"}):
        with opened(template, **settings) as llm:
            limited = SamplingParams(max_tokens=40, thinking_budget=6)
            found.append(llm.generate(PROMPTS[0], limited, grammar=answer)[0])
    assert len({result.token_ids for result in found}) == 1
    thoughts, _, answered = found[0].text.partition(CLOSING)
    assert answered in ("yes", "no")
    assert found[0].thought_tokens == 6
    assert thoughts


def test_a_budget_without_thoughts_to_end_is_noted() -> None:
    with LLM(config=EngineConfig(drafter="none")) as llm:
        noted = llm.generate("Hello", SamplingParams(max_tokens=2, thinking_budget=3))[0]
    assert "thinking_budget: the chat template has no thoughts to end" in noted.notes
    assert noted.thought_tokens is None
