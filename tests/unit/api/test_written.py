"""A text that was broken off goes on elsewhere as it would have: same tokens, same text."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.core.errors import ConfigError

pytestmark = pytest.mark.weights
PROMPT = "def quicksort(items):"
HALF = 13


@pytest.fixture(scope="module", params=["greedy", "match", "coupled"])
def case(request: pytest.FixtureRequest) -> tuple[LLM, SamplingParams]:
    kind: str = request.param
    llm = LLM(threads=1, k=3, sampler="match" if kind == "greedy" else kind)
    warm = 0.0 if kind == "greedy" else 0.9
    return llm, SamplingParams(
        max_tokens=40, temperature=warm, seed=7, ignore_eos=True, presence_penalty=0.4
    )


def finished(llm: LLM, params: SamplingParams, written: tuple[int, ...]) -> tuple[str, list[int]]:
    handle = llm.submit(PROMPT, params, written=written)
    while not handle.done:
        llm.advance()
    events = list(handle.events())
    result = handle.result()
    new = [token for event in events for token in event.token_ids]
    assert list(result.token_ids) == [*written, *new]
    assert result.text.endswith("".join(event.text for event in events))
    return result.text, list(result.token_ids)


@pytest.mark.parametrize("length", [1, HALF, 39])
def test_goes_on_with_the_same_text(case: tuple[LLM, SamplingParams], length: int) -> None:
    llm, params = case
    whole = llm.generate(PROMPT, params)[0]
    text, ids = finished(llm, params, whole.token_ids[:length])
    assert (text, ids) == (whole.text, list(whole.token_ids))


def test_a_stop_string_may_lie_across_the_break() -> None:
    llm = LLM(threads=1, drafter="none")
    whole = llm.generate(PROMPT, max_tokens=40, ignore_eos=True)[0]
    event_ids = whole.token_ids
    cut = llm.generate(PROMPT, max_tokens=len(event_ids) - 4, ignore_eos=True)[0].text
    stop = whole.text[len(cut) - 3 : len(cut) + 2]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop])
    ended = llm.generate(PROMPT, params)[0]
    assert ended.finish_reason == "stop"
    text, ids = finished(llm, params, ended.token_ids[:-1])
    assert (text, ids) == (ended.text, list(ended.token_ids))


def test_a_whole_text_cannot_go_on() -> None:
    llm = LLM(threads=1, drafter="none")
    ids = llm.generate(PROMPT, max_tokens=4, ignore_eos=True)[0].token_ids
    with pytest.raises(ConfigError, match="a whole text"):
        llm.submit(PROMPT, SamplingParams(max_tokens=4), written=ids)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        llm.submit(PROMPT, SamplingParams(max_tokens=4), written=[10**7])
